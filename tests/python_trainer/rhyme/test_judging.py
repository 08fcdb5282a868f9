"""Stored answers under the rewards of another run, and attempts that were killed."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, prompt_key
from python_trainer.accelerators.rhyme.recording import NOTE, begin_run
from python_trainer.accelerators.rhyme.sampling import judge_again
from python_trainer.data import Example
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.evaluation import Scorer
from python_trainer.run_state import RunState
from python_trainer.tasks import Task

from .conftest import FACTS, make_sample, make_step

KEYS = [prompt_key(prompt) for prompt in "ab"]


def task_with(function):
    examples = [Example("a", {"limit": 3}), Example("b", {"limit": 9}), Example("a", {"limit": 1})]
    return Task("words", examples, (), {"size": function}, (), {"size": 10.0})


def context(task, config):
    """What judging uses of a step."""
    scorer = Scorer(config, SimpleNamespace(task=task), RankGroup(), RunState(), decode=str)
    return SimpleNamespace(task=task, config=config, judge=scorer.judge)


def test_answers_are_judged_as_fresh_ones_of_this_run(make_config):
    """Reward functions, weights and penalties; in calls as large as a step's, async."""
    calls = []

    async def short(prompts, completions, completion_ids, limit):
        calls.append(len(prompts))
        assert [len(ids) for ids in completion_ids] == [len(text) for text in completions]
        return [float(len(text) <= most) for text, most in zip(completions, limit)]

    rollout = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 8}
    config = make_config(rollout=rollout, algorithm={"overlong_cache": 4})
    texts = ["x", "xx", "xxx", "xxxx", "xxxxxx", "x" * 8, "x" * 9]
    samples = [make_sample(text=text, key=key, ids=range(len(text)), reward=0.7) for key in KEYS for text in texts]
    samples.append(make_sample(text="x", key=prompt_key("c"), ids=[1]))
    found = judge_again(samples, context(task_with(short), config))
    assert calls == [4, 4, 4, 4, 2], "6 answers to each prompt of this run, none longer than it allows"
    # two examples have one prompt: each judges by its own limit
    assert [(number, s.text) for number, s in found] == [
        *((0, t) for t in texts[:3]),
        *((1, t) for t in texts[:6]),
        (2, "x"),
    ]
    lost = {"x" * 6: 0.5, "x" * 8: 1.0}
    assert [s.reward for _, s in found] == [10.0 - lost.get(s.text, 0.0) for _, s in found]
    with pytest.raises(UserError, match="size.*raised ZeroDivisionError"):
        judge_again(samples, context(task_with(lambda **columns: 1 / 0), config))
    assert judge_again([], context(task_with(short), config)) == [] and len(calls) == 5


def test_a_run_takes_the_place_of_its_own_attempt_and_of_no_other(url, tmp_path):
    database, folders = RetrospectiveDatabase(url), [tmp_path / name for name in ("run", "copy")]
    other = database.add_run(FACTS)
    folders[0].mkdir()
    begun = [replace(FACTS, created=float(number)) for number in range(1, 5)]
    first = begin_run(database, begun[0], folders[0])
    for run in (other, first):
        database.add_step(run, make_step(), [make_sample(text=f"{run}")])
    shutil.copytree(*folders)
    begin_run(database, begun[1], folders[1])  # a copy of the folder is no attempt at the same run

    def steps():
        return [len(database.trajectory(run.id)) for run in database.runs()]

    assert steps() == [1, 1, 0] and database.runs()[1].created == 1.0
    begin_run(database, begun[2], folders[0])
    assert steps() == [1, 0, 0] and [s.text for s in database.samples()] == [f"{other}"]
    note = json.loads((folders[0] / NOTE).read_text())
    (folders[0] / NOTE).write_text(json.dumps(note | {"run": other}))  # as if ids had been used again
    begin_run(database, begun[3], folders[0])
    assert steps() == [1, 0, 0, 0]
    (folders[0] / NOTE).write_text("no note of ours")
    begin_run(database, begun[3], folders[0])
    assert steps() == [1, 0, 0, 0, 0]
