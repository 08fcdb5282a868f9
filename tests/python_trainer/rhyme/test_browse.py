"""``python -m python_trainer history URL``."""

from dataclasses import replace

import torch

from python_trainer.__main__ import main
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase, StepRecord
from python_trainer.accelerators.rhyme.matching import PARTS

from .conftest import FACTS, make_sample


def test_lists_runs(url, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    database = RetrospectiveDatabase(url)
    database.add_run(FACTS)  # as before folders were recorded
    run = database.add_run(replace(FACTS, settings={"seed": 7, "output_dir": "/runs/first[a]"}))
    sketch = {name: torch.ones(bins) for name, bins in PARTS.items()}
    database.add_step(run, StepRecord(25, 0.5, 0.625, sketch, generated_tokens=2400), [make_sample(25)])
    assert main(["history", url]) == 0
    header, first, second, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "begun", "folder", "task", "seed", "steps", "tokens", "accuracy"]
    assert first.split()[2:] == ["-", "sums", "-", "0", "0", "-"]
    assert second.split()[2:] == ["/runs/first[a]", "sums", "7", "1", "2400", "0.625"]
    assert last.endswith(": 2 runs") and max(map(len, (header, first, second))) <= 80


def test_what_is_not_there_is_named(tmp_path, capsys):
    path = str(tmp_path / "history.db")
    assert main(["history", path]) == 2
    assert "there is no retrospective database" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"
    (tmp_path / "history.db").touch()
    assert main(["history", path]) == 2, "an empty file is none, and SQLite's header does not come into it"
    assert [p.name for p in tmp_path.iterdir()] == ["history.db"] and not (tmp_path / "history.db").read_bytes()
    RetrospectiveDatabase(path)
    assert main(["history", path]) == 0  # empty: a table without rows
    assert "0 runs" in capsys.readouterr().out
