"""Trajectories of rank-1 updates, predictors on them, and the reasons to refuse; attempts to take weights further: what
the gate keeps, what a rejection puts back."""

import math
from dataclasses import replace

import pytest
import torch
from support import assert_equal

import rlkernels
from rlkernels import RankOneTrajectory
from rlkernels.extrapolation import PREDICTORS, Attempt, Limits, Target, extrapolate, refusal, skill
from rlkernels.extrapolation.trajectory import storage_noise
from rlkernels.rank1.ops import solve_deltas

M = 24
N = 40
LINES = sorted(PREDICTORS)


def matrix(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(seed, n):
    return matrix(seed, n) / matrix(seed, n).norm()


def run(update, *, steps=range(4, 25, 4), accuracy=lambda s: 0.4 + 0.01 * s, dtype=torch.float32, modules=("a", "b")):
    """Return a trajectory of modules whose delta after s steps is ``update(s, seed)``, and the last weights."""
    base = {name: (0.1 * matrix(i, M, N)).to(dtype) for i, name in enumerate(modules)}
    trajectory = rlkernels.RankOneTrajectory({name: torch.nn.Parameter(w) for name, w in base.items()})  # as of a model
    for s in steps:
        weights = {name: (w.float() + update(s, i)).to(dtype) for i, (name, w) in enumerate(base.items())}
        trajectory.track(weights, step=s, accuracy=accuracy(s))
    return trajectory, weights


def line(s, seed):
    """Return one direction that grows in a line."""
    return 1e-3 * s * torch.outer(unit(10 + seed, M), unit(20 + seed, N))


def noisy(s, seed):
    """Return a line plus noise that differs from step to step."""
    return line(s, seed) + 2e-5 * matrix(100 * s + seed, M, N)


def test_x_is_the_delta_times_the_latest_direction():
    trajectory, weights = run(noisy)
    points = trajectory.points("a")
    update = rlkernels.top1_delta(weights["a"], trajectory.base["a"])
    assert abs(float(points.v @ update.v)) > 0.9999
    expected = (weights["a"] - trajectory.base["a"]) @ points.v
    assert torch.allclose(points.x[-1], expected, rtol=1e-4, atol=1e-7)
    assert points.steps.tolist() == [4, 8, 12, 16, 20, 24]
    assert (points.cosine > 0.9).all()
    assert torch.allclose(points.frobenius[-1].float(), (weights["a"] - trajectory.base["a"]).norm(), rtol=1e-4)


def test_checkpoints_give_x_exactly():
    base = {"a": 0.1 * matrix(0, M, N)}
    saved = [{"a": base["a"] + noisy(s, 0) + 1e-3 * matrix(s, M, N)} for s in (4, 8, 12)]
    trajectory = rlkernels.RankOneTrajectory(base, rank=1)
    for s, weights in zip((4, 8, 12), saved):
        trajectory.track(weights, step=s, accuracy=0.5)
    exact = trajectory.exact_points(saved)["a"]
    rough = trajectory.points("a")
    for x, weights in zip(exact.x, saved):
        assert torch.allclose(x, (weights["a"] - base["a"]) @ exact.v, atol=1e-6)
    assert not torch.allclose(rough.x[0], exact.x[0], rtol=1e-2)
    with pytest.raises(ValueError, match="3 tracked steps, got 2"):
        trajectory.exact_points(saved[:2])


def test_signs_of_singular_vectors_do_not_matter(monkeypatch):
    plain, weights = run(noisy)
    flips = iter([1, -1, -1, 1, -1] * 2 + [1, 1])  # the latest direction keeps its sign, by which x is told
    import rlkernels.extrapolation.trajectory as module

    def flipped(*args, **options):
        directions = solve_deltas(*args, **options)
        signs = {name: next(flips) for name in directions}
        return {n: (update, left * signs[n], right * signs[n]) for n, (update, left, right) in directions.items()}

    monkeypatch.setattr(module, "solve_deltas", flipped)
    flipped_trajectory, _ = run(noisy)
    for name in plain.base:
        assert torch.allclose(plain.points(name).x, flipped_trajectory.points(name).x, atol=1e-6)
        assert plain.points(name).cosine.min() > 0.9
    for predictor in LINES:
        weights_of_plain, weights_of_flipped = (
            extrapolate(t, weights, Target(60), predictor=predictor) for t in (plain, flipped_trajectory)
        )
        assert all(torch.allclose(weights_of_plain[name], weights_of_flipped[name], atol=1e-5) for name in plain.base)


@pytest.mark.parametrize("keep_rest", [True, False])
@pytest.mark.parametrize("predictor", LINES)
def test_a_straight_line_is_continued_exactly(predictor, keep_rest):
    """PLS goes by accuracy, the others by step; here both say the same."""
    trajectory, weights = run(line)
    assert skill(trajectory, predictor) == pytest.approx(1, abs=1e-3)
    assert skill(trajectory, predictor, holdout=2) == pytest.approx(1, abs=1e-3)
    assert refusal(trajectory, predictor) is None
    still = RankOneTrajectory({"still": torch.ones(8, 6)} | trajectory.base)
    for step in range(1, 5):  # one module of a model may never move
        moved = {name: base + step / 4 * (weights[name] - base) for name, base in trajectory.base.items()}
        still.track({"still": torch.ones(8, 6)} | moved, step=step, accuracy=step / 8)
    assert skill(still, predictor) == pytest.approx(1, abs=1e-3) and refusal(still, predictor) is None
    predicted = extrapolate(trajectory, weights, Target(60, 1.0), predictor=predictor, keep_rest=keep_rest)
    assert not any(weight.requires_grad for weight in predicted.values())
    for i, name in enumerate(trajectory.base):
        assert torch.allclose(predicted[name], trajectory.base[name] + line(60, i), atol=2e-6)
    exact = {name: trajectory.points(name) for name in trajectory.base}
    predicted_again = extrapolate(
        trajectory, weights, Target(60, 1.0), predictor=predictor, keep_rest=keep_rest, points=exact
    )
    assert_equal(predicted_again, predicted)


def test_pls_by_hand():
    """Two entries, of which the second does not follow the accuracy as well: worked out on paper."""
    trajectory, _ = run(line)
    points = trajectory.points("a").until(3)
    y = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    x = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0]])
    prediction = PREDICTORS["pls"](replace(points, x=x, accuracy=y), Target(0, 0.5))
    # standardised first entry is (-1, 0, 1), the second has no covariance with y: w = (1, 0), t = (-1, 0, 1),
    # p = (1, 0), slope 0.1 per t; at 0.5, t is 3: 2 + 1 * 3 and the mean of the second
    assert prediction.tolist() == pytest.approx([5.0, 1 / 3])


def test_rank_1_alone_has_the_norm_of_the_whole_update():
    trajectory, weights = run(noisy)
    points = trajectory.points("a")
    rank_1_update = extrapolate(trajectory, weights, Target(24), keep_rest=False)["a"] - trajectory.base["a"]
    full_norm = points.frobenius[-1].float()
    expected = (
        torch.outer(points.x[-1], points.v) * full_norm / points.x[-1].norm()
    )  # no step ahead: the update as it is
    assert torch.allclose(rank_1_update, expected, atol=1e-6) and torch.allclose(
        rank_1_update.norm(), full_norm, rtol=1e-4
    )
    with_rest = extrapolate(trajectory, weights, Target(24))["a"]
    assert torch.allclose(with_rest, weights["a"], atol=1e-6)


def test_weights_that_do_not_fit_are_named():
    trajectory, weights = run(noisy)
    for bad, error, message in [
        ({"a": weights["a"]}, ValueError, "weights must hold every tracked module, but 'b' is missing"),
        (weights | {"a": weights["a"][:1]}, ValueError, "weights of 'a' must have shape"),  # which would be stretched
        (weights | {"a": weights["a"].long()}, TypeError, "weights of 'a' must be floating point"),
        ([weights["a"]], TypeError, "weights must be a dictionary"),
    ]:
        with pytest.raises(error, match=message):
            extrapolate(trajectory, bad, Target(24))
    with pytest.raises(ValueError, match="points must hold every tracked module, but 'b' is missing"):
        extrapolate(trajectory, weights, Target(24), points={"a": trajectory.points("a")})
    with pytest.raises(ValueError, match="trajectory must hold a tracked step, got none"):
        extrapolate(rlkernels.RankOneTrajectory(trajectory.base), weights, Target(24))
    with pytest.raises(ValueError, match=r"checkpoints\[0\] must hold every tracked module, but 'a' is missing"):
        trajectory.exact_points([{}])


def turning(s, seed):
    angle = torch.tensor(s / 24 * 3.0)
    v = angle.cos() * unit(20, N) + angle.sin() * (unit(21, N) - (unit(20, N) @ unit(21, N)) * unit(20, N))
    return 1e-3 * s * torch.outer(unit(10, M), v)


def pair(s, seed):
    """Return two directions of the same size."""
    u, _ = torch.linalg.qr(matrix(1, M, 2))
    v, _ = torch.linalg.qr(matrix(2, N, 2))
    return 1e-3 * s * u @ v.T


def jump(s, seed):
    """Return a path that turns back at the end, which no predictor can know."""
    return line(s if s < 24 else 12, seed)


REFUSALS = {
    "few points": (line, {"steps": (4, 8)}),
    "flat accuracy": (line, {"accuracy": lambda s: 0.5 + 0.001 * (s % 8)}),
    "low gap": (pair, {}),
    "no update": (lambda s, seed: torch.zeros(M, N), {}),
    "direction still turning": (turning, {}),
    "no skill": (jump, {}),
    "storage noise": (lambda s, seed: 0.05 * line(s, seed), {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("reason", REFUSALS)
@pytest.mark.parametrize("predictor", LINES)
def test_refusals_and_their_reasons(reason, predictor):
    update, options = REFUSALS[reason]
    trajectory, weights = run(update, **options)
    result = refusal(trajectory, predictor)
    assert result is not None and result.reason == reason, result
    assert str(result).startswith(reason + " (")
    if reason in ("low gap", "no update", "direction still turning", "storage noise"):
        assert extrapolate(trajectory, weights, Target(60), predictor=predictor) == {}, "such modules are left alone"


def test_modules_with_an_objection_are_left_alone_and_the_rest_is_extrapolated():
    def update(s, seed):
        return line(s, 0) if seed == 0 else 0.3 * turning(s, 1)

    trajectory, weights = run(update)
    assert refusal(trajectory, "secant") is None
    assert list(extrapolate(trajectory, weights, Target(60))) == ["a"]
    assert refusal(trajectory, "secant", Limits(min_share=0.99)).reason == "direction still turning"


def test_storage_noise_is_what_rounding_adds():
    base = (0.1 * matrix(0, 400, 300)).bfloat16()
    weight = base.float() + 1e-2 * matrix(1, 400, 300)
    noise = torch.linalg.matrix_norm(weight.bfloat16().float() - weight, 2)
    moved = (weight.bfloat16().float() - base.float()).norm().item()
    assert storage_noise(weight.bfloat16(), base, moved) == pytest.approx(float(noise), rel=0.25)
    assert storage_noise(base, base, 0.0) == 0


def test_state_comes_back_bit_for_bit():
    trajectory, _ = run(noisy)
    state = trajectory.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    restored = rlkernels.RankOneTrajectory(trajectory.base)
    restored.load_state_dict({name: value.clone() for name, value in state.items()})
    for t in (trajectory, restored):
        t.track({n: w + noisy(28, i) for i, (n, w) in enumerate(t.base.items())}, step=28, accuracy=0.7)
    for name, value in trajectory.state_dict().items():
        assert torch.equal(value, restored.state_dict()[name]), name
    empty = rlkernels.RankOneTrajectory(trajectory.base)
    restored.load_state_dict(empty.state_dict())
    assert len(restored) == 0 and restored.state_dict()["steps"].numel() == 0


@pytest.mark.parametrize("every", [1, 3])
def test_beyond_64_steps_points_stay_spread_over_all_of_training(every):
    """The predictors look at half of the steps and at thirds of the points, so all parts of training must stay."""
    trajectory, weights = run(line, steps=range(1, 64 * every + 1, every), accuracy=lambda s: s / 1000)
    assert trajectory.steps == list(range(1, 64 * every + 1, every)), "up to here all are kept"
    for step in range(64 * every + 1, 200 * every, every):
        weights = {name: base + line(step, i) for i, (name, base) in enumerate(trajectory.base.items())}
        trajectory.track(weights, step=step, accuracy=step / 1000)
        gaps = [b - a for a, b in zip(trajectory.steps, trajectory.steps[1:])]
        assert len(trajectory) == 64 and trajectory.steps[0] == 1 and trajectory.steps[-1] == step
        assert max(gaps) <= 2 * step / 63 + every
    assert trajectory.accuracy[-9:] == [s / 1000 for s in trajectory.steps[-9:]]
    for i, name in enumerate(trajectory.base):
        points = trajectory.points(name)
        truth = torch.stack([line(s, i) @ points.v for s in trajectory.steps])
        assert torch.allclose(points.x, truth, atol=1e-5), "each point kept what belongs to it"
        assert torch.allclose(points.frobenius, 1e-3 * points.steps, rtol=1e-3)
    assert refusal(trajectory, "secant") is None and skill(trajectory, "secant", holdout=21) > 0.99


@pytest.mark.parametrize(("change", "message"), [
    ({"b/left": None}, "b/left"),
    ({"a/right": torch.zeros(9, 2)}, r"a/right of state must have shape \[40, \d\], got \[9, 2\]"),
    ({"c/facts": torch.zeros(2, 7)}, r"must be of the modules \['a', 'b'\], got \['a', 'b', 'c'\]"),
])  # fmt: skip
def test_states_of_other_modules_and_damaged_ones_are_named(change, message):
    trajectory, _ = run(line, steps=(4, 8))
    state = {name: value for name, value in (trajectory.state_dict() | change).items() if value is not None}
    restored = rlkernels.RankOneTrajectory(trajectory.base)
    with pytest.raises((KeyError, ValueError), match=message):
        restored.load_state_dict(state)
    assert len(restored) == 0 and not restored._tracked["a"]


@pytest.mark.parametrize(("change", "message"), [
    ({"step": 8}, "step must be above 8"),
    ({"step": 2**63}, "step must be between"),
    *(({"step": step}, "step must be an integer, got") for step in (12.5, "12", True)),
    ({"accuracy": None}, "accuracy must be a number, got None"),
    ({"accuracy": 10**400}, "accuracy must be a number that a float holds"),
    ({"weights": {}}, "'a' is missing"),
    ({"weights": []}, "weights must be a dictionary, name -> weights, got list"),
    ({"weights": {"a": None, "b": None}}, "weights of 'a' must be a torch.Tensor, got NoneType"),
    ({"weights": {"a": torch.zeros(1, N), "b": torch.zeros(M, N)}}, "weights of 'a' must have shape"),
    (
        {"weights": {"a": torch.full((M, N), math.nan), "b": torch.zeros(M, N)}},
        r"'a': weight must be finite, got nan at \[0, 0\]",
    ),
])  # fmt: skip
def test_bad_tracking_is_named(change, message):
    trajectory, weights = run(line, steps=(4, 8))
    state = trajectory.state_dict()
    with pytest.raises((ValueError, TypeError), match=message):
        trajectory.track(**{"weights": weights, "step": 12, "accuracy": 0.5} | change)
    assert_equal(trajectory.state_dict(), state)


@pytest.mark.parametrize(("base", "setting", "error", "message"), [
    ({}, {}, ValueError, "at least one module"),
    ([torch.zeros(3, 3)], {}, TypeError, "base must be a dictionary, name -> weights, got list"),
    ({"a": torch.zeros(3)}, {}, ValueError, "'a' must have 2 dimensions"),
    (None, {"rank": 0}, ValueError, "rank must be between 1 and 2147483647, got 0"),
])  # fmt: skip
def test_bad_bases_and_settings_are_named(base, setting, error, message):
    with pytest.raises(error, match=message):
        rlkernels.RankOneTrajectory({"a": torch.zeros(3, 3)} if base is None else base, **setting)


def test_bad_holdouts_and_predictors_are_named():
    trajectory, weights = run(line, steps=(4, 8))
    with pytest.raises(TypeError, match="holdout must be an integer, got 1.5"):
        skill(trajectory, "secant", holdout=1.5)
    for predictor in ("oracle", ["pls"]):
        with pytest.raises(ValueError, match="predictor must be one of"):
            extrapolate(trajectory, weights, Target(24), predictor=predictor)


def model():
    """Return a weight in training: a float32 master, and a parameter that somebody moved away from it."""
    master = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    return [master, (master + 0.5).bfloat16()]


def judge(places, accuracy_of, *, attempt=None, gate=None, available=80):
    """Try to add 1 to the weight; ``accuracy_of``: mean of the master's change -> share of right answers."""
    evaluated_rows = []
    changes = []
    start = places[0].clone()

    def evaluate(rows):
        evaluated_rows.append(list(rows))
        assert not torch.is_grad_enabled()
        return [accuracy_of(float((places[0] - start).mean()))] * len(rows)

    tries = (attempt or Attempt(prompts=80)).judge(
        gate or rlkernels.Gate(0.05), {"w": start + 1}, {"w": places}, evaluate, available=available,
        changed=lambda: changes.append(places[0].clone()),
    )  # fmt: skip
    return tries, evaluated_rows, changes


@pytest.mark.parametrize("right", [lambda moved: 1.0, lambda moved: float(moved < 0.1)])
def test_what_it_rejects_is_put_back_bit_for_bit(right):
    places = model()
    original = [place.clone() for place in places]
    tries, _, changes = judge(places, right, attempt=Attempt(prompts=80, max_tries=2, shrink=0.25))
    assert [(t["factor"], t["accepted"]) for t in tries] == [(1.0, False), (0.25, False)]
    assert_equal(places, original)
    assert torch.equal(changes[-1], original[0]), "told after the weights are back"


def test_a_level_that_is_a_tensor_gives_plain_numbers():
    comparison = rlkernels.Gate(torch.tensor(0.05)).compare([1.0, 1.0], [0.0, 0.0])
    assert type(comparison.needed) is float and comparison.accepted is False


def test_an_evaluation_that_fails_leaves_everything_as_it_was():
    places = model()
    gate = rlkernels.Gate(0.05)
    original = [place.clone() for place in places]
    with pytest.raises(ZeroDivisionError):
        judge(places, lambda moved: 0.0 if moved < 0.5 else 1 / 0, gate=gate)
    assert_equal(places, original)


def test_objections_and_prediction_are_those_of_the_settings():
    base = {"w": torch.zeros(6, 5)}
    trajectory = rlkernels.RankOneTrajectory(base)
    step = torch.outer(torch.ones(6), torch.arange(5.0))
    for s in (1, 2, 3, 4):
        trajectory.track({"w": s * step}, step=s, accuracy=0.1 * s)
    assert Attempt(predictor="secant").refusal(trajectory) is None
    strict = Limits(min_rise=0.9)
    assert Attempt(limits=strict).refusal(trajectory).reason == "flat accuracy"
    prediction = Attempt(predictor="secant", horizon=2.5).predict(trajectory, {"w": 4 * step})
    torch.testing.assert_close(prediction["w"], 10 * step)
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
