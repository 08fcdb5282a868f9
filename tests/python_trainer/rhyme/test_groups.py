"""Stored answers in the groups of a step: which of them join, how many are spared for them, with what weight."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import QUIET, record_updates, train

from python_trainer.accelerators.rhyme import sampling
from python_trainer.accelerators.rhyme.database import StoredAnswer
from python_trainer.accelerators.rhyme.sampling import begins_with
from python_trainer.accelerators.settings import RhymeSettings
from python_trainer.data import Rollout, by_group
from python_trainer.loop.batch import Batch, Minibatch
from python_trainer.model.packing import pack_rollouts
from python_trainer.run.directory import read_metrics
from python_trainer.tasks.prompt_order import prompt_order
from python_trainer.trainer import Trainer
from rlkernels.sampling.keys import keyed_unit


@pytest.fixture(autouse=True)
def every_candidate_is_near(monkeypatch):
    """Count all made-up answers as near: they are far from any policy, and another test checks distances."""
    monkeypatch.setattr(sampling, "MIN_WEIGHT", 0.0)


def failing(prompts, completions, completion_ids, **columns):
    return [0.0] * len(completions)


def stored_answer(key, ids=(1, 2, 3), logprobs=(-1.0, -1.0, -1.0), text="123", reward=1.0):
    return key, StoredAnswer(0, 0, "", text, True, reward, "", torch.tensor(ids), torch.tensor(logprobs))


@pytest.fixture
def run_step(rhyme_config, tmp_path):
    """Return a function that steps with stored answers; it gives trainer and metrics. No fresh answer is right."""

    def run(answers, rhyme=(), **changes):
        config = rhyme_config(None, rhyme, max_steps=1, task={"reward": "rhyme.test_groups:failing"}, **changes)
        trainer = Trainer(config, tmp_path / "run", console=QUIET)
        trainer.updates = record_updates(trainer)
        trainer.accelerators[-1].bank.add(answers, 0)
        trainer.run()
        return trainer, read_metrics(trainer.folder)[1]

    return run


@pytest.mark.parametrize(("rhyme", "logprob", "candidates", "stored"), [
    ({"history_ratio": 0}, -9.0, 1, 1),
    ({"max_staleness": 0}, -9.0, 0, 0),
    ({}, 0.0, 1, 0),  # certain then, unlikely now
], ids=["near", "stale", "far"])  # fmt: skip
def test_a_group_in_which_all_failed_is_rescued(run_step, monkeypatch, rhyme, logprob, candidates, stored):
    """Answers rescue it that are neither too old nor too far; none of them was spared."""
    monkeypatch.setattr(sampling, "MIN_WEIGHT", 0.5)
    third = prompt_order(0, 0, 4, 12)[2]  # prompt of the first step
    _, row = run_step([stored_answer(third, logprobs=[logprob] * 3)], rhyme)
    assert row["rhyme/candidates"] == candidates and row["rhyme/failed_groups"] == 4
    assert row["rhyme/stored_answers"] == row["rhyme/rescued_groups"] == stored
    assert row["rhyme/spared_answers"] == row["reward"] == 0
    assert (row["frac_reward_zero_std"] < 1) == (row["grad_norm"] > 0) == (stored == 1)


def test_no_more_answers_are_spared_than_stored_ones_can_come(run_step, monkeypatch):
    """A candidate that the policy would not write spares none, two spare two, and both of them join."""
    monkeypatch.setattr(sampling, "MIN_WEIGHT", 0.5)
    answers = []
    for number, key in enumerate(prompt_order(0, 0, 4, 12)[:3]):
        for ids in [(1, 2), (3, 4), (5, 6)][: number + 1]:
            logprob = -9.0 if number else 0.0  # hardly possible then; certain then
            answers.append(stored_answer(key, ids, [logprob] * 2, str(ids)))
    trainer, row = run_step(answers, {"history_ratio": 1.0})
    groups = trainer.accelerators[0].groups
    assert groups.spared == [0, 2, 2, 0] and len(groups.offers) == 5
    assert row["rhyme/spared_answers"] == row["rhyme/stored_answers"] == 4 and row["rhyme/candidates"] == 6
    assert len(groups.untrained) == 1


@pytest.mark.parametrize(
    ("size", "ratio", "spared"), [(2, 0.34, 0), (3, 0.34, 0), (4, 0.34, 1), (6, 0.34, 1), (8, 0.6, 3)]
)
def test_stored_answers_are_never_more_than_their_share(run_step, size, ratio, spared):
    """``history_ratio`` of them at most for each fresh answer, also in small groups."""
    key = prompt_order(0, 0, 4, 12)[0]
    answers = [stored_answer(key, (number, 2), [-9.0] * 2, str(number)) for number in range(4)]
    trainer, _ = run_step(answers, {"history_ratio": ratio}, rollout={"num_generations": size})
    assert trainer.accelerators[0].groups.spared == [spared, 0, 0, 0]


def test_a_prompt_that_comes_twice_in_a_step_has_stored_answers_in_both_groups(run_step):
    trainer, row = run_step([stored_answer(5)], rollout={"prompts_per_step": 24})  # two epochs of 12 prompts
    groups = [group for rollouts in trainer.updates for group in by_group(rollouts).values()]
    stored = [sum(r.importance_cap is not None for r in group) for group in groups if group[0].prompt_index == 5]
    assert stored == [1, 1] and {len(group) for group in groups} == {4}
    names = "spared_answers", "stored_answers", "candidates", "rescued_groups"
    assert [row[f"rhyme/{name}"] for name in names] == [2] * 4


@pytest.mark.parametrize("selection", ["likelihood", "random"])
def test_the_selection_chooses(run_step, monkeypatch, selection):
    """Among sixteen candidates for two places."""
    monkeypatch.setattr(sampling, "STAGE_2_ANSWERS", 16)
    key = prompt_order(0, 0, 4, 12)[0]
    answers = [stored_answer(key, (i % 10, i % 7, i % 3), text=str(i), reward=1.0 + i % 5) for i in range(16)]
    trainer, _ = run_step(answers, {"history_ratio": 1.0, "selection": selection})
    groups = trainer.accelerators[0].groups
    worth = {
        "likelihood": [float(offer.logprobs.mean()) for offer in groups.offers],
        "random": [keyed_unit(trainer.context(1).seed, "rhyme random", i) for i in range(16)],
    }
    best = sorted(range(16), key=lambda i: -worth[selection][i])[:2]
    chosen = [answer.text for answer in trainer.updates[0] if answer.importance_cap is not None]
    assert chosen == [groups.offers[i].answer.text for i in best] and len(groups.untrained) == 14


def test_all_ranks_choose_as_rank_0_does():
    """Scores of a network that unlike CPUs have trained differ in their last digits."""
    offers = [sampling.Candidate(None, 0, [1], 1.0, torch.tensor([-x])) for x in (1.0, 2.0)]
    sampler = sampling.GroupSampler(RhymeSettings(), sampling.Retrodictor())
    other_rank = SimpleNamespace(run=SimpleNamespace(on_rank0=lambda function: [1, 0]), seed=0)
    assert sampler._ranked(other_rank, offers) == offers[::-1]


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (4.0, 1.5), (math.nan, 1.0)])
def test_a_stored_token_enters_the_loss_with_its_truncated_weight(make_config, ratio, weight):
    """The weight is min(pi / behaviour, cap), or 1 where nobody knows; also without any importance_sampling."""
    config = make_config(algorithm={"importance_sampling": "none", "loss_type": "token-mean"}).algorithm
    logprobs_now = torch.tensor([-1.0, -2.0])
    stored_logprobs = [float(x) - math.log(ratio) if ratio > 0 else math.nan for x in logprobs_now]
    stored = {"reward": 1.0, "accuracy": 1.0, "importance_cap": 1.5}
    rollouts = [
        Rollout([5], [1, 2], 0, logprobs_now.tolist(), "stop"),
        Rollout([5], [3, 4], 0, stored_logprobs, "stop", **stored),
    ]
    batch = Batch(rollouts, config, 8, torch.device("cpu"))
    batch.set_advantages()
    advantages = batch.advantages[:, 0]
    packed = pack_rollouts(rollouts, [0, 1])
    logprobs = logprobs_now.expand(2, 2).clone().requires_grad_()
    loss, _ = Minibatch(batch, [0, 1]).loss(packed, logprobs, torch.zeros(2, 2))
    loss.backward()
    expected = -advantages[1] * weight / 4
    assert logprobs.grad[1].tolist() == pytest.approx([float(expected)] * 2, rel=1e-5)
    assert logprobs.grad[0].tolist() == pytest.approx([float(-advantages[0] / 4)] * 2, rel=1e-5)


def test_stored_answers_join_a_group_only_from_where_it_begins(make_config, tmp_path, monkeypatch):
    """Answers of a group are compared with each other, so all of them continue the same prefix."""
    settings = {"rhyme": {"rare_share": 0}, "rpo": {"cut_share": 0.7, "whole_share": 0}}
    config = make_config(max_steps=12, accelerators={"enabled": ["rhyme", "rpo"], **settings})
    stored = []
    offered = []

    def begins(response_ids, prefix_ids):
        offered.append(begins_with(response_ids, prefix_ids))
        return offered[-1]

    monkeypatch.setattr(sampling, "begins_with", begins)
    trainer = train(config, tmp_path / "run")
    for members in (group for rollouts in trainer.updates for group in by_group(rollouts).values()):
        prefix = members[0].response_ids[: members[0].prefix_len]
        for r in members:
            assert r.prefix_len == len(prefix) and r.response_ids[: r.prefix_len] == prefix
            assert len(r.response_ids) == r.prefix_len + len(r.logprobs) and r.logprobs
        stored.extend(r.prefix_len for r in members if r.importance_cap is not None and r.success_rate is None)
    assert 0 in stored and max(stored) > 0, "groups with and without a beginning"
    assert False in offered and True in offered
    assert not begins_with([1, 2], [1, 2]) and begins_with([1, 2], []) and not begins_with([1, 3, 2], [1, 2])


def test_no_answer_is_spared_for_stored_ones_that_begin_otherwise(rhyme_config, tmp_path):
    config = rhyme_config(None, enabled=("rhyme", "rpo"), max_steps=1, task={"reward": "rhyme.test_groups:failing"})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    assert [accelerator.name for accelerator in trainer.accelerators] == ["rpo", "rhyme"]
    trainer.accelerators[0].memory.answers.update({key: [7, 8, 9, 10] for key in range(12)})
    trainer.accelerators[1].bank.add(map(stored_answer, range(12)), 0)
    trainer.run()
    row = read_metrics(trainer.folder)[1]
    begun = row["rpo/hit_rate"]
    assert begun > 0 and row["rhyme/candidates"] == 4 * (1 - begun)
    assert row["rhyme/spared_answers"] == row["rhyme/stored_answers"] == 4 * (1 - begun)
