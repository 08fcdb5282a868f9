"""``python -m python_trainer history URL``."""

from dataclasses import replace

import pytest
import torch

from python_trainer.__main__ import main
from python_trainer.accelerators.rhyme.browse import shorten
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StepRecord
from python_trainer.accelerators.rhyme.matching import PARTS

from .conftest import FACTS, make_sample


def fill(url, steps=20):
    database = RetrospectiveDatabase(url)
    for _ in range(2):
        run = database.add_run(FACTS)
        for step in range(1, steps + 1):
            sketch = {name: torch.ones(bins) for name, bins in PARTS.items()}
            database.add_step(run, StepRecord(step, step / steps, step / steps, sketch), [make_sample(step)])


def test_lists_runs(url, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    fill(url)
    assert main(["history", url]) == 0
    out = capsys.readouterr().out
    for words in ("sums", "1.000", "2 runs"):
        assert words in out, out


def test_runs_can_be_told_apart_in_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    database = RetrospectiveDatabase("history.db")
    database.add_run(FACTS)  # as before folders were recorded
    for folder in (tmp_path / "first[a]", tmp_path / "compare" / "rpo" / "seed-1", tmp_path.parent / "elsewhere"):
        folder.mkdir(parents=True, exist_ok=True)
        run = database.add_run(replace(FACTS, settings={"seed": 7, "output_dir": str(folder)}))
    sketch = {name: torch.ones(bins) for name, bins in PARTS.items()}
    database.add_step(run, StepRecord(25, 0.5, 0.625, sketch, generated_tokens=2400), [])
    assert main(["history", "history.db"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("run"))
    assert lines[header].split() == ["run", "begun", "folder", "task", "seed", "steps", "tokens", "accuracy"]
    rows = [row for line in lines[header + 1 :] if (row := line.split()) and row[0].isdecimal()]
    assert [row[3] for row in rows[:2] + rows[3:]] == ["-", "first[a]", "elsewhere"]
    assert "compare/rpo/seed-1".startswith(rows[2][3]) and len(rows[2][3]) > 10  # the rest is below
    assert [row[4:6] for row in rows] == [["sums", seed] for seed in ("-", "7", "7", "7")]
    assert rows[0][6:] == ["0", "0", "-"] and rows[3][6:] == ["1", "2k", "0.625"]
    assert max(map(len, lines[: header + 6])) <= 80


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0"), (999, "999"), (1000, "1k"), (999_499, "999k"), (999_500, "1.0M"), (1_610_000, "1.6M")],
)
def test_counts_are_short(count, words):
    assert shorten(count) == words


def test_what_is_not_there_is_named(tmp_path, capsys):
    path = str(tmp_path / "history.db")
    assert main(["history", path]) == 2
    assert "there is no retrospective database" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"
    RetrospectiveDatabase(path)
    assert main(["history", path]) == 0  # empty: a table without rows
    assert "0 runs" in capsys.readouterr().out
