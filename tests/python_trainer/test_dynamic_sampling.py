"""DAPO's parts around the loss: which prompts make a step, and what long answers lose."""

import pytest
import torch
from conftest import QUIET, record_updates

from python_trainer.algorithms.advantages import overlong_penalties
from python_trainer.data import Rollout
from python_trainer.dynamic_sampling import StepSampler
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
            facts = {"prompt_key": answers.key, "group": group, "reward": 0.1 * i, "accuracy": value}
            out.append(Rollout([1], [2], 0, [0.0], "stop", **facts))
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


def test_a_step_is_filled_with_prompts_that_teach(make_config, tmp_path):
    """The answers of many groups of two agree."""
    rollout = {"prompts_per_step": 4, "num_generations": 2, "dynamic_sampling": True, "max_sampling_rounds": 30}
    config = make_config(max_steps=3, task={"reward": "test_dynamic_sampling:coins"}, rollout=rollout)
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    generate, seen, rounds = trainer.generate, record_updates(trainer), []
    trainer.generate = lambda groups, seed: rounds.append((seed, groups)) or generate(groups, seed)
    trainer.run()
    for rollouts in seen:
        assert len(rollouts) == 8 and [r.group for r in rollouts] == [0, 0, 1, 1, 2, 2, 3, 3]
        for a, b in zip(rollouts[::2], rollouts[1::2]):
            assert {a.accuracy, b.accuracy} == {0.0, 1.0} and a.prompt_key == b.prompt_key
    assert len(rounds) > 3  # so that more than one was needed
    drawn = [group.prompt_key for _, groups in rounds for group in groups]
    assert drawn == prompt_order(0, 0, len(drawn), 12)  # no prompt is passed over or drawn twice
    assert trainer.state.prompts == len(drawn)
    for seed in {seed for seed, _ in rounds}:  # every sample of a step has noise of its own
        used = [group.sample_id for other, groups in rounds if other == seed for group in groups]
        assert used == list(range(0, 2 * len(used), 2))
    rows = read_metrics(tmp_path / "run")[1:]
    assert all(row["frac_reward_zero_std"] == 0 and row["sampling/kept_groups"] <= 1 for row in rows)
    assert sum(row["sampling/rounds"] for row in rows) == len(rounds)


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
