"""The method of AlphaRL over a run, without a trainer: who decides, what is tracked, what the back-test leaves out."""

import copy
import re

import pytest
import torch
from support import assert_equal
from tiny import LENIENT

from rlkernels.extrapolation import Attempt, Extrapolator, Gate, Limits, forget_momentum, refusal, skill

DIRECTION = torch.outer(torch.linspace(-1, 1, 16), torch.linspace(1, 2, 24))


def tracked(rise=0.05, steps=9, gate=None, noise=0.0, **settings):
    """An extrapolator after some steps along a line, and the weight that moved."""
    options = {"track_steps": 1, "first_step": steps, "every": 10} | settings
    extrapolator = Extrapolator(Attempt(), gate, **options)
    weight = torch.zeros(16, 24)
    extrapolator.restart({"w": [weight]}, 0)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        weight += 1e-3 * DIRECTION + noise * torch.randn(16, 24, generator=generator)
        extrapolator.add_scores(step, [0.2 + rise * step])
        if extrapolator.tracks(step):
            extrapolator.track({"w": [weight]}, step)
    return extrapolator, weight


def attempt(extrapolator, weight, step=9, **options):
    jumped = []
    event = extrapolator.attempt(
        {"w": [weight]}, step, lambda rows: 1 / 0, available=80, forget=lambda names: jumped.extend(names), **options
    )
    return event, jumped


def test_the_first_process_decides_for_all():
    """Alone the second would refuse, as its accuracies are others, and go elsewhere, as its factors are."""
    first, weight = tracked()
    second, _ = tracked(rise=0.0, noise=1e-3)
    assert second.rules.refusal(second.trajectory).reason == "flat accuracy"
    other = weight.clone()
    decisions = []

    def record(function):
        decisions.append(copy.deepcopy(function()))
        return decisions[-1]

    event, jumped = attempt(first, weight, on_rank0=record)
    assert event["accepted"] and jumped == ["w"] and len(decisions) == 2
    replayed = iter(decisions)
    assert attempt(second, other, on_rank0=lambda function: next(replayed)) == (event, jumped)
    assert torch.equal(other, weight)
    torch.testing.assert_close(weight, 18e-3 * DIRECTION)  # without a gate: twice the steps


def test_steps_without_scores_and_the_anchor_are_not_tracked():
    extrapolator, weight = tracked(track_steps=2)
    assert extrapolator.trajectory.steps == [2, 4, 6, 8]
    extrapolator.restart({"w": [weight]}, 10)
    assert not extrapolator.tracks(10) and extrapolator.tracks(12)
    extrapolator.track({"w": [weight]}, 12)
    assert len(extrapolator.trajectory) == 0, "nobody knows how good these weights are"
    extrapolator.add_scores(12, [])
    extrapolator.add_scores(12, [1.0, 0.0])
    extrapolator.add_scores(12, [1.0, 1.0])
    extrapolator.track({"w": [weight]}, 12)
    assert extrapolator.trajectory.steps == [2] and extrapolator.trajectory.accuracy == [0.75]


def test_one_decision_is_all_with_every_0():
    extrapolator, weight = tracked(every=0)
    assert extrapolator.is_due(9)
    attempt(extrapolator, weight)
    assert not extrapolator.is_due(10**9) and extrapolator.anchor == 9
    again, weight = tracked(every=3)
    attempt(again, weight)
    assert not again.is_due(11) and again.is_due(12)


def test_the_base_is_as_compact_as_it_is_exact():
    extrapolator, _ = tracked()
    master = torch.tensor([[1.0, 2.0]])
    for difference, dtype in ((0.0, torch.bfloat16), (1e-6, torch.float32)):
        extrapolator.restart({"w": [master + difference, master.bfloat16()]}, 0)
        assert extrapolator.trajectory.base["w"].dtype == dtype


def test_the_back_test_leaves_out_a_third():
    extrapolator, _ = tracked(noise=1e-3)
    details = []
    for holdout in (None, 1, 3):
        objection = refusal(extrapolator.trajectory, "secant", Limits(min_skill=1.0, holdout=holdout))
        tested = float(re.search(r"back-test (\S+),", objection.detail)[1])
        assert tested == pytest.approx(skill(extrapolator.trajectory, "secant", holdout=holdout or 3), abs=0.006)
        details.append(objection.detail)
    assert details[0] == details[2] != details[1]


def test_a_state_goes_on_where_it_was():
    extrapolator, weight = tracked(gate=Gate(0.05, comparisons=2, position=7))
    state = copy.deepcopy(extrapolator.state_dict())
    restored = Extrapolator(Attempt(limits=LENIENT), Gate(0.05), track_steps=1, first_step=1, every=10)
    restored.load_state_dict(state)
    assert (restored.gate.comparisons, restored.gate.position, restored.next_attempt) == (2, 7, 9)
    for each in (extrapolator, restored):
        each.add_scores(10, [0.9])
        each.track({"w": [weight + 1e-3 * DIRECTION]}, 10)
    assert_equal(restored.trajectory.state_dict(), extrapolator.trajectory.state_dict())


def test_momentum_is_forgotten_matrix_by_matrix():
    stack = torch.nn.Parameter(torch.zeros(3, 4, 5))
    plain = torch.nn.Parameter(torch.zeros(4, 5))
    optimizer = torch.optim.Adam([stack, plain])
    (stack.sum() + plain.sum()).backward()
    forget_momentum(optimizer, {"experts": stack, "w": plain}, ["w"])  # before the first step there is none
    optimizer.step()
    forget_momentum(optimizer, {"experts": stack, "w": plain}, ["experts[1]", "w"])
    mean = optimizer.state[stack]["exp_avg"]
    assert mean[[0, 2]].all() and not mean[1].any() and not optimizer.state[plain]["exp_avg"].any()
    assert optimizer.state[plain]["exp_avg_sq"].all()


@pytest.mark.parametrize("settings", [{"track_steps": 0}, {"first_step": 0}, {"every": -1}], ids=str)
def test_bad_settings_are_named(settings):
    (name,) = settings
    options = {"track_steps": 1, "first_step": 1, "every": 1}
    for bad, error in ((settings, ValueError), ({name: "1"}, TypeError)):
        with pytest.raises(error, match=f"{name} must be"):
            Extrapolator(Attempt(), None, **options | bad)
