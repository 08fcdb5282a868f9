"""Suffix rollouts: cuts, what is remembered and where, rewards by length, reports; and in whole runs."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import QUIET, record_updates, train

from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rpo import RPO
from python_trainer.accelerators.settings import RPOSettings
from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.data import Group, Rollout, filter_scores
from python_trainer.loop.batch import Batch
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer
from rlkernels.history import suffixes
from rlkernels.history.suffixes import length_factors


def context(seed=0, step=1):
    return SimpleNamespace(step=step, seed=seed, telemetry={})


def planned(key=4, budget=20):
    return Group([1, 2], num_generations=3, max_new_tokens=budget, example=None, prompt_index=key)


def answered(rewards, key=4, ids=None):
    ids = ids or [[10 + i] * (i + 2) for i in range(len(rewards))]
    return [
        Rollout([1, 2], row, 0, [0.0] * len(row), "stop", prompt_index=key, reward=reward, accuracy=reward)
        for row, reward in zip(ids, rewards)
    ]


def remembering(answers, **settings):
    rpo = RPO(RPOSettings(**settings))
    rpo.memory.answers = dict(answers)
    return rpo


@pytest.mark.parametrize(("settings", "longest"), [
    ({}, 12), ({"cut_share": 0.5}, 6), ({"cut_share": 0.01}, 1), ({"cut_tokens": 5}, 5), ({"cut_tokens": 50}, 12),
])  # fmt: skip
@pytest.mark.parametrize("preset", ["ours", "paper"])
def test_cut_is_uniform_from_its_shortest_to_its_longest(settings, longest, preset):
    rpo = remembering({7: list(range(12))}, **settings, preset=preset, whole_share=0)
    cuts = Counter()
    for seed in range(2000):
        group = planned(key=7)
        rpo.plan(context(seed), [group])
        cuts[12 - len(group.prefix_ids)] += 1
        assert group.prefix_ids == list(range(len(group.prefix_ids)))
        assert group.max_new_tokens == 20 - len(group.prefix_ids)
    shortest = 1 if preset == "paper" else min(3, longest)  # 0.2 of 12 is 2.4
    assert set(cuts) == set(range(shortest, longest + 1))
    expected = 2000 / (longest - shortest + 1)
    assert sum((count - expected) ** 2 / expected for count in cuts.values()) < 40  # chi-square, 11 degrees: p 4e-5


def test_a_share_of_the_groups_is_whole():
    counts = {}
    for share, preset in ((0.0, "ours"), (0.25, "ours"), (1.0, "ours"), (0.25, "paper")):
        rpo = remembering({key: [1] * 10 for key in range(2000)}, whole_share=share, preset=preset)
        groups = rpo.plan(context(), [planned(key=key) for key in range(2000)])
        counts[share, preset] = sum(not group.prefix_ids for group in groups) / 2000
    # of those that are cut, as much as the whole answer is cut from one in nine (2 to 10 tokens) or ten (1 to 10)
    expected = {(0.0, "ours"): 1 / 9, (0.25, "ours"): 0.25 + 0.75 / 9, (1.0, "ours"): 1.0, (0.25, "paper"): 0.1}
    assert counts == pytest.approx(expected, abs=0.03)  # four deviations


def step_with(rpo, step, share, notes):
    """Step with answers that are right with this chance; return whether the next one is cut."""
    step_context = context(seed=step, step=step)
    step_context.run = SimpleNamespace(note=notes.append)
    generator = torch.Generator().manual_seed(step)
    groups = []
    for key in range(16):
        rewards = (torch.rand(4, generator=generator) < share).float().tolist()
        groups += [replace(answer, group=key) for answer in answered(rewards, key=key)]
    rpo.collect(step_context, groups)
    rpo.after_update(step_context)
    group = planned(key=99)
    rpo.memory.answers[99] = [1] * 10
    return any(rpo.plan(context(seed), [group])[0].prefix_ids for seed in range(20))


@pytest.mark.parametrize("restored", [False, True])
def test_cuts_end_where_whole_answers_fall(restored):
    rpo = remembering({})
    notes = []
    for step in range(1, 17):
        assert step_with(rpo, step, 0.8, notes)
    if restored:
        state = rpo.state_dict()
        rpo = remembering({})
        rpo.load_state_dict(state)
    cut = [step_with(rpo, step, 0.3, notes) for step in range(17, 33)]
    assert cut[0] and not any(cut[-9:]) and len(notes) == 1
    assert notes[0].startswith("rpo: whole answers fell from 0.8") and "whole from now on" in notes[0]
    resumed = remembering({})
    resumed.load_state_dict(rpo.state_dict())
    assert not step_with(resumed, 40, 0.9, notes)


def test_rewards_that_take_the_place_of_accuracies_end_no_cuts():
    """They are compared with rewards alone."""
    rpo = remembering({})
    notes = []
    for step in range(1, 17):
        assert step_with(rpo, step, 0.8, notes)
    rounds = [replace(answer, filter_score=0.1) for answer in answered([1.0, 0.0, 1.0, 1.0])]
    for _ in range(2):
        rpo.collect(context(seed=17, step=17), rounds)
    assert not rpo.memory.best and len(rpo.memory.whole_scores) == 1
    resumed = remembering({})
    resumed.load_state_dict(rpo.state_dict())
    resumed.collect(context(seed=18, step=18), rounds)
    assert len(resumed.memory.whole_scores) == 2 and notes == []


@pytest.mark.parametrize("settings", [{"whole_share": 0}, {"preset": "paper"}])
def test_cuts_never_end_where_nothing_is_watched(settings):
    rpo = remembering({}, **settings)
    notes = []
    assert all(step_with(rpo, step, 0.8 if step < 17 else 0.0, notes) for step in range(1, 33)) and notes == []


def test_answers_that_stay_as_good_end_no_cuts():
    """48 steps with the same chance of 0.5: as many looks at windows that overlap."""
    ends = 0
    for run in range(40):
        rpo = remembering({})
        notes = []
        for step in range(48):
            step_with(rpo, 1000 * run + step, 0.5, notes)
        ends += len(notes)
    assert ends <= 4


def test_only_answers_worth_keeping_are_remembered():
    rpo = RPO(RPOSettings())
    group = answered([0.0, 0.0])
    rpo.collect(context(), group)
    assert rpo.memory.answers == {}  # none was right
    group = answered([1.0, 0.0, 1.0])
    group[0].finish_reason = "length"
    rpo.collect(context(), group)
    assert rpo.memory.answers == {4: group[2].response_ids}
    rpo.collect(context(), answered([0.0, 0.0]))
    assert rpo.memory.answers == {4: group[2].response_ids}  # what was there stays
    paper = RPO(RPOSettings(preset="paper"))
    paper.collect(context(), answered([0.0, 0.0]))
    assert paper.memory.answers
    cut_off = answered([1.0])
    cut_off[0].finish_reason = "length"
    paper_with_truncated = RPO(RPOSettings(preset="paper"))
    paper_with_truncated.collect(context(), cut_off)
    assert paper_with_truncated.memory.answers == {}


def test_answers_longer_than_allowed_are_not_continued():
    rpo = remembering({4: list(range(21))})
    group = planned()
    rpo.plan(context(), [group])
    assert group.prefix_ids == [] and group.max_new_tokens == 20


def test_cache_takes_the_best_answer_with_probability_epsilon(monkeypatch):
    monkeypatch.setattr(suffixes, "BEST_ANSWER_PROBABILITY", 0.7)
    counts = Counter()
    for seed in range(2000):
        rpo = RPO(RPOSettings(preset="paper"))
        rpo.collect(context(seed), answered([0.0, 1.0, 0.5, 0.0]))
        counts[rpo.memory.answers[4][0]] += 1
    assert 0.66 < counts[11] / 2000 < 0.74  # the best
    for index in (10, 12, 13):
        assert 0.07 < counts[index] / 2000 < 0.13  # 0.3 / 3 each
    monkeypatch.setattr(suffixes, "BEST_ANSWER_PROBABILITY", 1.0)
    ties = Counter()
    for seed in range(600):
        rpo = RPO(RPOSettings())
        rpo.collect(context(seed), answered([1.0, 1.0, 0.0]))
        ties[rpo.memory.answers[4][0]] += 1
    assert set(ties) == {10, 11} and min(ties.values()) > 200


def test_length_factors_known_values():
    # mean length 20, alpha 0.1: factors 1 / (1 + e^-1) = 0.7311, 0.5, 1 / (1 + e^1) = 0.2689
    assert length_factors([10, 20, 30], alpha=0.1) == pytest.approx([0.731059, 0.5, 0.5], abs=1e-6)
    assert length_factors([0, 2 * 10**6], alpha=1e3) == [1.0, 0.5] and length_factors([7]) == [0.5]  # no overflow


def test_length_reward_leaves_raw_accuracy_alone(monkeypatch):
    monkeypatch.setattr(suffixes, "BEST_ANSWER_PROBABILITY", 1.0)
    rpo = RPO(RPOSettings(preset="paper"))
    rollouts = answered([1.0, 1.0, 0.0])
    assert rpo.collect(context(), rollouts) == rollouts
    assert rpo.memory.answers[4] == rollouts[0].response_ids  # the best by the shaped reward
    assert [r.accuracy for r in rollouts] == [1.0, 1.0, 0.0]
    assert rollouts[0].reward > rollouts[1].reward == 0.5 > rollouts[2].reward == 0  # wrong answers get nothing


def test_metrics_count_continued_and_informative_groups():
    rpo = remembering({key: [1] * 20 for key in range(4)})
    groups = []
    for key, (prefix, rewards) in enumerate([(19, [1.0, 1.0]), (18, [1.0, 0.0]), (5, [1.0, 0.0]), (0, [0.0, 0.0])]):
        group = answered(rewards, key=key, ids=[[1] * 20] * 2)
        for rollout in group:
            rollout.group = key
            rollout.prefix_len = prefix
        groups += group
    step_context = context()
    rpo.collect(step_context, groups)
    assert step_context.telemetry == {
        "rpo/hit_rate": 0.75, "rpo/informative": 0.5,
        "rpo/prefix_share": 42 / 80, "rpo/prefix_tokens": 42 / 4, "rpo/given_tokens": 84, "rpo/remembered": 4,
    }  # fmt: skip


def test_stored_answers_that_no_group_judges_are_left_alone():
    rpo = RPO(RPOSettings(preset="paper"))
    stored = answered([1.0])
    stored[0].group = 7
    stored[0].success_rate = 0.1
    group = answered([1.0, 0.0], key=5)
    assert rpo.collect(context(), [*group, *stored]) == [*group, *stored]
    assert set(rpo.memory.answers) == {5} and stored[0].reward == 1.0


@pytest.mark.parametrize("answers", [{}, {3: [1, 2, 3], 0: [7], 9: list(range(50))}])
def test_state_round_trip(answers):
    restored = RPO(RPOSettings())
    restored.load_state_dict(remembering(answers).state_dict())
    assert restored.memory.answers == answers


def test_filling_tries_again_what_found_no_answer():
    requests = []

    def answer(keys, attempt):
        requests.append((list(keys), attempt))
        return [answered([float(key % 3 == attempt)], key=key)[0] for key in keys]

    notes = []
    rpo = RPO(RPOSettings(fill=2))
    rpo.begin(SimpleNamespace(prompts=[[1]] * 7, answer=answer, note=notes.append))
    assert requests == [(list(range(7)), 0), ([1, 2, 4, 5], 1)] and sorted(rpo.memory.answers) == [0, 1, 3, 4, 6]
    assert notes[0].startswith("rpo: first answers to 5 of 7 prompts remembered")


@pytest.mark.parametrize(("prefix_in_loss", "tokens"), [(True, [3, 4]), (False, [1, 2])])
def test_prefix_tokens_take_part_in_the_loss_where_asked_for(prefix_in_loss, tokens):
    rollouts = answered([1.0, 0.0], ids=[[5, 6, 7], [5, 6, 8, 9]])
    for rollout in rollouts:
        rollout.prefix_len = 2
        rollout.logprobs = rollout.logprobs[2:]
    batch = Batch(rollouts, AlgorithmConfig(), 8, torch.device("cpu"), prefix_in_loss=prefix_in_loss)
    assert batch.loss_tokens.tolist() == tokens
    assert batch.sampler_logprobs[batch.present].isnan().tolist() == [True, True, False, True, True, False, False]


ROOM = {"max_completion_length": 60}  # enough for the tiny policy to end most of its answers


def rpo_config(make_config, rollout=(), *, rpo, **changes):
    return make_config(rollout=ROOM | dict(rollout), accelerators={"enabled": ["rpo"], "rpo": rpo}, **changes)


def test_training_with_suffix_rollouts(make_config, tmp_path):
    """12 prompts at 4 a step: from step 4 on most groups start from a prefix, and fewer tokens are generated."""
    config = rpo_config(make_config, max_steps=9, rpo={"whole_share": 0})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    updates = record_updates(trainer)
    summary = trainer.run()
    rows = read_metrics(tmp_path / "run")[1:]
    assert all(row["rpo/hit_rate"] == 0 for row in rows[:3]) and rows[-1]["rpo/hit_rate"] > 0.5
    assert rows[-1]["completions/generated_length"] < rows[-1]["completions/mean_length"]
    for rollouts in updates:
        for start in range(0, len(rollouts), 4):
            group = rollouts[start : start + 4]
            shared = group[0].prefix_len
            assert len({tuple(r.response_ids[:shared]) for r in group}) == 1  # one cut for the whole group
            assert all(r.prefix_len == shared and len(r.response_ids) <= 60 for r in group)
    # the sampler's log-probabilities are those of the trainer, prefix or not
    assert all(row["sampling/logp_difference/max"] < 1e-4 for row in rows)
    for name in ("generated", "prefill", "cached", "trained"):
        assert sum(row[f"tokens/{name}"] for row in rows) == summary[f"{name}_tokens"] > 0


def test_filled_before_the_first_step_and_on_the_clock(make_config, tmp_path):
    config = rpo_config(make_config, max_steps=2, rpo={"fill": 3})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    summary = trainer.run()
    rows = read_metrics(tmp_path / "run")
    assert rows[1]["rpo/remembered"] > 4 and rows[1]["rpo/hit_rate"] > 0
    assert rows[0]["total/generated_tokens"] > 12 and rows[0]["time/training_s"] > 0
    assert summary["accelerator_s"]["rpo"] > 0
    # the same answers as those of the same policy, prompt by prompt
    second_trainer = Trainer(config, tmp_path / "again", console=QUIET)
    answer = second_trainer.answer_once([5], 0)[0]
    assert answer.response_ids == second_trainer.answer_once(range(12), 0)[5].response_ids
    assert answer.response_ids != second_trainer.answer_once([5], 1)[0].response_ids


def test_dynamic_sampling_refills_with_suffixes_and_counts_every_round(make_config, tmp_path):
    """Rewards that are 0 or 1 by the last token: short cuts leave many groups without spread, which are drawn again."""
    rollout = {"dynamic_sampling": True, "max_sampling_rounds": 3}
    config = rpo_config(make_config, rollout, max_steps=3, rpo={"cut_share": 0.3}, task={"reward": "conftest:even"})
    train(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert max(row["sampling/rounds"] for row in rows) > 1
    for row in rows:
        assert row["rpo/informative"] == pytest.approx(row["sampling/kept_groups"])
    assert any(row["rpo/hit_rate"] > 0 for row in rows)


def test_continued_answers_are_not_taken_for_the_policys_own(make_config, gate_task, tmp_path):
    """They count neither in rewards and accuracy, nor for alpha and the database."""
    accelerators = {
        "enabled": ["rpo", "alpha", "rhyme"],
        "rpo": {"fill": 4, "whole_share": 0},
        "alpha": {"first_step": 99},
        "rhyme": {"database": str(tmp_path / "history.db")},
    }
    config = make_config(max_steps=20, accelerators=accelerators, task=gate_task,
                         rollout={"prompts_per_step": 2})  # fmt: skip
    trainer = train(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    answered = []
    recorded = []
    level = None
    for row, rollouts in zip(rows, trainer.updates):
        complete = [r for r in rollouts if not r.prefix_len]
        continued = [r for r in rollouts if r.prefix_len]
        for words, answers in (("", complete), ("continued/", continued)):
            for name in ("reward", "accuracy"):
                values = [getattr(answer, name) for answer in answers]
                assert row.get(words + name) == (pytest.approx(sum(values) / len(values)) if values else None)
        assert row.get("continued/share", 0) == len(continued) / len(rollouts)
        if complete:
            level = sum(r.reward for r in complete) / len(complete)
            answered.append([row["step"], sum(filter_scores(complete)), len(complete)])
        recorded.append(level)
    assert any("reward" not in row for row in rows), "a step whose answers were all continued"
    trajectory = RetrospectiveDatabase(str(tmp_path / "history.db")).trajectory(1)
    assert [step.reward for step in trajectory] == pytest.approx(recorded)
    alpha = next(a for a in trainer.accelerators if a.name == "alpha")
    assert alpha.extrapolator.answered == answered and len(answered) < 20
