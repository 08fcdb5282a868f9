"""DAPO's parts around the loss: which prompts make a step, and what long answers lose."""

import pytest
import torch
from conftest import QUIET, train

import python_trainer.prompts
from python_trainer.algorithms.advantages import overlong_penalties
from python_trainer.data import Rollout
from python_trainer.dynamic_sampling import StepSampler
from python_trainer.errors import UserError
from python_trainer.keyed import prompt_order
from python_trainer.rollout.settings import RolloutConfig
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer


def answers(*accuracies):
    """One group for each list of accuracies; the prompt key tells them apart, the shaped reward misleads."""
    answers.key = getattr(answers, "key", 0)
    out = []
    for group, values in enumerate(accuracies):
        answers.key += 1
        for i, value in enumerate(values):
            out.append(
                Rollout([1], [2], 0, [0.0], "stop", prompt_key=answers.key, group=group, reward=0.1 * i, accuracy=value)
            )
    return out


def test_groups_without_spread_in_accuracy_are_dropped_whatever_the_shaped_reward():
    sampler = StepSampler(RolloutConfig(prompts_per_step=3, dynamic_sampling=True))
    first = answers([0, 1], [1, 1], [0, 0])
    sampler.add(first)
    assert sampler.missing == 2 and [group[0].prompt_key for group in sampler.kept] == [first[0].prompt_key]
    second = answers([1, 0], [0, 1])
    sampler.add(second)
    assert sampler.missing == 0 and sampler.metrics() == {"sampling/rounds": 2, "sampling/kept_groups": 3 / 5}
    batch = sampler.rollouts()
    assert [r.group for r in batch] == [0, 0, 1, 1, 2, 2]
    assert [r.prompt_key for r in batch] == [r.prompt_key for r in [*first[:2], *second]]


def test_dropped_groups_fill_up_what_is_missing_in_the_end():
    sampler = StepSampler(RolloutConfig(prompts_per_step=3, dynamic_sampling=True))
    rollouts = answers([1, 1], [0, 1], [0, 0], [0, 0])
    sampler.add(rollouts)
    assert sampler.missing == 2 and len(sampler.rollouts()) == 6
    assert [r.prompt_key - rollouts[0].prompt_key for r in sampler.rollouts()] == [1, 1, 0, 0, 2, 2]


def test_overlong_penalties_known_values():
    # 100 allowed, the last 20 cost: 80 -> 0; 81 -> -1/20; 90 -> -10/20; 100 -> -1; beyond it stays
    got = overlong_penalties(torch.tensor([1, 80, 81, 90, 100, 120]), max_length=100, cache=20)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0]))


def coins(prompts, completions, completion_ids, **columns):
    """Right when the first token is even: a coin that many answers of a group may agree on."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


@pytest.fixture
def dynamic(make_config):
    """Runs with groups of two, many of which agree: ``dynamic(reward function, **changes)``."""

    def make(reward="coins", **changes):
        task = {"reward": f"test_dynamic_sampling:{reward}"}
        rollout = {"prompts_per_step": 4, "num_generations": 2, "dynamic_sampling": True, "max_completion_length": 8}
        return make_config(task=task, rollout=rollout | changes.pop("rollout", {}), **changes)

    return make


def test_a_step_is_filled_with_prompts_that_teach(dynamic, tmp_path, monkeypatch):
    calls, seen = [], []
    original = python_trainer.prompts.prompt_order

    def order(seed, first, count, size):
        calls.append((first, count))
        return original(seed, first, count, size)

    monkeypatch.setattr(python_trainer.prompts, "prompt_order", order)
    config = dynamic(max_steps=3, rollout={"max_sampling_rounds": 30})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    update, generate, ids = trainer.learner.update, trainer.generate, []
    trainer.learner.update = lambda rollouts, number: seen.append(rollouts) or update(rollouts, number)

    def spy(groups, seed):
        ids.append((seed, [group.sample_id for group in groups]))
        return generate(groups, seed)

    trainer.generate = spy
    trainer.run()
    for rollouts in seen:
        assert len(rollouts) == 8 and [r.group for r in rollouts] == [0, 0, 1, 1, 2, 2, 3, 3]
        for a, b in zip(rollouts[::2], rollouts[1::2]):
            assert {a.accuracy, b.accuracy} == {0.0, 1.0} and a.prompt_key == b.prompt_key
    assert len(calls) > 3  # so that rounds were needed
    ends = [first + count for first, count in calls]
    assert [first for first, _ in calls] == [0, *ends[:-1]]  # no prompt is passed over or drawn twice
    assert trainer.state.prompts == ends[-1]
    for seed in {seed for seed, _ in ids}:  # every sample of a step has noise of its own
        used = [sample for other, samples in ids if other == seed for sample in samples]
        assert used == list(range(0, 2 * len(used), 2))
    rows = read_metrics(tmp_path / "run")[1:]
    assert all(row["frac_reward_zero_std"] == 0 and row["sampling/kept_groups"] <= 1 for row in rows)
    assert sum(row["sampling/rounds"] for row in rows) == len(calls)


def test_rounds_are_bounded(dynamic, tmp_path):
    config = dynamic("always", max_steps=1, rollout={"max_sampling_rounds": 3})
    trainer = train(config, tmp_path / "run")
    row = read_metrics(tmp_path / "run")[1]
    assert row["sampling/rounds"] == 3 and row["sampling/kept_groups"] == 0 and row["frac_reward_zero_std"] == 1
    assert trainer.state.prompts == 12 and row["grad_norm"] == 0.0


def always(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completions)


def test_long_answers_lose_reward_but_not_accuracy(make_config, tmp_path):
    algorithm = {"overlong_cache": 12}
    trainer = Trainer(make_config(algorithm=algorithm), tmp_path / "run", console=QUIET)
    groups = trainer.prompts.groups(trainer.prompts.draw(4))
    rollouts = trainer.generate(groups, 0)
    trainer.scorer.score(groups, rollouts)
    assert len({len(r.response_ids) for r in rollouts}) > 1
    for rollout in rollouts:
        assert rollout.reward == pytest.approx(rollout.rewards["digits"] - len(rollout.response_ids) / 12)
        assert rollout.accuracy == float(rollout.rewards["digits"] > 0.5)


def test_settings_that_cannot_be(make_config):
    with pytest.raises(UserError, match="overlong_cache must be <= rollout.max_completion_length .12., got 13"):
        make_config(algorithm={"overlong_cache": 13})
    with pytest.raises(UserError, match="dynamic_sampling needs rollout.num_generations >= 2: .*, got 1"):
        make_config(rollout={"dynamic_sampling": True, "num_generations": 1}, algorithm={"advantage": "gae"})


def test_without_it_a_step_takes_the_prompts_it_always_took(make_config, tmp_path):
    trainer = train(make_config(max_steps=3), tmp_path / "run")
    keys = trainer.prompts.draw(4)
    assert trainer.state.prompts == 16 and keys == prompt_order(0, 12, 4, 12)
