"""What stages of earlier runs could have told a run."""

import argparse
import random

import pytest
import torch

from bench.studies.replay import (
    SPANS,
    by_the_stage,
    by_their_line,
    error,
    gained,
    outcome_losses,
    outcome_table,
    recorded,
    rhymes,
    run,
)
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.records import RunFacts, StepRecord
from python_trainer.accelerators.rhyme.sketch import PARTS
from python_trainer.errors import UserError

STEPS, GROUPS, ANSWERS = 60, 6, 8


def add_run(database, task, accuracy, chances, seed):
    """A run of GROUPS prompts a step; ``chances`` of each prompt, or else as accurate as ``accuracy`` says."""
    rng = random.Random(seed)
    number = database.add_run(RunFacts("tiny", 1, "bytes", task, "grpo", {"seed": seed}))
    for step in range(STEPS):
        asked = rng.sample(range(30), GROUPS)
        right = [sum(rng.random() < chances[i] for _ in range(ANSWERS)) for i in asked]
        outcomes = {
            "prompts": torch.tensor([[i] * 16 for i in asked], dtype=torch.uint8),
            "answers": torch.full((GROUPS,), ANSWERS, dtype=torch.int32),
            "right": torch.tensor(right, dtype=torch.int32),
        }
        sketch = {name: torch.ones(bins) for name, bins in PARTS.items()}
        database.add_step(number, StepRecord(step + 1, step, 7.0, accuracy(step), sketch, 0, outcomes), [])


def read(database):
    return [recorded(each, database.trajectory(each.id)) for each in database.runs()]


@pytest.fixture
def database(tmp_path):
    return RetrospectiveDatabase(str(tmp_path / "history.db"))


def cost(runs, places=lambda step: None):
    losses, answers = outcome_losses(runs[1], runs[0], places)
    assert answers.tolist() == [GROUPS * ANSWERS] * STEPS
    return (losses.sum() / answers.sum()).item()


def test_an_earlier_run_helps_where_prompts_are_as_hard_to_both_and_else_is_no_longer_believed(database):
    chances = [0.05 if i % 2 else 0.95 for i in range(30)]
    for seed in (1, 2):
        add_run(database, "paths", lambda step: 0.5, chances, seed)
    alone, helped = cost(read(database), lambda step: 10**6), cost(read(database))  # that far off nothing is left
    assert helped < 0.9 * alone
    shuffled = random.Random(0).sample(chances, 30)
    others = RetrospectiveDatabase(database.url.replace("history", "others"))
    add_run(others, "paths", lambda step: 0.5, shuffled, 1)
    add_run(others, "paths", lambda step: 0.5, chances, 2)
    assert cost(read(others)) < 1.15 * alone, "after the first steps its weight is 0"


def test_the_first_step_is_told_by_the_earlier_run_alone(database):
    for seed in (1, 2):
        add_run(database, "paths", lambda step: 0.5, [float(i % 2) for i in range(30)], seed)
    losses, answers = outcome_losses(*read(database)[::-1], lambda step: None)
    expected = [n / (n + 2) * 1 + 2 / (n + 2) * 0.5 for n in range(0, 999, ANSWERS)]  # p of a right answer after n
    asked = [key for group in read(database)[0].groups for key in group]
    first = [-torch.tensor(expected[asked.count(key)]).log().item() for key in read(database)[1].groups[0]]
    assert losses[0].item() / answers[0].item() == pytest.approx(sum(first) / len(first), abs=1e-3)


def test_the_run_that_goes_ahead_tells_what_comes(database):
    def rising(step):
        return 0.1 + 0.8 / (1 + 2.718 ** (-(step - 30) / 6))

    for task in ("paths", "sums"):  # of another task, as far as curves go
        add_run(database, task, rising, [0.5] * 30, 1)
    here, there = read(database)
    rhyming, truth = rhymes(here, there), gained(here, 8)
    assert rhyming[30] == pytest.approx(29, abs=1)
    assert error(by_the_stage(here, there, rhyming, 8), truth, 8) < 1
    assert 5 < error(by_their_line(here, 8), truth, 8) < error(torch.zeros(len(truth)), truth, 8)


def test_a_prediction_that_misleads_is_believed_no_more():
    truth = torch.sin(torch.arange(100.0))
    assert error(-truth, truth, 1) < 1.15 * error(torch.zeros(100), truth, 1)
    assert error(truth, truth, 1) == pytest.approx(0, abs=1e-5)
    late = error(truth, truth, 50)  # nothing has come true for 49 steps, so it is believed, and right
    assert late == pytest.approx(0, abs=1e-5)


def test_the_tables(database, capsys):
    for task in ("paths", "paths", "sums"):
        add_run(database, task, lambda step: step / STEPS, [0.5] * 30, 3)
    run(argparse.Namespace(database=database.url))
    out = capsys.readouterr().out
    assert out.count("not at all") == 1 and "paths, run 2 (seed 3), beside run 1: nats an answer" in out
    assert out.count("| the last 8 steps |") == out.count("| their line over 24 |") == 3
    assert out.count("| the stage that rhymes in ") == 6
    runs = read(database)
    assert len(outcome_table(runs[1], runs[0], rhymes(runs[1], runs[0]))[2].split("|")) == len(SPANS) + 3


def test_it_takes_two_runs(database):
    with pytest.raises(UserError, match=r"0 runs of 48 steps or more; it takes two"):
        run(argparse.Namespace(database=database.url))
