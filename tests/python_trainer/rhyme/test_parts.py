"""Sketches, records of a step, matching, the answer bank, stage 2, retrodiction, judging again, killed attempts."""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import save_tiny_policy
from paged import make
from scipy.stats import spearmanr
from support import assert_equal
from test_packing import plain_score

import python_trainer.model.policy
from python_trainer.accelerators.rhyme import matching, sampling
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StepRecord, prompt_hash
from python_trainer.accelerators.rhyme.matching import PARTS, Curve, find_rhyming_stages, histogram, sketch_of
from python_trainer.accelerators.rhyme.recording import NOTE, begin_run, step_record
from python_trainer.accelerators.rhyme.retrodiction import Retrodictor
from python_trainer.accelerators.rhyme.sampling import AnswerBank, Candidate, encode_again, score_candidates
from python_trainer.data import Example, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.loop.scoring import Scorer
from python_trainer.model.loading import tokenizer_fingerprint
from python_trainer.model.policy import Policy, load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.run.run_state import RunState
from python_trainer.tasks import Task
from rlkernels import dtw
from tools.policies.training import byte_tokenizer

from .conftest import FACTS, make_sample, make_step

BINS = sum(PARTS.values())


def stack(sketch):
    return torch.cat([sketch[name] for name in PARTS])


def answer(text, *, nats=1.0, tokens=4, accuracy=1.0):
    facts = {"text": text, "reward": accuracy, "accuracy": accuracy}
    return Rollout([1], list(range(tokens)), 0, [-nats / tokens] * tokens, "stop", **facts)


def test_a_sketch_does_not_depend_on_the_tokenizer():
    """The same texts with the same information, in few tokens or in many."""
    few_tokens = sketch_of([[answer("12+34=46\nA:46", nats=3.0, tokens=3), answer("1+1=2", tokens=2)]])
    many_tokens = sketch_of([[answer("12+34=46\nA:46", nats=3.0, tokens=13), answer("1+1=2", tokens=5)]])
    assert_equal(many_tokens, few_tokens)
    assert few_tokens["successes"].tolist() == [0] * 8 + [1] and few_tokens["lengths"].sum() == 2
    assert stack(few_tokens).shape == (BINS,)


def test_every_part_of_a_sketch_tells_policies_apart():
    base = histogram(stack(sketch_of([[answer("12+34=46", nats=2.0)]])))
    for changed in (answer("the answer is", nats=2.0), answer("12+34=46" * 9, nats=18.0), answer("12+34=46", nats=0.01),
                  answer("12+34=46", nats=2.0, accuracy=0.0)):  # fmt: skip
        assert (histogram(stack(sketch_of([[changed]]))) - base).abs().sum() > 0.5
    assert torch.allclose(base.sum(), torch.tensor(float(len(PARTS))))


def test_trigrams_are_counted_all():
    assert matching.byte_trigrams(b"").sum() == matching.byte_trigrams(b"ab").sum() == 0
    assert matching.byte_trigrams(b"abcabc").sum() == 4 and matching.byte_trigrams(b"abcabc").max() >= 2
    assert sketch_of([[answer("")]])["ngrams"].sum() == 0  # an empty answer is one, too


def test_what_is_recorded_is_of_answers_from_their_start():
    """Where a step has none, the record of the step before counts."""

    def group(reward, prefix_len, text):
        return [Rollout([1], [2, 3], prefix_len, [-1.0] * (2 - prefix_len), text=text, reward=reward, accuracy=reward)]

    run = SimpleNamespace(task=SimpleNamespace(train=[SimpleNamespace(prompt="p")]))
    first = step_record(run, 1, [group(0.25, 1, "begun")], [])
    assert first.reward == 0.25 and first.outcomes == {}, "there is nothing else"
    two_rounds = step_record(run, 1, [group(0.25, 1, "begun"), group(0.75, 1, "begun")], [])
    assert two_rounds.reward == 0.5, "of all rounds"
    full_answer = step_record(run, 1, [group(1.0, 0, "from its start")], [])
    mixed = step_record(run, 1, [group(0.25, 1, "begun"), group(1.0, 0, "from its start")], [])
    next_record = step_record(run, 2, [group(0.0, 1, "begun")], [mixed])
    assert mixed.generated_tokens == 3 and next_record.generated_tokens == 1
    assert next_record.step == 2 and next_record.outcomes == {}
    assert mixed.outcomes["right"].tolist() == mixed.outcomes["answers"].tolist() == [1]
    for record in mixed, next_record:
        assert record.reward == record.accuracy == 1.0
        assert_equal(record.sketch, full_answer.sketch)


def run_of(run_id, rewards, style=None):
    """Return the curve of a run whose policy writes in a style that changes with its reward."""
    counts = torch.zeros(len(rewards), BINS)
    for row, reward in zip(counts, rewards if style is None else style):
        row[int(255 * reward)] = 10
        row[256 + 5] = row[256 + 32 + 5] = row[256 + 56 + round(8 * reward)] = 1
    return Curve(run_id, torch.arange(1, len(rewards) + 1), torch.tensor(rewards), counts)


def rising(steps, top=0.95):
    return [top / (1 + math.exp(-10 * (i / steps - 0.5))) for i in range(steps)]


def test_the_stage_is_found_where_the_rewards_are_alike():
    """Check also a run of half the speed."""
    best = find_rhyming_stages(run_of(0, rising(60)[25:33]), [run_of(7, rising(60)), run_of(8, [0.05] * 60)], 0.2)[0]
    assert best.run_id == 7 and abs(best.start - 26) <= 2 and abs(best.end - 33) <= 2 and best.score > 0.95
    slow = find_rhyming_stages(run_of(0, rising(40)[14:22]), [run_of(7, rising(80))], 0.2)[0]
    assert abs(slow.start - 29) <= 4 and abs(slow.end - 44) <= 4 and slow.end - slow.start > 8


def test_a_run_that_stalls_low_does_not_match_one_that_is_finished():
    """It would, were curves divided by their own maximum: half of the score is of the rewards."""
    stages = find_rhyming_stages(run_of(0, [0.3] * 8, style=[0.95] * 8), [run_of(7, [0.95] * 40)], 0.2)
    assert 0.5 <= stages[0].score < 0.51


def test_the_share_of_stages_that_is_kept():
    history = [run_of(i, rising(64)) for i in range(3)]
    query = run_of(0, rising(64)[10:18])
    total = len(find_rhyming_stages(query, history, 1.0))
    assert total == 3 * (57 + 49)  # of eight and of sixteen steps
    for fraction in (0.05, 0.2, 0.5, 1.0):
        stages = find_rhyming_stages(query, history, fraction)
        assert len(stages) == math.ceil(fraction * total)
        assert [s.score for s in stages] == sorted((s.score for s in stages), reverse=True)


def test_of_many_stages_those_with_the_nearest_rewards_are_scored(monkeypatch):
    history = [run_of(i, rising(40, top=0.2 + 0.1 * i)) for i in range(8)]
    query = run_of(0, rising(40)[14:22])
    costs = {}
    for curve in history:
        for width in (8, 16):
            for first in range(40 - width + 1):
                cost = dtw(query.rewards[None], curve.rewards[None, first : first + width])
                costs[curve.run_id, first + 1, first + width] = float(cost)
    monkeypatch.setattr(matching, "NEAREST", 20)
    stages = find_rhyming_stages(query, history, 1.0)
    assert {(s.run_id, s.start, s.end) for s in stages} == set(sorted(costs, key=costs.get)[:20])
    assert len(find_rhyming_stages(query, history, 0.02)) == math.ceil(0.02 * len(costs))


def test_what_the_policy_does_counts_as_well_as_its_rewards():
    same_style = run_of(1, [0.5] * 12)
    other_style = run_of(2, [0.5] * 12, style=[0.9] * 12)
    stages = find_rhyming_stages(run_of(0, [0.5] * 8), [other_style, same_style], 1.0)
    assert stages[0].run_id == 1 and stages[-1].run_id == 2 and stages[0].score > stages[-1].score + 0.2


def test_no_history_no_stages():
    assert find_rhyming_stages(run_of(0, [0.5] * 4), [], 0.2) == []
    assert find_rhyming_stages(run_of(0, [0.5] * 4), [run_of(1, [])], 0.2) == []
    assert find_rhyming_stages(run_of(0, [0.5] * 4), [run_of(1, [0.5])], 0.2)[0].start == 1


def test_answers_of_a_stage_and_just_beyond():
    stages = [matching.Stage(3, 10, 14, 0.9), matching.Stage(3, 1, 12, 0.75)]
    assert [matching.match_score(stages, 3, step) for step in (1, 9, 10, 18, 19)] == [0.75, 0.75, 0.9, 0.9, 0.0]
    assert matching.match_score(stages, 4, 5) == 0.0


def test_rewards_are_compared_as_they_are_within_0_and_1():
    records = [StepRecord(1, reward, 0.5, sketch_of([[answer("abc")]])) for reward in (-1.0, 0.25, 7.0)]
    assert matching.curve_of(1, records).rewards.tolist() == [0.0, 0.25, 1.0]


def test_the_bank_keeps_the_best_and_the_newest(monkeypatch):
    monkeypatch.setattr(sampling, "BANK_PER_PROMPT", 3)
    monkeypatch.setattr(sampling, "BANK_SIZE", 5)
    bank = AnswerBank()
    for step, reward in ((1, 1.0), (2, 0.5), (3, 1.0), (4, 1.0)):
        bank.add([(0, make_sample(step, reward, text=f"{step}"))], step)
    assert [e.answer.step for e in bank] == [4, 3, 1]
    bank.add([(0, make_sample(9, 1.0, text="old"))], 2)  # behind what is as good
    assert [e.answer.step for e in bank] == [4, 3, 9]
    bank.add([(0, make_sample(7, 1.0, text="3"))], 7)  # the same text at another step
    assert [e.answer.step for e in bank] == [7, 4, 3]
    for i in range(1, 5):
        bank.add([(i, make_sample(8, text="x"))], 8)
    assert len(bank) == len(list(bank)) == 5 and [e.answer.step for e in bank.by_prompt[0]] == [7]
    assert [s.step for s in bank.candidates(0, lambda s: s.step - 3)] == [7]
    assert bank.candidates(0, lambda s: s.step - 7) == bank.candidates(9, lambda s: 1.0) == []
    bank.fill([])
    bank.add([(0, make_sample(step, text=text)) for step, text in ((1, "x"), (2, "y"), (3, "x"))], 3)
    assert [s.step for s in bank.candidates(0, lambda s: s.step)] == [3, 2]  # a text once


def test_a_bank_is_the_same_after_it_was_saved(monkeypatch):
    monkeypatch.setattr(sampling, "BANK_PER_PROMPT", 2)
    monkeypatch.setattr(sampling, "BANK_SIZE", 3)
    uninterrupted, restored = AnswerBank(), AnswerBank()
    for step, prompt in enumerate([0, 1, 2, 3, 0, 4, 0, 5, 1], 1):
        for bank in (uninterrupted, restored):
            sample = make_sample(step, 1.0 - step % 3 / 10, text=f"{step}")
            bank.add([(prompt, sample), (prompt, make_sample(step, text=f"{step}b"))], step)
            next(iter(bank)).uses += 1
        saved, restored = restored.state_dict(), AnswerBank()
        restored.load_state_dict(saved)

        def rows(bank):
            return [(e.prompt, e.born, e.last_use, e.uses, e.answer.text) for e in bank]

        assert rows(uninterrupted) == rows(restored)
    entry = next(iter(restored)).answer
    assert entry.logprobs[1].isnan() and entry.response_ids.tolist() == [1, 2, 3]


def test_answers_in_other_tokens_are_encoded_again_without_logprobs():
    """An answer to messages ends as the chat template ends it; one that would hold an end token is left out."""
    tokenizer = byte_tokenizer()
    fingerprint = tokenizer_fingerprint(tokenizer)
    assert fingerprint == tokenizer_fingerprint(byte_tokenizer())
    policy = Policy(make(vocab_size=len(tokenizer)), tokenizer, name="bytes")
    policy.turn_end = [7, 8]
    chat = [{"role": "user", "content": "4"}]
    run = SimpleNamespace(policy=policy, task=SimpleNamespace(train=[Example("3"), Example(chat)]))
    native, foreign, reply, ended = (
        make_sample(text=text) for text in ("", "12+3=15", "6", f"1{tokenizer.eos_token}5")
    )
    foreign.prompt_key = prompt_hash("3")
    reply.prompt_key = prompt_hash(chat)
    native.tokenizer = fingerprint
    for answer in (foreign, reply, ended):
        answer.tokenizer = "other"
    encoded = encode_again([native, foreign, reply, ended], run, fingerprint)
    assert encoded[0].logprobs[0] == -0.5 and encoded[0].response_ids.tolist() == [1, 2, 3]
    assert (
        encoded[1].response_ids.tolist() == [*b"12+3=15", tokenizer.eos_token_id] and encoded[1].logprobs.isnan().all()
    )
    assert len(encoded) == 3 and encoded[2].response_ids.tolist() == [*b"6", 7, 8]


def test_prompts_are_named_by_their_text():
    assert prompt_hash("12+3=") != prompt_hash("12+4=") and len(prompt_hash("é")) == 32
    assert prompt_hash([{"role": "user", "content": "a"}]) == prompt_hash([{"content": "a", "role": "user"}])
    assert len(prompt_hash([{"role": "user", "content": "a", "name": "half of a character: \ud83d"}])) == 32


@pytest.mark.parametrize("limit", [None, 0, 4 * 300 * 7])
def test_scores_are_those_of_the_policy(make_config, tmp_path, monkeypatch, limit):
    """Score all logits at once, one row at a time, and seven of fifteen; unknown weights are 1."""
    policy = load_policy(ModelConfig(path=str(save_tiny_policy(tmp_path / "p", vocab=300)), device="cpu"))
    answers = [Rollout([20, 21, 22], ids) for ids in ([1, 2, 3], [1, 2, 4, 9], [30, 31], [5] * 6)]
    if limit is not None:
        monkeypatch.setattr(python_trainer.model.policy, "LARGEST_LOGITS", limit)
    behaviour = [[math.nan] * 3, [-5.0, math.nan, -9.0, -5.0], [-5.0] * 2, [-5.0] * 6]
    config = make_config(rollout={"temperature": 0.7}, optimizer={"micro_batch_tokens": 12})
    candidates = [Candidate(make_sample(ids=a.response_ids), 0, a.prompt_ids, 1.0) for a in answers]
    for candidate, behaviour_row in zip(candidates, behaviour):
        candidate.answer.logprobs = torch.tensor(behaviour_row)
    score_candidates(SimpleNamespace(policy=policy, config=config, on_rank0=lambda function: function()), candidates)
    for candidate, a, behaviour_row in zip(candidates, answers, behaviour):
        logprobs, entropy = (x.detach() for x in plain_score(policy, a, 0.7))
        torch.testing.assert_close(candidate.logprobs, logprobs, rtol=1e-4, atol=1e-5)
        assert candidate.entropy == pytest.approx(float(entropy.mean()), rel=1e-4)
        weights = (logprobs - torch.tensor(behaviour_row)).exp().clamp(max=1).nan_to_num(1.0)
        assert candidate.weight == pytest.approx(float(weights.mean()), rel=1e-3)


def test_the_network_learns_to_rank_what_it_has_not_seen():
    retrodictor = Retrodictor()
    width = 9
    generator = torch.Generator().manual_seed(0)

    def step():
        x = torch.randn(32, width, generator=generator)
        x[:, 3] = 1.0  # a constant feature
        noise = 0.05 * torch.randn(32, generator=generator) + 7 * torch.randn((), generator=generator)
        return x, x[:, 0] * 0.3 - x[:, 5] ** 2 + noise

    for num_steps in range(12):
        assert retrodictor.ready == (num_steps >= 4)
        retrodictor.learn(*step())
    x, y = step()
    assert spearmanr(retrodictor.predict(x), y).statistic > 0.7
    restored = Retrodictor()
    restored.load_state_dict(retrodictor.state_dict())
    assert torch.equal(restored.predict(x), retrodictor.predict(x))


KEYS = [prompt_hash(prompt) for prompt in "ab"]


def context(function, config):
    """Return the parts of a step that judging by a reward function uses."""
    examples = [Example("a", {"limit": 3}), Example("b", {"limit": 9}), Example("a", {"limit": 1})]
    task = Task("words", examples, (), {"size": function}, (), {"size": 10.0})
    scorer = Scorer(config, SimpleNamespace(task=task, state=RunState()), RankGroup())
    return SimpleNamespace(task=task, config=config, score_stored=scorer.score_stored)


def test_answers_are_judged_as_fresh_ones_of_this_run(make_config):
    """Reward functions, weights and penalties; in calls as large as a step's, async."""
    calls = []

    async def short(prompts, completions, completion_ids, limit):
        calls.append(len(prompts))
        assert [len(ids) for ids in completion_ids] == [len(text) for text in completions]
        return [float(len(text) <= max_len) for text, max_len in zip(completions, limit)]

    rollout = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 8}
    config = make_config(rollout=rollout, algorithm={"overlong_cache": 4})
    texts = ["x", "xx", "xxx", "xxxx", "xxxxxx", "x" * 8, "x" * 9]
    samples = [make_sample(text=text, key=key, ids=range(len(text)), reward=0.7) for key in KEYS for text in texts]
    samples.append(make_sample(text="x", key=prompt_hash("c"), ids=[1]))
    scored = sampling.score_again(samples, context(short, config))
    assert calls == [4, 4, 4, 4, 2], "6 answers to each prompt of this run, none longer than it allows"
    # two examples have one prompt: each judges by its own limit
    assert [(number, s.text) for number, s in scored] == [
        *((0, t) for t in texts[:3]),
        *((1, t) for t in texts[:6]),
        (2, "x"),
    ]
    penalties = {"x" * 6: 0.5, "x" * 8: 1.0}
    assert [s.reward for _, s in scored] == [10.0 - penalties.get(s.text, 0.0) for _, s in scored]
    with pytest.raises(UserError, match="size.*raised ZeroDivisionError"):
        sampling.score_again(samples, context(lambda **columns: 1 / 0, config))
    assert sampling.score_again([], context(short, config)) == [] and len(calls) == 5


def test_a_run_takes_the_place_of_its_own_attempt_and_of_no_other(url, tmp_path):
    database = RetrospectiveDatabase(url)
    folders = [tmp_path / name for name in ("run", "copy")]
    other_run = database.add_run(FACTS)
    folders[0].mkdir()
    attempts = [replace(FACTS, created=float(number)) for number in range(1, 5)]
    first = begin_run(database, attempts[0], folders[0])
    for run, created in ((other_run, FACTS.created), (first, attempts[0].created)):
        database.add_step(run, make_step(), [make_sample(text=f"{run}")], created=created)
    shutil.copytree(*folders)
    begin_run(database, attempts[1], folders[1])  # a copy of the folder is no attempt at the same run

    def steps():
        return [len(database.trajectory(run.id)) for run in database.runs()]

    assert steps() == [1, 1, 0] and database.runs()[1].created == 1.0
    begin_run(database, attempts[2], folders[0])
    assert steps() == [1, 0, 0] and [s.text for s in database.samples()] == [f"{other_run}"]
    note = json.loads((folders[0] / NOTE).read_text())
    (folders[0] / NOTE).write_text(json.dumps(note | {"run": other_run}))  # as if ids had been used again
    begin_run(database, attempts[3], folders[0])
    assert steps() == [1, 0, 0, 0]
    (folders[0] / NOTE).write_text("no note of ours")
    begin_run(database, attempts[3], folders[0])
    assert steps() == [1, 0, 0, 0, 0]
