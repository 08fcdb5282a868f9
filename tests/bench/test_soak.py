"""Soak: the comparisons see what they are for, and the page has what was recorded."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import lacks

from bench.faults.training import Ended
from bench.soak import __main__ as soak
from bench.soak import large, memory, operations, trainers
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.records import RunFacts, StepRecord, StoredAnswer
from rlkernels import backend
from rlkernels.history.reference import History

PAGE = Path(__file__).parents[2] / "docs" / "trust.md"
FACTS = RunFacts("qwen2", 1000, "tokens", "jsonl", "group", {})


def test_the_page_has_the_table_of_the_records():
    assert soak.table(soak.read_rows(soak.RECORDS)) in PAGE.read_text(encoding="utf-8")


@pytest.fixture
def compiled():
    if backend.extension_error():
        lacks("the compiled extension")


@pytest.mark.parametrize("seed", range(3))
def test_the_history_equals_its_model(compiled, seed):
    totals: dict[str, int] = {}
    operations.one_pair(lambda rng: operations.HistoryPair(rng.choice([100, 400])), str(seed), 3000, totals)
    assert totals["draft tokens"] > 100 and totals["evictions"] > 10


def test_a_history_that_is_not_its_model_is_named(compiled, monkeypatch):
    shorter = History.draft
    monkeypatch.setattr(History, "draft", lambda *arguments: shorter(*arguments)[:-1])
    found = operations.run_history(SimpleNamespace(operations=500, seed=0))
    assert found["operations"] == 0 and "AssertionError: ('draft'" in found["problems"][0]


def test_growth_is_the_slope_and_its_interval():
    rng, steps = np.random.default_rng(0), range(1000, 5000)
    noise = rng.normal(0, 1e5, len(steps))
    for wanted in (0.0, 300.0):
        slope, low, high = memory.growth([(step, 3e8 + wanted * step + n) for step, n in zip(steps, noise)])
        assert low < wanted < high and high - low < 30 and low < slope < high  # noise of 1.4 a step: 95 % are 5.4


@pytest.fixture
def seats(tmp_path):
    """Two trainers that have ended well, and their database."""
    url, seats = str(tmp_path / "history.db"), []
    database = RetrospectiveDatabase(url)
    for number in range(2):
        run, folder = database.add_run(FACTS), tmp_path / f"run-{number}"
        folder.mkdir()
        for step in range(1, 4 + number):
            answer = StoredAnswer(run, step, step, "key", "12", True, 1.0, [1, 2], [-0.5, -0.25])
            database.add_step(run, StepRecord(step, step, 0.5, 0.5, {"lengths": torch.tensor([1])}, 10), [answer])
        rows = [f'{{"step": {step}}}\n' for step in range(4 + number)]
        (folder / "metrics.jsonl").write_text("".join(rows))
        ended = [Ended(-9, ""), Ended(0, "SIGTERM: stopped after step 3, which is saved")]
        seats.append(SimpleNamespace(folder=folder, ended=ended))
    return seats, url


def test_what_went_wrong_with_trainers_on_one_database_is_named(seats):
    seats, url = seats
    assert trainers.judge(seats, url, 1 << 20) == []
    assert "the database holds" in trainers.judge(seats, url, 100)[0]
    seats[0].ended[0] = Ended(2, "error: database is locked", ["process 7"])
    seats[1].ended[-1] = Ended(0, "")
    said = trainers.judge(seats, url, 1 << 20)
    assert said == ["trainer 0 ended with 2: error: database is locked", "trainer 0 left process 7",
                    "trainer 1 ended with 0: "]  # fmt: skip
    database, created = RetrospectiveDatabase(url), RetrospectiveDatabase(url).runs()[1].created
    database.cut_run(2, after_step=3, created=created)
    assert trainers.judge(seats, url, 1 << 20)[-1].startswith("steps in the database and their last: [(3, [3]), (3,")
    database.remove_run(2, created=created)
    assert trainers.judge(seats, url, 1 << 20)[-1] == "1 runs went, though all steps had room"
    assert not any("went" in text for text in trainers.judge(seats, url, 2000))


@pytest.mark.parametrize("name", large.CHECKS)
def test_the_checks_of_large_tensors_on_smaller_ones(name):
    assert large.judge(name, large.CHECKS[name], 1 << 20) == ""
    assert "off by 1.0e+00" in large.judge(name, lambda n: (torch.zeros(3), torch.ones(3)), 0)
