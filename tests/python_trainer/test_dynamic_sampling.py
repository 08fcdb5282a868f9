"""DAPO's parts around the loss: which prompts make a step, and what long answers lose."""

import pytest
import torch
from conftest import QUIET, record_updates

from python_trainer.algorithms.advantages import overlong_penalties
from python_trainer.data import Rollout
from python_trainer.loop.dynamic_sampling import StepSampler
from python_trainer.rollout.settings import RolloutConfig
from python_trainer.run.directory import read_metrics
from python_trainer.tasks.prompt_order import prompt_order
from python_trainer.trainer import Trainer


@pytest.mark.parametrize("fact", ["accuracy", "filter_score"])  # raw rewards, where nothing is right or wrong
def test_dropped_groups_fill_up_what_is_missing_in_the_end(fact):
    sampler = StepSampler(RolloutConfig(prompts_per_step=3, dynamic_sampling=True))
    groups = enumerate([(1, 1), (0, 1), (0, 0), (0, 0)])
    sampler.add(
        [Rollout([1], [2], group=key, prompt_index=key, **{fact: x / 2}) for key, values in groups for x in values]
    )
    assert sampler.missing == 2
    assert [(r.prompt_index, r.group) for r in sampler.rollouts()] == [(1, 0), (1, 0), (0, 1), (0, 1), (2, 2), (2, 2)]


def test_overlong_penalties_known_values():
    # 100 allowed, the last 20 cost: 80 -> 0; 81 -> -1/20; 90 -> -10/20; 100 -> -1; beyond it stays
    penalties = overlong_penalties(torch.tensor([1, 80, 81, 90, 100, 120]), max_length=100, cache=20)
    torch.testing.assert_close(penalties, torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0]))


def coins(prompts, completions, completion_ids, **columns):
    """Return 1 where the first token is even: a coin on which many answers of a group may agree."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def test_a_step_is_filled_with_prompts_that_teach(make_config, tmp_path):
    """The answers of many groups of two agree, whose rewards differ: long answers lose reward but not accuracy."""
    rollout = {"prompts_per_step": 4, "num_generations": 2, "dynamic_sampling": True, "max_sampling_rounds": 30}
    task = {"reward": "test_dynamic_sampling:coins"}
    algorithm = {"overlong_cache": 12}
    config = make_config(max_steps=3, task=task, rollout=rollout, algorithm=algorithm)
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    generate = trainer.generate
    updates = record_updates(trainer)
    rounds = []
    trainer.generate = lambda groups, seed: rounds.append((seed, groups)) or generate(groups, seed)
    trainer.run()
    for rollouts in updates:
        assert len(rollouts) == 8 and [r.group for r in rollouts] == [0, 0, 1, 1, 2, 2, 3, 3]
        for a, b in zip(rollouts[::2], rollouts[1::2]):
            assert {a.accuracy, b.accuracy} == {0.0, 1.0} and a.prompt_index == b.prompt_index
        for r in rollouts:
            assert r.accuracy == r.rewards["coins"] == pytest.approx(r.reward + len(r.response_ids) / 12)
    assert len(rounds) > 3  # so that more than one was needed
    prompt_indices = [group.prompt_index for _, groups in rounds for group in groups]
    assert len(prompt_indices) > 12 and prompt_indices == prompt_order(0, 0, len(prompt_indices), 12)
    first, second = (prompt_order(0, epoch * 12, 12, 12) for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(12)) and first != second, "each prompt once in an epoch"
    assert trainer.state.prompts == len(prompt_indices)
    rows = read_metrics(tmp_path / "run")[1:]
    for row, seed in zip(rows, dict.fromkeys(seed for seed, _ in rounds), strict=True):
        sample_ids = [group.sample_id for round_seed, groups in rounds if round_seed == seed for group in groups]
        assert sample_ids == list(range(0, 2 * len(sample_ids), 2)), "every sample of a step has noise of its own"
        assert row["sampling/kept_groups"] == 4 / len(sample_ids) and row["frac_reward_zero_std"] == 0
    assert sum(row["sampling/rounds"] for row in rows) == len(rounds)


def always(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completions)
