"""Answers in turns with an environment: tokens, masks, log-probabilities, the cache, failures, chats, a game."""

import copy
import json
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import groupby
from unittest.mock import Mock

import pytest
import yaml
from conftest import QUIET, merged, same, train
from paged import Letters, engine_for, make, prompts
from sampling_cases import compute_logprobs
from support import ROOT

from python_trainer.config import load_config
from python_trainer.data import Example, Group
from python_trainer.environment import Environment
from python_trainer.errors import UserError
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.episodes import EpisodeEngine, initial_prompt
from python_trainer.run.directory import read_metrics
from python_trainer.run.logger import rollout_statistics
from python_trainer.tasks.rewards import REWARDS
from python_trainer.trainer import Trainer
from rlkernels import RolloutHistory

SAMPLING = SamplingParams(temperature=0.9, seed=5)
EOS = tuple(range(12))  # every fifth token or so ends a turn


class Echo(Environment):
    """Ask a bit more than the example says, and repeat turns backwards: as many as it says, or one."""

    def reset(self, example):
        self.left = example.columns.get("turns", 1)
        return f"HH{example.prompt}"

    def step(self, text):
        self.left -= 1
        return text[::-1], 0.5, self.left <= 0


class Slow(Echo):
    def step(self, text):
        time.sleep(0.002 * (len(text) % 7))
        return super().step(text)


class Failing(Echo):
    """Fail in the second turn of every third prompt: by an error, by leaving, or by never coming back."""

    def step(self, text):
        observation = super().step(text)
        if self.kind and self.left == 1:
            if self.kind == 3:
                threading.Event().wait()
            raise {1: ValueError("out of order"), 2: SystemExit(3)}[self.kind]
        return observation

    def reset(self, example):
        self.kind = example.columns.get("kind")
        return super().reset(example)


def episodes(model, make_environment=Echo, *, max_turns=8, timeout=20.0, **options):
    inner = engine_for(model, eos=EOS, **options)
    engine = EpisodeEngine(inner, make_environment, Letters(), max_turns=max_turns)
    engine.timeout = timeout
    return engine


def groups(turns=(3, 1, 4), samples=3, length=70, **columns):
    return [
        Group(ids, [], samples, length, 10 * i, example=Example("a", {"turns": n, **columns}), prompt_index=i)
        for i, (ids, n) in enumerate(zip(prompts([19, 6, 11]), turns))
    ]


def content(rollouts):
    return [(r.response_ids, r.response_mask, r.finish_reason, r.episode.turns, r.episode.reward) for r in rollouts]


@pytest.fixture(scope="module")
def model():
    return make()


def turns_of(rollout):
    """Return (whether the policy wrote them, tokens) of each stretch of an answer."""
    pairs = zip(rollout.response_mask, rollout.response_ids, strict=True)
    return [(by_policy, [token for _, token in stretch]) for by_policy, stretch in groupby(pairs, lambda pair: pair[0])]


def test_turns_masks_and_logprobs(model):
    """Each turn stands as it was generated, each reply as it was given; every log-probability is of its position."""
    requests = groups()
    rollouts = episodes(model).generate(requests, SAMPLING)
    assert len(rollouts) == 9 and any(r.episode.turns == 4 for r in rollouts)
    for number, rollout in enumerate(rollouts):
        turns = requests[number // 3].example.columns["turns"]
        stretches = turns_of(rollout)
        assert [by_policy for by_policy, _ in stretches] == [i % 2 == 0 for i in range(len(stretches))]
        for (_, turn), (_, reply) in zip(stretches[::2], stretches[1::2]):
            assert reply == turn[::-1] and turn[-1] in EOS
        if rollout.finish_reason == "stop":
            assert rollout.episode.turns == turns and rollout.episode.reward == 0.5 * turns
            assert len(stretches) == 2 * turns - 1
        else:
            assert len(rollout.response_ids) == 70 or stretches[-1][0]
        expected = compute_logprobs(model, rollout.prompt_ids, rollout.response_ids, SAMPLING)
        for by_policy, logprob, expected_logprob in zip(rollout.response_mask, rollout.logprobs, expected):
            assert not by_policy or logprob == pytest.approx(expected_logprob, abs=1e-3)
    assert any(r.finish_reason == "stop" for r in rollouts)
    assert all(len(r.logprobs) == len(r.response_ids) for r in rollouts)
    num_generated = sum(rollout.response_mask.count(True) for rollout in rollouts)  # without replies
    row = rollout_statistics(rollouts)
    assert row["completions/generated_length"] == num_generated / 9 < row["completions/mean_length"]


def test_a_later_turn_computes_only_what_is_new(model):
    """Blocks of earlier turns are found in the prefix cache; without keeping them they are computed again."""
    stats = {}
    for keep_answers in (True, False):
        engine = episodes(model)
        requests = groups()
        engine.inner.keep_answers = keep_answers
        rollouts = engine.generate(requests, SAMPLING)
        stats[keep_answers] = engine.stats
    prompt_tokens = sum(len(group.prompt_ids) for group in requests)
    reply_tokens = sum(r.response_mask.count(False) for r in rollouts)
    later_turns = sum(r.episode.turns - 1 for r in rollouts)
    assert later_turns >= 4
    # the last token of a turn is computed with what was said, and so is what does not fill a block of 4
    new_tokens = prompt_tokens + reply_tokens
    max_tokens = new_tokens + later_turns * 4
    assert new_tokens + later_turns <= stats[True]["prefill_tokens"] <= max_tokens < stats[False]["prefill_tokens"]
    prompt_totals = [counts["prefill_tokens"] + counts["cached_tokens"] for counts in stats.values()]
    assert prompt_totals[0] == prompt_totals[1]


def test_neither_pace_nor_company_nor_drafts_change_an_answer(model):
    expected = content(episodes(model).generate(groups(), SAMPLING))
    engine = episodes(model, Slow)
    finished = []
    rollouts = engine.submit(groups(), SAMPLING)
    while polled := engine.poll():
        assert all(rollout.finish_reason for rollout in polled)
        finished += polled
    assert sorted(map(id, finished)) == sorted(map(id, rollouts)) and content(rollouts) == expected
    single = [content(episodes(model).generate([group], SAMPLING)) for group in groups()]
    assert [row for rows in single for row in rows] == expected
    assert content(episodes(model, blocks=40).generate(groups(), SAMPLING)) == expected  # preempts
    engine = episodes(model)
    history = RolloutHistory()
    for group, row in zip([g for g in groups() for _ in range(3)], expected):
        history.add(group.prompt_ids, row[0])
    engine.drafter = Drafter(history, pass_overhead=1000.0)
    assert content(engine.generate(groups(), SAMPLING)) == expected and engine.stats["accepted_tokens"] > 20


def test_a_failing_environment_ends_its_own_answer(model):
    """Raising, leaving and hanging; the others are as they would be."""
    requests = groups(turns=(3, 3, 3), samples=2)
    expected = episodes(model).generate(copy.deepcopy(requests), SAMPLING)
    for group, kind in zip(requests, (1, 2, 3)):
        group.example.columns["kind"] = kind
    plain = copy.deepcopy(groups(turns=(4,), samples=2)[0])
    plain.sample_id = 90
    engine = episodes(model, Failing, timeout=2.0)  # the others, too, answer in this time
    rollouts = engine.generate([*requests, plain], SAMPLING)
    reasons = [r.episode.failure for r in rollouts]
    for rollout, full_rollout, reason in zip(rollouts, expected, reasons):
        turns = full_rollout.episode.turns
        if turns < 2 or (turns == 2 and full_rollout.finish_reason == "length"):
            continue
        count = len(rollout.response_ids)
        assert rollout.finish_reason == "length" and rollout.episode.turns == 2 and reason
        assert rollout.response_ids == full_rollout.response_ids[:count] and rollout.episode.reward == 0.5
    assert {"ValueError: out of order", "SystemExit: 3"} <= set(reasons)
    assert "TimeoutError: no answer within 2 s, the timeout of its class" in reasons
    expected_plain = episodes(model).generate([plain], SAMPLING)
    assert content(rollouts[-2:]) == content(expected_plain) and reasons[-2:] == ["", ""]
    assert content(engine.generate([plain], SAMPLING)) == content(expected_plain)  # and it goes on


def test_a_stop_string_does_not_begin_in_a_reply(model):
    (free,) = episodes(model, tokenizer=Letters()).generate(groups(turns=(3,), samples=1), SAMPLING)
    (_, reply), (_, second) = turns_of(free)[1:3]
    sampling = replace(SAMPLING, stop=(Letters().decode([reply[-1], second[0]]),))
    (stopped,) = episodes(model, tokenizer=Letters()).generate(groups(turns=(3,), samples=1), sampling)
    assert stopped.response_ids == free.response_ids


def test_limits_of_an_answer(model):
    short = episodes(model, max_turns=2).generate(groups(turns=(9, 9, 9)), SAMPLING)
    assert max(r.episode.turns for r in short) == 2
    assert all(r.finish_reason == "length" and r.response_mask[-1] for r in short)
    tight = episodes(model).generate(groups(turns=(9, 9, 9), length=25), SAMPLING)
    assert all(len(r.response_ids) <= 25 and r.response_mask[-1] and r.finish_reason == "length" for r in tight)
    assert any(len(r.response_ids) == 25 for r in tight)


def test_what_is_no_episode_is_refused(model, monkeypatch):
    monkeypatch.setattr(Echo, "step", lambda self, text: (text, float("nan"), False))
    with pytest.raises(UserError, match=r"step returned \(.*nan, False\); allowed: \(text or messages, finite reward"):
        episodes(model).generate(groups(), SAMPLING)
    unready = Mock()
    unready().reset.side_effect = [None, ZeroDivisionError("division by zero")]
    with pytest.raises(UserError, match="reset returned None for prompt 'a'; allowed: text for a prompt that is text"):
        initial_prompt(unready, Example("a"))
    with pytest.raises(UserError, match=r"reset failed for prompt f.jsonl:3: ZeroDivisionError: division by zero"):
        initial_prompt(unready, Example("b", place="f.jsonl:3"))


def test_samples_show_what_was_asked(make_config, tmp_path, monkeypatch):
    """No environment is opened for them."""
    config = make_config(max_steps=1, task={"environment": "test_environments:Echo"})
    trainer = Trainer(config, tmp_path, console=QUIET)
    monkeypatch.setattr("python_trainer.loop.prompts.initial_prompt", Mock(side_effect=AssertionError("opened again")))
    trainer.run()
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    prompts = {sample["prompt"] for sample in json.loads(line)["samples"]}
    assert prompts and prompts <= {f"HH{example.prompt}" for example in trainer.task.train}


def test_rewards_get_what_the_environment_gave():
    function = REWARDS.resolve("environment")
    assert function([], [], [], environment_reward=[1.0, 0.5]) == [1.0, 0.5]
    with pytest.raises(UserError, match="reward environment needs task.environment"):
        function([], [], [])


GIVEN = set()  # prompts that a reward function got


def noted(prompts, completions, completion_ids, **columns):
    GIVEN.update(prompts)
    return [float(len(ids) % 2) for ids in completion_ids]


def test_rewards_get_the_prompts_that_the_environment_opened(make_config, jsonl_files, tmp_path):
    GIVEN.clear()
    task = {"environment": "test_environments:Echo", "reward": "test_environments:noted"}
    sets = {"more": str(jsonl_files[0])}
    train(make_config(max_steps=1, task=task, evaluation={"sets": sets}), tmp_path)
    rows = [json.loads(line) for path in jsonl_files for line in path.read_text().splitlines()]
    assert {f"HH{row['prompt']}" for row in rows} == GIVEN


@pytest.fixture
def playing(tiny_policy):
    """Return settings of the guessing game of the examples, of three numbers, for a policy that knows nothing."""
    settings = yaml.safe_load((ROOT / "examples" / "guessing_game.yaml").read_text())
    changes = {
        "max_steps": 3,
        "task": {"numbers": 3, "max_turns": 2},
        "model": {"path": str(tiny_policy), "device": "cpu"},
        "rollout": {"prompts_per_step": 3, "num_generations": 24, "max_completion_length": 12},
        "optimizer": {"learning_rate": 1e-2},
        "save": {"save_steps": 2},
    }
    return merged(settings, changes)


def reached(state, target):
    """Return whether the run has had its steps, or an evaluation of this accuracy."""
    return state.step == 120 or any(accuracy >= target for _, accuracy, _ in state.evaluations)


@pytest.mark.slow
def test_a_game_is_learned_by_what_is_said(playing, tmp_path):
    """Train policies of random weights, the best of which finds what none finds without hints.

    Two guesses of three numbers, all equally frequent: without hints they find two thirds at most, however chosen. Some
    policies stop there, always guessing the same two.
    """
    changes = {"max_steps": 120, "optimizer": {"learning_rate": 4e-3}, "rollout": {"num_generations": 32}}
    changes |= {"algorithm": {"entropy_coef": 0.03}, "evaluation": {"samples": 50, "eval_steps": 10}}
    settings = merged(playing, changes)
    for seed in range(1, 6):
        folder = tmp_path / str(seed)
        trainer = Trainer(load_config(settings | {"seed": seed}), folder, console=QUIET)
        trainer.finished = partial(reached, trainer.state, 0.87)
        trainer.run()
        rows = read_metrics(folder)
        if (best := rows[-1]["eval/accuracy"]) > 0.85:
            break
    steps = [row for row in rows if "reward" in row]
    first = sum(row["reward"] for row in steps[:5]) / 5
    assert first < 0.4 and best > 0.85, (first, best)
    assert steps[-1]["environment/turns"] > 1.2 and all(row["environment/failures"] == 0 for row in steps)
    assert all(row["rewards/found/mean"] == pytest.approx(row["reward"]) for row in steps)


def test_an_interrupted_game_goes_on_as_if_nothing_had_been(playing, tmp_path):
    config = load_config(playing)
    uninterrupted = train(config, tmp_path / "whole")
    train(config.model_copy(update={"max_steps": 2}), tmp_path / "part")
    assert same(train(config, tmp_path / "part", resume=True), uninterrupted)
