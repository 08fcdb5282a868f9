"""A run is recorded where ``accelerators.rhyme.database`` names a database, whether rhyme is enabled or not."""

import shutil
from functools import partial

import pytest
from conftest import same

from python_trainer.accelerators.rhyme import replay
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rhyme.recording import RunRecorder
from python_trainer.run_directory import read_metrics


@pytest.fixture
def run(history_run):
    return partial(history_run, steps=2, enabled=(), save={"save_steps": 1})


def steps_of(path):
    database = RetrospectiveDatabase(str(path), create=False)
    return [[record.step for record in database.trajectory(run.id)] for run in database.runs()]


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
def test_only_a_named_database_records(run, tmp_path, enabled):
    alone = run("alone", enabled=enabled)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone"]
    named = run("named", enabled=enabled, database=str(tmp_path / "history.db"))
    assert same(named, alone)
    assert steps_of(tmp_path / "history.db") == [[1, 2]] and len(named.accelerators) == 1
    assert named.accelerators[0].name == ("rhyme" if enabled else "recorder")


def test_a_run_without_rhyme_reads_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "clearly_better", lambda theirs, own: True)
    database = {"database": str(tmp_path / "history.db")}
    first, second = run("first", **database), run("second", **database)
    assert same(first, second) and [type(accelerator) for accelerator in second.accelerators] == [RunRecorder]
    third = run("third", enabled=["rhyme"], **database)
    assert read_metrics(tmp_path / "third")[2]["rhyme/rehearsed_answers"] > 0
    assert steps_of(tmp_path / "history.db") == [[1, 2]] * 3 and not same(first, third)


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
@pytest.mark.parametrize(("begun", "later"), [(None, "one"), ("one", None), ("one", "one"), ("one", "other")])
def test_whether_it_is_recorded_may_change_when_a_run_is_resumed(run, tmp_path, capsys, begun, later, enabled):
    def place(kind):
        return {"enabled": enabled, "database": kind and str(tmp_path / f"{kind}.db")}

    run("run", steps=1, **place(begun))
    resumed = run("run", steps=2, resume=True, **place(later))
    alone = run("alone", steps=2, **place(None))
    assert same(resumed, alone)
    for kind in ("one", "other"):
        file = tmp_path / f"{kind}.db"
        found = steps_of(file) if file.exists() else []
        assert found == ([] if kind != begun else [[1, 2]] if kind == later else [[1]])
    assert capsys.readouterr().err.count("note: this run is not recorded ") == (begun != later is not None)


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
def test_a_run_resumed_without_its_database_and_then_with_it(run, tmp_path, capsys, enabled):
    """rhyme remembers where the run was recorded; without it nothing did at the second step."""
    named = {"enabled": enabled, "database": str(tmp_path / "named.db")}
    run("run", steps=1, **named)
    run("run", steps=2, resume=True, enabled=enabled)
    run("run", steps=3, resume=True, **named)
    assert steps_of(tmp_path / "named.db") == ([[1, 3]] if enabled else [[1]])
    assert ("not recorded" in capsys.readouterr().err) == (not enabled)


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
def test_a_resumed_run_never_writes_into_another(run, tmp_path, enabled):
    named = {"enabled": enabled, "database": str(tmp_path / "history.db")}
    run("run", steps=2, **named)
    (tmp_path / "history.db").unlink()
    run("another", steps=3, **named)  # with the same id
    run("run", steps=4, resume=True, **named)
    assert steps_of(tmp_path / "history.db") == [[1, 2, 3]]


@pytest.mark.parametrize("kept", [True, False])
def test_a_copied_run_does_not_write_into_the_run_that_it_was_copied_from(run, tmp_path, capsys, kept):
    named = {"enabled": ["rhyme"], "database": str(tmp_path / "history.db")}
    run("run", steps=1, **named)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    if not kept:
        shutil.rmtree(tmp_path / "run")  # the folder was moved
    run("copy", steps=2, resume=True, **named)
    assert steps_of(tmp_path / "history.db") == ([[1]] if kept else [[1, 2]])
    assert capsys.readouterr().err.count("note: this run is not recorded ") == kept


@pytest.mark.parametrize("enabled", [[], ["rhyme"]])
def test_a_run_goes_on_when_its_database_is_deleted(run, tmp_path, monkeypatch, capsys, enabled):
    file, after_update = tmp_path / "history.db", RunRecorder.after_update

    def delete_first(self, context):
        file.unlink(missing_ok=True)
        after_update(self, context)

    with monkeypatch.context() as patched:
        patched.setattr(RunRecorder, "after_update", delete_first)
        run("run", enabled=enabled, database=str(file))
    assert not file.exists() and capsys.readouterr().err.count("note: this run is not recorded ") == 1
