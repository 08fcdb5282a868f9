"""An attempt to take weights further: what the gate keeps, what a rejection puts back, which settings are refused."""

import pytest
import torch

import rlkernels
from rlkernels.extrapolation import Attempt, Limits


def model():
    """A weight as it is trained: a float32 master, and a parameter that somebody moved away from it."""
    master = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    return [master, (master + 0.5).bfloat16()]


def judge(places, right, *, attempt=None, gate=None, available=80):
    """Tries to add 1 to the weight; ``right``: mean of the master -> share of right answers."""
    asked, changes, start = [], [], places[0].clone()

    def evaluate(rows):
        asked.append(list(rows))
        assert not torch.is_grad_enabled()
        return [right(float((places[0] - start).mean()))] * len(rows)

    tries = (attempt or Attempt(prompts=80)).judge(
        gate or rlkernels.Gate(0.05), {"w": start + 1}, {"w": places}, evaluate, available=available,
        changed=lambda: changes.append(places[0].clone()),
    )  # fmt: skip
    return tries, asked, changes


@pytest.mark.parametrize("right", [lambda moved: 1.0, lambda moved: float(moved < 0.1)])
def test_what_it_rejects_is_put_back_bit_for_bit(right):
    places = model()
    before = [place.clone() for place in places]
    tries, _, changes = judge(places, right, attempt=Attempt(prompts=80, max_tries=2, shrink=0.25))
    assert [(t["factor"], t["accepted"]) for t in tries] == [(1.0, False), (0.25, False)]
    assert all(torch.equal(place, value) for place, value in zip(places, before))
    assert torch.equal(changes[-1], before[0]), "told after the weights are back"


def test_an_evaluation_that_fails_leaves_everything_as_it_was():
    places, gate = model(), rlkernels.Gate(0.05)
    before = [place.clone() for place in places]
    with pytest.raises(ZeroDivisionError):
        judge(places, lambda moved: 0.0 if moved < 0.5 else 1 / 0, gate=gate)
    assert all(torch.equal(place, value) for place, value in zip(places, before))


def test_objections_and_prediction_are_those_of_the_settings():
    base = {"w": torch.zeros(6, 5)}
    trajectory, step = rlkernels.RankOneTrajectory(base), torch.outer(torch.ones(6), torch.arange(5.0))
    for s in (1, 2, 3, 4):
        trajectory.track({"w": s * step}, step=s, accuracy=0.1 * s)
    assert Attempt(predictor="secant").refusal(trajectory) is None
    strict = Limits(min_rise=0.9)
    assert Attempt(limits=strict).refusal(trajectory).reason == "flat accuracy"
    found = Attempt(predictor="secant", horizon=2.5).predict(trajectory, {"w": 4 * step})
    torch.testing.assert_close(found["w"], 10 * step)
    by_accuracy = Attempt(predictor="pls").predict(trajectory, {"w": 4 * step})  # to 1, which rises by 0.1 a step
    torch.testing.assert_close(by_accuracy["w"], 10 * step)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: Attempt(predictor="oracle"), ValueError, "predictor must be one of .* got 'oracle'"),
    (lambda: Attempt(horizon=1), ValueError, "horizon must be above 1, got 1"),
    (lambda: Attempt(horizon="2"), TypeError, "horizon must be a number, got '2'"),
    (lambda: Attempt(prompts=0), ValueError, "prompts must be >= 1, got 0"),
    (lambda: Attempt(max_tries=1.5), TypeError, "max_tries must be an integer, got 1.5"),
    (lambda: Attempt(shrink=1.0), ValueError, r"shrink must be between 0 and 1 \(exclusive\), got 1.0"),
    (lambda: rlkernels.Gate(1.0), ValueError, "level must be between 0 and 1"),
])  # fmt: skip
def test_bad_settings_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_scores_that_are_not_finite_use_up_no_evidence():
    gate = rlkernels.Gate(0.05)
    for after, before, name in (([1.0, float("nan")], [0.0, 0.0], "after"), ([1.0], [float("inf")], "before")):
        with pytest.raises(ValueError, match=f"{name} must hold finite scores, got (nan|inf)"):
            gate.compare(after, before)
    with pytest.raises(ValueError, match="needs the same prompts"):
        gate.compare([1.0], [])
    for wrong in ([float("nan")] * 8, []):
        with pytest.raises(ValueError, match="finite scores, got nan|the same prompts"):
            gate.compare_in_parts(lambda n, wrong=wrong: wrong[:n], lambda n: [0.0] * n, 8)
    assert gate.comparisons == 0
