"""``python -m python_trainer history URL``."""

import pytest
import torch

from python_trainer.__main__ import main
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.records import StepRecord
from python_trainer.accelerators.rhyme.sketch import PARTS

from .conftest import FACTS, make_sample


def fill(url, steps=20):
    database = RetrospectiveDatabase(url)
    for _ in range(2):
        run = database.add_run(FACTS)
        for step in range(1, steps + 1):
            sketch = {name: torch.ones(bins) for name, bins in PARTS.items()}
            database.add_step(run, StepRecord(step, step, step / steps, step / steps, sketch), [make_sample(step)])


def test_lists_runs_draws_them_and_shows_matches(url, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    fill(url)
    assert main(["history", url, "--run", "2", "--window", "5"]) == 0
    out = capsys.readouterr().out
    for words in ("qwen2", "arithmetic-short", "1.000", "2 runs", "6 - 10", "run 1", "rhyme.png"):
        assert words in out, out
    assert (tmp_path / "rhyme.png").stat().st_size > 5000


def test_help_says_where_runs_are_recorded(capsys):
    with pytest.raises(SystemExit):
        main(["history", "--help"])
    out = capsys.readouterr().out
    for words in ("history.db beside its directory", "accelerators.curriculum.database", "accelerators.rhyme.database"):
        assert words in out, out


def test_what_is_not_there_is_named(tmp_path, capsys):
    path = str(tmp_path / "history.db")
    assert main(["history", path]) == 2
    assert "there is no retrospective database" in capsys.readouterr().err
    RetrospectiveDatabase(path)
    assert main(["history", path]) == 0  # empty: a table without rows
    assert "0 runs" in capsys.readouterr().out and not (tmp_path / "rhyme.png").exists()
    fill(path, steps=2)
    for arguments, words in ((["--run", "7"], "there are 1, 2"), (["--window", "0"], "--window"),
                             (["--picture", str(tmp_path / "no" / "x.png")], "cannot be written")):  # fmt: skip
        assert main(["history", path, *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_help(capsys):
    with pytest.raises(SystemExit):
        main(["history", "--help"])
    assert "--run ID" in capsys.readouterr().out
