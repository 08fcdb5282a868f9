"""Prompts by what their answers can teach."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from python_trainer.accelerators.curriculum.accelerator import CANDIDATES, Curriculum
from python_trainer.accelerators.curriculum.field import Field, chance_to_differ, expected_p, log_evidence
from python_trainer.accelerators.curriculum.outcomes import Outcomes, features_of
from python_trainer.accelerators.curriculum.picture import asked, draw_chosen
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer

QUIET = Console(quiet=True)
LEVELS = {"low": 0.1, "median": 0.4, "high": 0.8}
GRID = torch.linspace(-60, 60, 240_001, dtype=torch.float64)


def lone_field(own=2.0, prompts=3):
    """Prompts with nothing in common but a number that is nearly known."""
    return Field(torch.ones(prompts, 1, dtype=torch.float64), mean=0.5, spread=1e-6, own=own, walk=0.0, memory=10.0)


def posterior(mean, deviation, right, tries):
    """Mode and -1 / curvature there of the posterior of f, on a grid."""
    log = -((GRID - mean) ** 2) / (2 * deviation**2) + right * GRID - tries * torch.nn.functional.softplus(GRID)
    at = int(log.argmax())
    h = GRID[1] - GRID[0]
    return GRID[at].item(), (-(h**2) / (log[at + 1] - 2 * log[at] + log[at - 1])).item()


@pytest.mark.parametrize(
    ("right", "tries"), [(0, 8), (8, 8), (3, 8), (1, 1), (0, 1), (0, 4096), (4096, 4096), (7, 1000)]
)
@pytest.mark.parametrize("own", [0.5, 2.0, 6.0])
def test_right_answers_move_the_belief_to_the_mode_of_the_posterior(right, tries, own):
    field = lone_field(own)
    field.observe_right(1, right, tries)
    mean, variance = (x.item() for x in field.moments(torch.tensor([1])))
    mode, curvature = posterior(0.5, own, right, tries)
    assert mean == pytest.approx(mode, abs=1e-3) and variance == pytest.approx(curvature, rel=2e-2)
    others, spread = field.moments(torch.tensor([0, 2]))
    assert torch.allclose(others, torch.tensor(0.5).double(), atol=1e-6)
    assert torch.allclose(spread, torch.tensor(own**2).double())


def test_a_measurement_is_shared_with_neighbours_as_the_joint_gaussian_says():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    field = Field(x, spread=1.5, own=0.7, walk=0.0, memory=1e12)
    field.observe(2, 1.3, noise=0.4)
    prior = 1.5**2 * x @ x.T + 0.7**2 * torch.eye(6, dtype=torch.float64)
    gain = prior[:, 2] / (prior[2, 2] + 0.4**2)
    mean, variance = field.moments(torch.arange(6))
    assert torch.allclose(mean, gain * 1.3)
    # what is a prompt's own and what is shared are kept apart, so the variance of the observed one is an upper bound
    exact = (prior - torch.outer(gain, prior[2])).diagonal()
    others = torch.tensor([0, 1, 3, 4, 5])
    assert torch.allclose(variance[others], exact[others]) and variance[2] >= exact[2]


def test_what_a_prompt_has_shown_fades_and_what_is_shared_drifts():
    field = Field(torch.ones(2, 1, dtype=torch.float64), spread=1.0, own=2.0, walk=0.1, memory=10.0)
    field.observe_right(0, 8, 8)
    before = field.moments(torch.tensor([0]))
    field.advance(10)
    later = field.moments(torch.tensor([0]))
    assert later[0] < before[0] and later[1] > before[1]
    field.advance(10_000)
    mean, variance = field.moments(torch.arange(2))
    assert mean[0] == pytest.approx(mean[1]) and variance[0] == pytest.approx(variance[1])
    assert field.covariance.item() > 10_000 * 0.1**2


def test_draws_have_the_moments():
    field = Field(features_of([3, 9, 30, 31]), spread=1.0, own=0.5, walk=0.1, memory=20.0)
    field.observe_right(1, 2, 8)
    keys = torch.arange(4)
    draws = field.draws(keys, 200_000, torch.Generator().manual_seed(0))
    mean, variance = field.moments(keys)
    assert torch.allclose(draws.mean(0), mean, atol=5 * (variance.max() / 200_000).sqrt().item())
    assert torch.allclose(draws.var(0), variance, rtol=0.03)


def test_expectations_against_a_fine_grid():
    mean, variance = torch.tensor([-3.0, 0.0, 2.0, 0.3]).double(), torch.tensor([4.0, 1e-12, 1.0, 9.0]).double()
    x = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    density = (-(x**2) / 2).exp()
    density /= density.sum()
    p = (mean[:, None] + variance.sqrt()[:, None] * x).sigmoid()
    assert torch.allclose(expected_p(mean, variance), p @ density, atol=2e-3)
    differ = (2 * p * (1 - p)) @ density
    assert torch.allclose(chance_to_differ(mean, variance), differ, atol=4e-3)
    evidence = (3 * p.log() + 5 * (1 - p).log()).exp() @ density
    for facts in zip(mean.tolist(), variance.tolist(), evidence.log().tolist()):
        assert log_evidence(*facts[:2], 3, 8) == pytest.approx(facts[2], abs=0.25)


def test_features_of_one_length_say_nothing():
    assert torch.allclose(features_of([7] * 5), torch.tensor([[1.0, 0, 0]] * 5).double(), atol=1e-9)
    x = features_of([2, 4, 8])
    assert torch.allclose(x[:, 1].mean(), torch.tensor(0.0).double(), atol=1e-12) and x[0, 1] < x[1, 1] < x[2, 1]


def answers(key, right, count=8, tokens=20, group=0, **changes):
    facts = {"prompt_key": key, "group": group} | changes
    return [
        Rollout([1], [5] * tokens, 0, [-0.2] * tokens, "stop", accuracy=float(i < right), **facts) for i in range(count)
    ]


def started(lengths, **settings):
    """One that may choose."""
    curriculum = Curriculum(CurriculumSettings(**{"database": None, "least_gain": 1.5} | settings))
    curriculum.begin(SimpleNamespace(prompts=[[1] * length for length in lengths], output_dir=Path(), console=None))
    return curriculum


def step_context(step, seed=0, size=8):
    return SimpleNamespace(
        step=step, seed=seed * 1000 + step, samples=0, telemetry={}, generation=SimpleNamespace(num_generations=size),
        groups_of=lambda keys: list(keys),
    )  # fmt: skip


def simulate(curriculum, chances, steps, count=16, seed=0, tokens=20):
    """Steps on prompts that are answered right with these chances -> for each step the keys, None for plain order."""
    generator, chosen = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        context = step_context(step, seed)
        keys = curriculum.choose(context, count)
        chosen.append(keys)
        if keys is None:
            keys = torch.randperm(len(chances), generator=generator)[:count].tolist()
        rollouts = []
        for group, key in enumerate(keys):
            right = int(torch.binomial(torch.tensor(8.0), torch.tensor(chances[key]), generator=generator))
            rollouts += answers(key, right, tokens=tokens if isinstance(tokens, int) else tokens[key], group=group)
        curriculum.collect(context, rollouts)
    return chosen


def test_chooses_what_has_a_spread_where_nothing_but_history_tells_it():
    chances = [0.001] * 60 + [0.999] * 60 + [0.5] * 30
    curriculum = started([9] * 150, least_gain=1.1)
    chosen = [keys for keys in simulate(curriculum, chances, 60)[30:] if keys is not None]
    assert len(chosen) >= 28
    share = sum(key >= 120 for keys in chosen for key in keys) / sum(map(len, chosen))
    assert share > 2.5 * 30 / 150  # of plain order a fifth
    assert {*map(len, chosen)} == {12}  # for the signal of 16


def test_length_tells_of_prompts_that_were_never_seen():
    lengths = [3 + i % 40 for i in range(400)]
    chances = [1 / (1 + 2.718 ** (0.5 * (length - 12))) for length in lengths]
    curriculum = started(lengths)
    simulate(curriculum, chances, 6)
    p = curriculum.outcomes.p(torch.arange(400))
    assert (curriculum.outcomes.best.seen > 0).sum() < 100
    assert (p - torch.tensor(chances)).abs().mean() < 0.1


def test_long_answers_have_to_bring_more():
    chances, tokens = [0.5] * 100, [10] * 50 + [200] * 50
    curriculum = started([5 + (i >= 50) for i in range(100)])
    chosen = [keys for keys in simulate(curriculum, chances, 30, tokens=tokens)[15:] if keys is not None]
    assert len(chosen) == 15 and sum(key < 50 for keys in chosen for key in keys) > 0.8 * sum(map(len, chosen))


def test_prompts_are_chosen_only_where_that_is_asked_for():
    chances = [0.5 if i % 4 == 0 else 0.0 for i in range(80)]
    assert simulate(started([9] * 80, least_gain=None), chances, 30).count(None) == 30
    assert CurriculumSettings().least_gain is None and simulate(started([9] * 80), chances, 30).count(None) < 30


@pytest.mark.parametrize("p", [0.5, 0.05, 0.95])
def test_plain_order_where_all_prompts_are_alike(p):
    assert simulate(started([9] * 100), [p] * 100, 40).count(None) == 40


def test_expectations_are_calibrated():
    generator = torch.Generator().manual_seed(1)
    chances = torch.randn(300, generator=generator).mul(2).sigmoid().tolist()
    curriculum = started([9] * 300, least_gain=1.1)
    simulate(curriculum, chances, 120)
    summary = curriculum.summary()
    assert summary["calibration_error"] < 0.08 and len(summary["reliability"]) == 10
    assert 0.75 < summary["signal_ratio"] < 1.33
    assert sum(row[0] for row in summary["reliability"]) >= 120 * 2 * 8
    assert curriculum.outcomes.best.own in (1.0, 2.5)  # in truth 2


def test_a_choice_that_does_not_bring_what_it_promised_is_given_up_for_a_time():
    curriculum = started([9] * 80)
    chosen = simulate(curriculum, [0.5 if i % 4 == 0 else 0.0 for i in range(80)], 30)
    assert chosen[-1] is not None and curriculum.trust() > 0.7
    assert torch.equal(curriculum.recent <= curriculum.signals, torch.tensor([True, True])) and curriculum.recent[0] > 0
    curriculum.recent = torch.tensor([20.0, 2.0], dtype=torch.float64)
    other = Curriculum(curriculum.settings)
    other.load_state_dict(curriculum.snapshot())
    for one in (curriculum, other):
        assert one.trust() == pytest.approx(4 / 22) and one.choose(step_context(31), 16) is None
    for step in range(32, 300):
        curriculum._enter(step_context(step))
    assert curriculum.trust() > 0.95


def test_no_prompt_is_forgotten():
    curriculum = started([9] * 50, floor=0.2)
    share = curriculum.shares(torch.tensor([1e-9] * 49 + [1.0]).double(), torch.ones(50).double())
    assert share.sum() == pytest.approx(1) and share.min() >= 0.2 / 50 and share[-1] > 0.8
    assert started([9] * 4, sharpness=0).shares(torch.tensor([1, 2, 3, 4.0]), torch.ones(4)).std() == 0


def test_of_many_prompts_a_sample_is_weighed():
    curriculum = started([5] * 200_000)
    keys = curriculum._candidates(torch.Generator().manual_seed(0))
    assert CANDIDATES * 0.95 < len(keys) <= CANDIDATES and keys.max() < 200_000 and len(keys.unique()) == len(keys)


def test_rewards_that_are_neither_right_nor_wrong_go_by_their_variance():
    curriculum, generator = started([9] * 60), torch.Generator().manual_seed(0)
    for step in range(1, 41):
        context = step_context(step)
        keys = curriculum.choose(context, 8) or torch.randperm(60, generator=generator)[:8].tolist()
        rollouts = []
        for group, key in enumerate(keys):
            rewards = torch.randn(8, generator=generator) * (2.0 if key < 12 else 0.05) + 3
            rollouts += [
                Rollout([1], [5] * 9, 0, [-0.2] * 9, "stop", prompt_key=key, group=group, merit=r.item())
                for r in rewards
            ]
        curriculum.collect(context, rollouts)
    assert not curriculum.outcomes.judged and "curriculum/brier" not in context.telemetry
    assert sum(key < 12 for key in keys) > len(keys) / 2


def test_continued_and_stored_answers_say_nothing_of_a_prompt():
    curriculum = started([9] * 4)
    curriculum.outcomes.advance(1)
    before = curriculum.outcomes.p(torch.arange(4))
    given = answers(0, 0)
    for rollout in given:
        rollout.prefix_len = 3
    curriculum.collect(step_context(1), given + answers(1, 0, group=1, importance_cap=2.0))
    assert torch.equal(curriculum.outcomes.p(torch.arange(4)), before)


def test_state_round_trip():
    lengths, chances = [3 + i % 7 for i in range(80)], [0.02 + 0.96 * (i % 3 == 0) / 2 for i in range(80)]
    curriculum = started(lengths)
    simulate(curriculum, chances, 25)
    other = Curriculum(curriculum.settings)
    other.load_state_dict(curriculum.snapshot())
    a, b = (simulate_from(c, chances) for c in (curriculum, other))
    assert a == b and any(keys is not None for keys in a)


def simulate_from(curriculum, chances):
    chosen = []
    for step in range(26, 31):
        context = step_context(step)
        chosen.append(curriculum.choose(context, 8))
        curriculum.collect(context, answers(step, step % 8))
    return chosen


def weights_of(trainer):
    return [parameter.detach().clone() for parameter in trainer.policy.model.parameters()]


def run(config, folder, **options):
    trainer = Trainer(config, folder, console=QUIET, **options)
    trainer.run()
    return trainer


@pytest.mark.parametrize("sampling", [False, True])
def test_without_a_sure_gain_a_run_is_plain_training_to_the_bit(make_config, tmp_path, sampling):
    rollout = {"dynamic_sampling": sampling, "max_sampling_rounds": 2}
    plain = run(make_config(max_steps=4, rollout=rollout), tmp_path / "plain")
    options = {"enabled": ["curriculum"], "curriculum": {"least_gain": 1e6, "stored_share": 0}}
    declined = run(make_config(max_steps=4, rollout=rollout, accelerators=options), tmp_path / "declined")
    assert all(torch.equal(a, b) for a, b in zip(weights_of(plain), weights_of(declined)))
    rows = read_metrics(tmp_path / "declined")[1:]
    assert all(row["curriculum/chosen_prompts"] == 0 and row["curriculum/sure_gain"] > 0 for row in rows)


EAGER = {"enabled": ["curriculum"], "curriculum": {"least_gain": 0, "sharpness": 8}}


@pytest.mark.parametrize("algorithm", [{}, {"advantage": "gae", "num_iterations": 2}])
@pytest.mark.parametrize("sampling", [False, True])
def test_interrupted_run_ends_with_the_same_weights(make_config, tmp_path, algorithm, sampling):
    rollout = {"dynamic_sampling": sampling, "max_sampling_rounds": 2}
    options = {"rollout": rollout, "accelerators": EAGER, "algorithm": algorithm}
    whole = run(make_config(max_steps=6, **options), tmp_path / "whole")
    run(make_config(max_steps=3, **options), tmp_path / "parts")
    rest = run(make_config(max_steps=6, **options), tmp_path / "parts", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(whole), weights_of(rest)))
    rows = read_metrics(tmp_path / "whole")[1:]
    assert sum(row["curriculum/chosen_prompts"] for row in rows) > 0
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())["accelerators"]["curriculum"]
    assert set(summary) == {"reliability", "calibration_error", "signal_ratio"}


def test_picture_of_what_was_asked(tmp_path):
    rows = [{"step": 0}, *({"step": i, **{f"curriculum/asked_{k}": v for k, v in LEVELS.items()}} for i in (1, 2))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert asked(tmp_path) == [(1, 0.1, 0.4, 0.8), (2, 0.1, 0.4, 0.8)]
    assert draw_chosen({"curriculum": [tmp_path]}, tmp_path / "chosen.png")
    assert (tmp_path / "chosen.png").stat().st_size > 5000
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not draw_chosen({"none": [tmp_path]}, tmp_path / "none.png")


def test_outcomes_of_a_group_of_one():
    outcomes = Outcomes([4, 5], memory=60)
    outcomes.learn(answers(0, 1, count=1))
    outcomes.learn(answers(1, 0, count=1, tokens=0))
    assert outcomes.p(torch.tensor([0])) > outcomes.p(torch.tensor([1]))


def test_auto_turns_on_what_declines_by_itself(make_config, tmp_path):
    config = make_config(max_steps=4, accelerators={"enabled": "auto"})
    assert config.accelerators.enabled == ["curriculum"]
    assert "auto turns on curriculum: right answers are trained on again where" in config.accelerators.said
    game = make_config(task={"environment": "test_environments:Echo"}, accelerators={"enabled": "auto"}).accelerators
    assert game.enabled == []
    assert "auto turns on nothing; curriculum needs task.environment=null, got test_environments:Echo" in game.said
    assert make_config(parallel="ddp", accelerators={"enabled": "auto"}).accelerators.enabled == ["curriculum"]
    with pytest.raises(UserError, match="accelerators.enabled: .*list.*, got 'automatic'"):
        make_config(accelerators={"enabled": "automatic"})
    lines = io.StringIO()
    trainer = Trainer(config, tmp_path / "auto", console=Console(file=lines, width=200))
    trainer.run()
    plain = run(make_config(max_steps=4), tmp_path / "plain")
    assert "note: accelerators.enabled: auto turns on curriculum" in lines.getvalue()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(plain), weights_of(trainer)))
    rows = read_metrics(tmp_path / "auto")[1:]
    assert all(row["curriculum/chosen_prompts"] == row["curriculum/stored_answers"] == 0 for row in rows)
