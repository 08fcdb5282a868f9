"""A broken, full or closed terminal: the command goes on, and so does its log, in the run's folder."""

import os
import subprocess
import sys
import threading

import pytest
import yaml
from conftest import merged
from support import ROOT

from python_trainer.__main__ import main
from python_trainer.process.terminal import LOG, log_into, surviving
from python_trainer.run.checkpoint import list_checkpoints
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer


def closed():
    """Return what Python makes of a closed descriptor: None."""
    return


def full():
    """Return a stream whose device is full."""
    return open("/dev/full", "w", buffering=1)


def unread():
    """Return a pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def hung_up():
    """Return a terminal that its user has closed."""
    controller, terminal = os.openpty()
    os.close(controller)
    return os.fdopen(terminal, "w", buffering=1)


LOST = [closed, full, unread, hung_up]


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_the_log_takes_the_place_of_a_lost_stream(tmp_path, monkeypatch, lost, name):
    monkeypatch.setattr(sys, name, lost())
    stream = getattr(sys, name)
    with surviving():
        print("begun", file=getattr(sys, name))
        log_into(tmp_path)
        print("of the run \udcff", file=getattr(sys, name))
        subprocess.run(["echo", "of another process"], stdout=getattr(sys, name), check=True)
        (tmp_path / "next").mkdir()
        log_into(tmp_path / "next")
        print("of the next run", end="", file=getattr(sys, name))
    assert getattr(sys, name) is stream
    first, *other_lines = (tmp_path / LOG).read_text().splitlines()
    label = {"stdout": "output", "stderr": "error"}[name]
    reason = {"full": "No space left on device"}
    assert f": standard {label} is lost (" in first and reason.get(lost.__name__, "") in first
    assert other_lines == ["begun", r"of the run \udcff", "of another process"]
    assert (tmp_path / "next" / LOG).read_text() == "of the next run"


def test_a_stream_that_works_stays(tmp_path, capfd):
    with surviving():
        log_into(tmp_path)
        print("on the terminal")
    assert capfd.readouterr().out == "on the terminal\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("hinder", [lambda path: path.mkdir(), lambda path: path.symlink_to("/dev/full")])
def test_a_log_that_cannot_be_written_ends_nothing_either(tmp_path, monkeypatch, hinder):
    monkeypatch.setattr(sys, "stderr", full())
    hinder(tmp_path / LOG)
    with surviving():
        log_into(tmp_path)
        for _ in range(3):
            print("of the run", file=sys.stderr)


CLOSED = """
import os, sys
from pathlib import Path
from python_trainer.process.terminal import log_into, surviving
with surviving():
    assert Path("other").open("w").fileno() > 2
    log_into(Path("."))
    print("of the run")
    os.write(2, b"of compiled code")
"""


def test_no_other_file_gets_a_closed_descriptor(tmp_path):
    """Nor what compiled code writes to it."""
    command = ["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED]
    assert subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
    assert (tmp_path / "other").read_text() == "" and (tmp_path / LOG).read_text().endswith("of the run\n")


@pytest.mark.parametrize("lost", LOST)
def test_a_run_without_a_terminal_ends_as_with_one(run, tmp_path, monkeypatch, lost):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, lost())
    assert run()[0] == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(5))
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 2
    text = (tmp_path / "run" / LOG).read_text()
    assert "train 0/4  accuracy" in text and "train 4/4  accuracy" in text and "accuracy after" in text


def test_a_terminal_that_is_lost_in_a_step(run, tmp_path, monkeypatch):
    controller, terminal = os.openpty()
    shown = []
    lost = threading.Event()

    def show():
        while not lost.is_set():
            shown.append(os.read(controller, 1 << 12))
        os.close(controller)

    def step(self, number):
        if number == 3:
            lost.set()
            print("wakes the reader", file=sys.stderr)
            reader.join()
        return original(self, number)

    original = Trainer.step
    reader = threading.Thread(target=show)
    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(sys, "stderr", os.fdopen(terminal, "w", buffering=1))
    reader.start()
    assert run()[0] == 0 and [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(5))
    text = (tmp_path / "run" / LOG).read_text()
    assert "Input/output error" in text and "train 4/4  accuracy" in text
    assert "0/4" in b"".join(shown).decode()


def test_an_error_is_told_in_the_log(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", full())
    monkeypatch.setattr("conftest.digits", lambda **_: 1 / 0)
    assert run()[0] == 2
    assert "error: reward function digits raised ZeroDivisionError" in (tmp_path / "run" / LOG).read_text()


@pytest.mark.parametrize("command", ["compare", "sft", "probe"])
def test_other_commands_without_a_terminal(lessons, tmp_path, monkeypatch, command):
    values = merged(lessons, {"max_steps": 1, "sft": {"epochs": 1}, "save": {"save_steps": 0}})
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(values))
    place = ["--json", str(tmp_path / "found")] if command == "probe" else ["--output-dir", str(tmp_path / "run")]
    place += {"compare": ["--variants", "baseline"], "probe": ["--seconds", "1"], "sft": []}[command]
    monkeypatch.setattr(sys, "stdout", unread())
    monkeypatch.setattr(sys, "stderr", full())
    assert main([command, "--config", str(tmp_path / "settings.yaml"), *place]) == 0
    if command == "probe":
        assert (tmp_path / "found").stat().st_size
        return
    home = tmp_path / "run" / ("baseline/seed-0" if command == "compare" else "")
    assert (home / "summary.json").exists() and (home / LOG).exists()
    monkeypatch.setattr(sys, "stdout", unread())
    assert main(["report", str(home)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    'exec 3> >(true); wait $!; "$@" 2>&3', '"$@" >&- 2>&-',
    'exec 3> >(true); wait $!; "$@" >&3 2>&1',
])  # fmt: skip
def test_what_shells_do_to_a_terminal(settings, tmp_path, command):
    values = merged(settings, {"task": {"reward": "tiny:digits"}})
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(values))
    program = [sys.executable, "-m", "python_trainer", "train", "--config", "settings.yaml", "--output-dir", "run"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    process = subprocess.run(["bash", "-c", command, "bash", *program], cwd=tmp_path, env=env, capture_output=True)
    assert process.returncode == 0, process.stderr
    assert len(read_metrics(tmp_path / "run")) == 5 and len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 2
    assert "train 4/4  accuracy" in (tmp_path / "run" / LOG).read_text()
