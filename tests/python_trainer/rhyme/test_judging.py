"""Stored answers under the rewards of another run, banks of another size, and attempts that were killed."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from python_trainer.accelerators.rhyme.attempts import NOTE, begin_run
from python_trainer.accelerators.rhyme.bank import SampleBank
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.judging import judged
from python_trainer.accelerators.rhyme.records import prompt_key
from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.scoring import shaped_rewards
from python_trainer.tasks import Task
from python_trainer.tasks.rewards import score

from .conftest import FACTS, make_sample, make_step

KEYS = [prompt_key(prompt) for prompt in "ab"]


def task_with(function, **options):
    examples = [Example("a", {"limit": 3}), Example("b", {"limit": 9})]
    return Task("words", examples, (), {"size": function}, (), {"size": 10.0}, "size", **options)


def context(task, config):
    """What judging uses of a step."""

    def judge(examples, texts, ids):
        scores = score(task, examples, texts, ids)
        longest = config.rollout.max_completion_length
        return replace(scores, total=shaped_rewards(scores.total, ids, config.algorithm, longest))

    return SimpleNamespace(task=task, generation=config.rollout, judge=judge)


def test_answers_are_judged_as_fresh_ones_of_this_run(make_config):
    """Reward functions, weights and penalties; in calls as large as a step's, async and with a limit."""
    calls = []

    async def short(prompts, completions, completion_ids, limit):
        calls.append(len(prompts))
        assert [len(ids) for ids in completion_ids] == [len(text) for text in completions]
        return [1.0 if len(text) <= most else 0.5 for text, most in zip(completions, limit)]

    config = make_config(
        rollout={"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 8},
        algorithm={"overlong_cache": 4},
    )
    texts = ["x", "xx", "xxx", "xxxx", "xxxxxx", "x" * 8, "x" * 9]
    samples = [make_sample(text=text, key=key, ids=range(len(text)), reward=0.7) for key in KEYS for text in texts]
    samples.append(make_sample(text="x", key=prompt_key("c"), ids=[1]))
    found = judged(samples, context(task_with(short, reward_timeout=60.0), config))
    assert calls == [4, 4, 4], "12 answers to prompts of this run, none longer than it allows"
    assert [s.text for s in found] == [*texts[:3], *texts[:6]]
    lost = {"x" * 6: 0.5, "x" * 8: 1.0}
    assert [s.reward for s in found] == [10.0 - lost.get(s.text, 0.0) for s in found]
    with pytest.raises(UserError, match="size.*raised ZeroDivisionError"):
        judged(samples, context(task_with(lambda **columns: 1 / 0), config))
    assert judged([], context(task_with(short), config)) == [] and len(calls) == 3


def test_a_bank_of_another_size_keeps_the_best_that_fit():
    whole = SampleBank(per_prompt=4, size=99)
    for key in "ab":
        for step, reward in enumerate([1.0, 0.6, 0.8, 0.6], 1):
            whole.add(make_sample(step, reward, text=f"{step}", key=key), fresh=True)
    assert [s.step for s in whole] == [1, 3, 4, 2] * 2

    def loaded(per_prompt, size):
        bank = SampleBank(per_prompt, size)
        bank.load_state_dict(whole.state_dict())
        assert len(bank) == len(list(bank))
        return "".join(f"{s.prompt_key}{s.step}" for s in bank)

    assert loaded(4, 99) == "a1a3a4a2b1b3b4b2" and loaded(2, 99) == "a1a3b1b3"
    assert loaded(4, 5) == "a1a3b1b3b4" and loaded(4, 1) == "b1"


def test_a_full_bank_drops_the_same_answers_after_it_was_saved():
    whole, parts = SampleBank(per_prompt=2, size=3), SampleBank(per_prompt=2, size=3)
    for step, key in enumerate("abcdaeafb", 1):
        for bank in (whole, parts):
            bank.add(make_sample(step, text=f"{step}", key=key), fresh=True)
        saved, parts = parts.state_dict(), SampleBank(per_prompt=2, size=3)
        parts.load_state_dict(saved)
        assert [(s.prompt_key, s.step) for s in whole] == [(s.prompt_key, s.step) for s in parts]
        assert len(whole) == len(list(whole)) and all(whole.by_prompt.values())
    whole.add(make_sample(10, key="new"), fresh=False)
    assert "new" not in whole.by_prompt, "there is no room for what is historical"


def test_filling_a_bank_sorts_by_reward_and_leaves_equal_ones_in_order():
    bank = SampleBank(9, 9)
    bank.fill([make_sample(step, reward, text=f"{step}") for step, reward in ((1, 0.6), (2, 2.0), (3, 0.6), (4, 2.0))])
    assert [s.step for s in bank] == [2, 4, 1, 3] and len(bank) == 4
    assert bank.knows(make_sample(4, text="4")) and not bank.knows(make_sample(5, text="4"))


def test_a_run_takes_the_place_of_its_own_attempt_and_of_no_other(url, tmp_path):
    database, folders = RetrospectiveDatabase(url), [tmp_path / name for name in ("run", "copy")]
    other = database.add_run(FACTS)
    folders[0].mkdir()
    first, created = begin_run(database, FACTS, folders[0])
    for run in (other, first):
        database.add_step(run, make_step(), [make_sample(text=f"{run}")])
    shutil.copytree(*folders)
    begin_run(database, FACTS, folders[1])  # a copy of the folder is no attempt at the same run
    assert [run.steps for run in database.runs()] == [1, 1, 0]
    assert [run.created for run in database.runs() if run.id == first] == [created]
    again, _ = begin_run(database, FACTS, folders[0])
    assert {run.id: run.steps for run in database.runs()}[again] == 0
    assert [run.steps for run in database.runs()] == [1, 0, 0] and [s.text for s in database.samples()] == [f"{other}"]
    note = json.loads((folders[0] / NOTE).read_text())
    (folders[0] / NOTE).write_text(json.dumps(note | {"run": other}))  # as if ids had been used again
    begin_run(database, FACTS, folders[0])
    assert [run.steps for run in database.runs()] == [1, 0, 0, 0]
    (folders[0] / NOTE).write_text("[]")
    begin_run(database, FACTS, folders[0])
    assert len(database.runs()) == 5 and json.loads((folders[0] / NOTE).read_text())["run"] == database.runs()[-1].id
