"""Suffix rollouts."""

from collections import Counter

import pytest
import torch
from rich.console import Console

from python_trainer.accelerators import PlannedGroup, Rollout, StepContext
from python_trainer.accelerators.rpo import RPO, RPOSettings, length_reward
from python_trainer.objective import make_batch
from python_trainer.telemetry import read_metrics
from python_trainer.trainer import Trainer


def context(seed=0, step=1):
    return StepContext(step, None, None, None, None, None, None, seed, {})


def planned(key=4, budget=20):
    return PlannedGroup(None, key, [1, 2], 3, budget, 0)


def answered(rewards, key=4, ids=None):
    ids = ids or [[10 + i] * (i + 2) for i in range(len(rewards))]
    return [
        Rollout(key, 0, [1, 2], row, 0, [0.0] * len(row), "stop", "", reward, {}, reward)
        for row, reward in zip(ids, rewards)
    ]


def test_first_visit_is_whole_then_a_prefix_of_a_remembered_answer():
    rpo, first = RPO(RPOSettings()), planned()
    rpo.plan(context(), [first])
    assert first.prefix_ids == [] and first.max_new_tokens == 20
    rpo.collect(context(), answered([0.0, 1.0, 0.0]))
    kept = rpo.answers[4]
    group = planned()
    assert rpo.plan(context(seed=9), [group]) == [group]
    assert len(group.prefix_ids) < len(kept) and group.prefix_ids == kept[: len(group.prefix_ids)]
    assert group.max_new_tokens == 20 - len(group.prefix_ids)
    other = planned(key=5)
    assert rpo.plan(context(), [other])[0].prefix_ids == []


@pytest.mark.parametrize(
    ("settings", "length", "longest"),
    [({}, 12, 12), ({"cut_share": 0.5}, 12, 6), ({"cut_share": 0.01}, 12, 1), ({"cut_tokens": 5}, 12, 5),
     ({"cut_tokens": 50}, 12, 12)],
)  # fmt: skip
def test_cut_is_uniform_up_to_its_longest(settings, length, longest):
    rpo = RPO(RPOSettings(**settings))
    cuts = Counter(rpo.cut(length, seed, 7) for seed in range(2000))
    assert set(cuts) == set(range(1, longest + 1))
    expected = 2000 / longest
    assert sum((count - expected) ** 2 / expected for count in cuts.values()) < 40  # chi-square, 11 degrees: p 4e-5


def test_cache_takes_the_best_answer_with_probability_epsilon():
    counts = Counter()
    for seed in range(2000):
        rpo = RPO(RPOSettings(epsilon=0.7))
        rpo.collect(context(seed), answered([0.0, 1.0, 0.5, 0.0]))
        counts[rpo.answers[4][0]] += 1
    assert 0.66 < counts[11] / 2000 < 0.74  # the best
    for other in (10, 12, 13):
        assert 0.07 < counts[other] / 2000 < 0.13  # 0.3 / 3 each
    ties = Counter()
    for seed in range(600):
        rpo = RPO(RPOSettings(epsilon=1.0))
        rpo.collect(context(seed), answered([1.0, 1.0, 0.0]))
        ties[rpo.answers[4][0]] += 1
    assert set(ties) == {10, 11} and min(ties.values()) > 200


def test_length_reward_known_values():
    # mean length 20, alpha 0.1: factors 1 / (1 + e^-1) = 0.7311, 0.5, 1 / (1 + e^1) = 0.2689
    lengths = [10, 20, 30]
    paper = length_reward([1.0, 1.0, 0.0], lengths, alpha=0.1, lift_wrong=True)
    assert paper == pytest.approx([0.731059, 0.5, 0.5], abs=1e-6)
    correct = length_reward([0.0, 1.0, 1.0], lengths, alpha=0.1, lift_wrong=False)
    assert correct == pytest.approx([0.0, 0.5, 0.5], abs=1e-6)
    assert length_reward([1.0], [10**6], alpha=1e3, lift_wrong=False) == [0.5]  # no overflow


def test_length_reward_leaves_raw_accuracy_alone():
    rollouts = RPO(RPOSettings(length_reward="correct")).collect(context(), answered([1.0, 1.0, 0.0]))
    assert [r.accuracy for r in rollouts] == [1.0, 1.0, 0.0]
    assert rollouts[0].reward > rollouts[1].reward == 0.5 and rollouts[2].reward == 0


def test_state_round_trip():
    rpo = RPO(RPOSettings())
    rpo.answers = {3: [1, 2, 3], 0: [7], 9: list(range(50))}
    other = RPO(RPOSettings())
    other.load_state_dict(rpo.state_dict())
    assert other.answers == rpo.answers
    empty = RPO(RPOSettings())
    empty.load_state_dict(RPO(RPOSettings()).state_dict())
    assert empty.answers == {}


def test_training_with_suffix_rollouts(make_config, tmp_path):
    """12 prompts at 4 a step: from step 4 on every group starts from a prefix, and fewer tokens are generated."""
    config = make_config(max_steps=9, accelerators={"enabled": ["rpo"]})
    trainer = Trainer(config, tmp_path / "run", console=Console(quiet=True))
    seen = []
    original = trainer._update

    def spy(rollouts, number):
        seen.append(rollouts)
        return original(rollouts, number)

    trainer._update = spy
    trainer.run()
    rows = read_metrics(tmp_path / "run")[1:]
    assert all(row["rpo/hit_rate"] == 0 for row in rows[:3]) and rows[-1]["rpo/hit_rate"] > 0.5
    assert rows[-1]["completions/generated_length"] < rows[-1]["completions/mean_length"]
    for rollouts in seen:
        for start in range(0, len(rollouts), 4):
            group = rollouts[start : start + 4]
            shared = group[0].prefix_len
            assert len({tuple(r.response_ids[:shared]) for r in group}) == 1  # one cut for the whole group
            assert all(r.prefix_len == shared and len(r.response_ids) <= 12 for r in group)
    # the sampler's log-probabilities are those of the trainer, prefix or not
    assert all(row["sampling/logp_difference/max"] < 1e-4 for row in rows)


@pytest.mark.parametrize(("whole", "tokens"), [(True, [3, 4]), (False, [1, 2])])
def test_prefix_tokens_take_part_in_the_loss_where_asked_for(make_config, whole, tokens):
    config = make_config(algorithm={"prefix_in_loss": whole})
    rollouts = answered([1.0, 0.0], ids=[[5, 6, 7], [5, 6, 8, 9]])
    for rollout in rollouts:
        rollout.prefix_len, rollout.logprobs = 2, rollout.logprobs[2:]
    batch = make_batch(rollouts, config.algorithm, torch.device("cpu"))
    assert batch.loss_tokens.tolist() == tokens and [a.shared for a in batch.answers] == [2, 2]
    assert batch.sampler.flat.isnan().tolist() == [True, True, False, True, True, False, False]
