"""Drafts in a first epoch: replays of answers made by hand, and the whole study on two small steps."""

import argparse
import random

import numpy as np
import pytest

from bench.history import Answer
from bench.studies import siblings
from bench.studies.siblings import RULES, Epoch, Plain, growing, replay
from rlkernels import RolloutHistory
from rlkernels.history.reference import History

TOLD, OTHERS, FINISHED, MAKING, ALONE, KNOWING = RULES
DEAR = 1e6  # overhead of a pass in tokens: every draft is worth its tokens
PROMPTS = [np.array([100 + key] * (2 + key), np.int32) for key in range(3)]


def epoch_of(*steps):
    """Of steps that are lists of (prompt, answer, reward)."""
    answers = [
        [Answer(key, 0, number, reward, np.array(ids, np.int32)) for key, ids, reward in rows]
        for number, rows in enumerate(steps)
    ]
    return Epoch(PROMPTS, answers, longest=64)


def plain(epoch):
    return replay(epoch, Plain(RolloutHistory(), pass_overhead=DEAR))


def spent(epoch, rule):
    kind, history = RULES[rule]
    return replay(epoch, kind(history(), pass_overhead=DEAR))


def passes(epoch):
    return {rule: spent(epoch, rule).passes for rule in RULES}


def random_epoch(seed):
    """Of few words, so that much is repeated, and with an end."""
    rng = random.Random(seed)
    answers = [[[*(rng.randrange(4) for _ in range(rng.randrange(30))), 9] for _ in range(4)] for _ in PROMPTS]
    return epoch_of(*([(key, ids, 0.0) for ids in rows] for key, rows in enumerate(answers)))


def test_without_drafts_a_pass_a_token_of_the_longest_answer():
    counts = plain(epoch_of([(0, [1, 2, 3], 0.0), (0, [1, 9], 0.0), (1, [5], 0.0)], [(2, [1, 2], 0.0)]))
    assert counts.passes == 3 + 2
    assert counts.tokens == (2 + 3) + 2 + 1 + 4 + 1, "prompts once a group, and of each answer all tokens but the last"
    assert counts.draws == (3 + 2 + 1) + 2
    assert counts.cost(30) == 30 * 5 + 13


def test_a_sibling_that_lags_is_drafted_by_the_one_ahead():
    ahead = list(range(10, 30))
    epoch = epoch_of([(0, ahead, 0.0), (0, [1, 2, 3, 4, *ahead], 0.0)])
    # After 6 passes the second ends with 10, 11, and the first has four tokens more: the next one draws five, and they
    # are level. Finished is the first after 20 passes, when the second lacks four: 26, 27 and 28 are offered, and 29
    # comes with them.
    assert plain(epoch).passes == 24
    assert passes(epoch) == {TOLD: 24, OTHERS: 24, FINISHED: 21, MAKING: 20, ALONE: 20, KNOWING: 20}


def test_what_an_answer_repeats_of_itself_drafts_all_but_siblings_alone():
    found = passes(epoch_of([(0, [1, 2, 3, 4, 5, 6] * 4, 0.0), (0, [7, 8, 9], 0.0)]))
    assert found[ALONE] == found[KNOWING] == 24
    assert all(found[rule] == 9 for rule in (TOLD, OTHERS, FINISHED, MAKING))


def test_what_other_prompts_say_drafts_all_but_siblings_alone():
    ids = list(range(10, 30))
    found = passes(epoch_of([(0, ids, 0.0)], [(1, ids, 0.0)]))
    assert found[ALONE] == found[KNOWING] == 40
    assert all(found[rule] < 30 for rule in (TOLD, OTHERS, FINISHED, MAKING))


def test_rewards_are_told_by_the_first_rule_alone():
    epoch = epoch_of([(0, [1, 2, 3, 4, 5, 6], 1.0), (0, [1, 2, 3, 7, 8, 9], 0.0)], [(1, [1, 2, 3, 4, 5, 6], 1.0)])
    found = passes(epoch)
    assert found[TOLD] == 6 + 2, "after the first token all others are offered"
    assert found[OTHERS] == 6 + 3, "of equals the newest is followed: 2 and 3 are right, 7 is not"


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_accepted_where_nothing_is_repeated(rule):
    ids = iter(range(200))
    epoch = epoch_of(*([(key, [next(ids) for _ in range(n)], 0.0) for n in (7, 20)] for key in range(3)))
    found, without = spent(epoch, rule), plain(epoch)
    assert (found.passes, found.draws) == (without.passes, without.draws) == (60, 81)


@pytest.mark.parametrize("seed", range(20))
def test_who_knows_all_offers_nothing_wrong_and_is_not_beaten_by_siblings(seed):
    epoch = random_epoch(seed)
    knowing, alone, without = spent(epoch, KNOWING), spent(epoch, ALONE), plain(epoch)
    assert knowing.tokens == without.tokens, "right tokens are computed anyway"
    assert alone.tokens > without.tokens and alone.draws < without.draws
    assert knowing.passes <= alone.passes and knowing.draws <= alone.draws


def test_an_answer_that_has_grown_is_stored_like_one_that_was_added():
    grown, whole = growing()._core, History()
    handle, ids = grown.track(PROMPTS[0]), np.array([1, 2, 3, 1, 2, 4, 1, 2], np.int32)
    for piece in (ids[:1], ids[1:6], ids[6:]):
        grown.extend_tracked(np.array([handle]), piece, np.array([len(piece)]))
    whole.add(PROMPTS[0], ids, 0.0, 0)
    assert grown.occurrences == whole.occurrences and grown.rollouts == whole.rollouts


def test_the_study_keeps_its_trace(tmp_path, monkeypatch, capsys):
    small = [
        "rollout.prompts_per_step=4", "rollout.num_generations=4", "rollout.max_completion_length=24",
        "model.path=small", "task.train_size=8", "task.test_size=8", "task.gate_size=0",
    ]  # fmt: skip
    monkeypatch.setattr(siblings, "RUNS", {"arithmetic": (0, 2)})
    monkeypatch.setattr(siblings, "DEFAULTS", [*siblings.DEFAULTS, *small])
    folders = {"output_dir": tmp_path / "runs", "results": tmp_path / "results"}
    args = argparse.Namespace(**folders, runs=["arithmetic"], overheads=[30.0, 300.0])
    siblings.run(args)
    monkeypatch.setattr(siblings, "record", None)
    siblings.run(args)
    text = (tmp_path / "results" / "siblings.md").read_text()
    assert capsys.readouterr().out.endswith(text)
    assert "2 steps, 32 answers in groups of 4" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows[1:]] == list(RULES) and {len(row) for row in rows} == {5}
