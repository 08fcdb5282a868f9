"""Runs are recorded beside their directories unless another place, or none, is named."""

import importlib.util
import io
import json
import shutil

import pytest
import torch
from rich.console import Console

from python_trainer.accelerators.curriculum import earlier
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.callbacks import Callback
from python_trainer.errors import UserError
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer


@pytest.fixture
def run(make_config, tmp_path):
    """run(folder, steps, **settings of curriculum) -> (trainer of a run that is over, what it has said)."""

    def make(folder, steps=2, resume=False, enabled=(), callbacks=(), reward="test_earlier_runs:odd", **curriculum):
        accelerators = {"enabled": list(enabled), "curriculum": {"rehearsal_share": 10} | curriculum}
        config = make_config(
            max_steps=steps, accelerators=accelerators, task={"reward": reward}, save={"save_steps": 1}
        )
        said = io.StringIO()
        console = Console(file=said, width=1000)
        trainer = Trainer(config, tmp_path / folder, console=console, resume=resume, callbacks=callbacks)
        trainer.run()
        return trainer, said.getvalue()

    return make


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.policy.model.parameters()])


def steps_of(path):
    database = RetrospectiveDatabase(str(path), create=False)
    return [[record.step for record in database.trajectory(run.id)] for run in database.runs()]


def test_every_run_is_recorded_and_none_reads(run, tmp_path, monkeypatch):
    monkeypatch.setattr(earlier, "clearly_better", lambda theirs, own: True)
    first, said = run("first")
    assert said.count(f"this run is recorded in {tmp_path / 'history.db'}; with accelerators.curriculum.database=") == 1
    second, _ = run("second")
    chosen, _ = run("chosen", enabled=["curriculum"])
    alone, unsaid = run("alone", database=None)
    assert "history.db" not in unsaid and steps_of(tmp_path / "history.db") == [[1, 2]] * 3
    assert torch.equal(weights(first), weights(alone)) and torch.equal(weights(second), weights(alone))
    summary = json.loads((tmp_path / "chosen" / "summary.json").read_text())["accelerators"]["curriculum"]
    assert "earlier_answers" not in summary and chosen.accelerators[0].outcomes.earlier is None
    assert "curriculum/rehearsed_answers" not in read_metrics(tmp_path / "chosen")[1]
    named, _ = run("named", enabled=["curriculum"], database=str(tmp_path / "history.db"))
    assert read_metrics(tmp_path / "named")[2]["curriculum/rehearsed_answers"] > 0
    assert steps_of(tmp_path / "history.db") == [[1, 2]] * 4 and not torch.equal(weights(named), weights(alone))


@pytest.mark.parametrize("enabled", [[], ["curriculum"]])
def test_a_resumed_run_goes_on_where_it_was_recorded(run, tmp_path, enabled):
    run("run", steps=2, enabled=enabled)
    _, said = run("run", steps=3, resume=True, enabled=enabled)
    assert steps_of(tmp_path / "history.db") == [[1, 2, 3]] and "recorded" not in said


PLACES = {None: None, "auto": "history.db", "named": "named.db"}


@pytest.mark.parametrize("enabled", [[], ["curriculum"]])
@pytest.mark.parametrize("later", PLACES)
@pytest.mark.parametrize("begun", PLACES)
def test_whether_it_is_recorded_may_change_when_a_run_is_resumed(run, tmp_path, capsys, begun, later, enabled):
    def place(kind):
        return {"enabled": enabled, "database": str(tmp_path / "named.db") if kind == "named" else kind}

    run("run", steps=1, **place(begun))
    resumed, _ = run("run", steps=2, resume=True, **place(later))
    alone, _ = run("alone", steps=2, **place(None))
    assert torch.equal(weights(resumed), weights(alone))
    for kind in ("auto", "named"):
        file = tmp_path / PLACES[kind]
        found = steps_of(file) if file.exists() else []
        assert found == ([] if kind != begun else [[1, 2]] if kind == later else [[1]])
    unrecorded = "named" in (begun, later) and begun != later is not None
    assert capsys.readouterr().err.count("note: this run is not recorded ") == unrecorded


@pytest.mark.parametrize("enabled", [[], ["curriculum"]])
def test_a_resumed_run_goes_on_where_it_was_recorded_once_that_is_named_again(run, tmp_path, enabled):
    named = {"enabled": enabled, "database": str(tmp_path / "named.db")}
    run("run", steps=1, **named)
    run("run", steps=2, resume=True, enabled=enabled)
    run("run", steps=3, resume=True, **named)
    assert steps_of(tmp_path / "named.db") == [[1, 3]] and not (tmp_path / "history.db").exists()


@pytest.mark.parametrize("named", [False, True])
def test_a_resumed_run_never_writes_into_another(run, tmp_path, named):
    place = {"database": str(tmp_path / "history.db")} if named else {}
    run("run", steps=2, enabled=["curriculum"], **place)
    (tmp_path / "history.db").unlink()
    run("another", steps=3)  # with the same id
    run("run", steps=4, resume=True, enabled=["curriculum"], **place)
    assert steps_of(tmp_path / "history.db") == [[1, 2, 3]]


def test_a_run_that_begins_anew_takes_the_place_of_what_it_left(run, tmp_path):
    run("run", steps=1)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "metrics.jsonl").unlink()  # as after a kill in the first step
    run("run", steps=2)
    assert steps_of(tmp_path / "history.db") == [[1, 2]]


@pytest.mark.parametrize("enabled", [[], ["curriculum"]])
def test_what_goes_wrong_ends_the_recording_alone(run, tmp_path, enabled):
    alone, _ = run("alone", database=None, enabled=enabled)
    (tmp_path / "history.db").write_text("notes of somebody")
    foreign, said = run("foreign", enabled=enabled)
    assert said.count("this run is not recorded: ") == 1 and "history.db is not a" in said
    assert "this run is recorded in" not in said
    assert (tmp_path / "history.db").read_text() == "notes of somebody"
    assert torch.equal(weights(foreign), weights(alone))
    run("foreign", steps=3, resume=True, enabled=enabled)
    (tmp_path / "history.db").unlink()

    class Damage(Callback):
        def on_step(self, trainer, step, metrics):
            (tmp_path / "history.db").write_bytes(b"\0" * 8192)

    damaged, said = run("damaged", enabled=enabled, callbacks=[Damage()])
    assert said.count("this run is not recorded: ") == 1
    assert torch.equal(weights(damaged), weights(alone))


def broken(prompts, completions, completion_ids, **_):
    raise KeyError("no score")


def test_a_run_that_fails_in_its_first_step_leaves_nothing(run, tmp_path):
    with pytest.raises(UserError, match="no score"):
        run("run", reward="test_recorded:broken")
    assert not (tmp_path / "history.db").exists()


def test_what_is_recorded_elsewhere_is_not_recorded_here(make_config, monkeypatch):
    def database(enabled=(), task=None, **sections):
        enabled = enabled if enabled == "auto" else list(enabled)
        accelerators = {"enabled": enabled, "curriculum": {}} | sections
        return make_config(accelerators=accelerators, task=task or {}).accelerators.curriculum.database

    assert database("auto", curriculum={"database": "a.db"}) == "a.db"
    assert database("auto") == database("auto", rhyme={"database": "a.db"}) == "auto"
    assert database("auto", task={"environment": "test_environments:Echo"}) is None
    assert database() == database(["curriculum"]) == database(rhyme={"database": "a.db"}) == "auto"
    assert database(["rhyme"]) == database(["rhyme"], rhyme={"database": "a.db", "record": False}) == "auto"
    assert database(["rhyme"], rhyme={"database": "a.db"}) is None
    assert database(["curriculum", "rhyme"], rhyme={"database": "a.db"}) is None
    assert database(task={"environment": "test_environments:Echo"}) is None
    assert database(["rhyme"], rhyme={"database": "a.db"}, curriculum={"database": "b.db"}) == "b.db"
    with pytest.raises(UserError, match=r"must not be that of rhyme, which records .*, got a.db for both"):
        database(["rhyme"], rhyme={"database": "a.db"}, curriculum={"database": "a.db"})
    with monkeypatch.context() as without_it:
        without_it.setattr(importlib.util, "find_spec", lambda name: None)
        assert database() is None and database(curriculum={"database": "b.db"}) == "b.db"
    assert database() == "auto"  # what one configuration stands for is not the default of the next
