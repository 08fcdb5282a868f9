"""The command line under torchrun."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from python_trainer import errors
from python_trainer.__main__ import main
from python_trainer.distributed import start
from python_trainer.errors import UserError, mark_shared
from python_trainer.run.checkpoint import list_checkpoints
from python_trainer.run.directory import read_metrics

HERE = Path(__file__).parent
TRAIN = ["-m", "python_trainer", "train"]


def environment():
    return {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_two_processes_stop_together_and_one_goes_on(settings, tmp_path):
    """SIGTERM to one of two; then the same run in a single process, to an exported model."""
    run = tmp_path / "run"
    config = tmp_path / "config.yaml"
    settings |= {"max_steps": 100_000, "parallel": "fsdp2", "save": {"save_steps": 0}}
    config.write_text(yaml.safe_dump(settings))
    arguments = [*TRAIN, "--config", str(config), "--output-dir", str(run)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    process = subprocess.Popen(torchrun, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 300
        metrics = run / "metrics.jsonl"
        while not (metrics.exists() and len(read_metrics(run)) > 2):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGTERM)
        errors = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 0, errors
    steps = [row["step"] for row in read_metrics(run)]
    assert steps == list(range(len(steps)))
    assert errors.count(f"SIGTERM: stopped after step {steps[-1]}, which is saved") == 1
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [f"step-{steps[-1]:06d}"]

    arguments += ["--resume", "--set", f"max_steps={steps[-1] + 1}"]
    subprocess.run([sys.executable, *arguments], env=environment(), check=True)
    assert [row["step"] for row in read_metrics(run)] == [*steps, steps[-1] + 1]
    assert (run / "report.html").exists()
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(run / "model")) == 64


# as gloo puts it where another process was killed
LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:39313."


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("error", "message"), [
    (torch.OutOfMemoryError("CUDA out of memory."), "out of memory; CUDA out of memory."),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out of memory; CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
    (UserError("model.path: there is no model here"), "model.path: there is no model here"),
    (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device: make room there"),
    (OSError(errno.EACCES, "Permission denied"), "[Errno 13] Permission denied"),  # the runs of somebody else
    (RuntimeError(LOST), "another process has ended: its own message says why, or the report of torchrun"),
])  # fmt: skip
def test_an_error_is_told_by_the_process_that_has_it(tmp_path, monkeypatch, capsys, rank, shared, error, message):
    """The first process tells an error that all raise together; other errors are told where they are raised."""
    raised = type(error)(*error.args)
    raised.add_note("step 2 is saved")
    if shared:
        mark_shared(raised)
    monkeypatch.setattr("python_trainer.command_line.report.report", Mock(side_effect=raised))
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["report", str(tmp_path)]) == 2
    line = f"{message}; step 2 is saved\n"
    unshared_output = f"error: process {rank} of 2: {line}"
    shared_output = {"0": f"error: {line}", "1": ""}[rank]
    assert capsys.readouterr().err == (shared_output if shared else unshared_output)


def test_a_single_process_has_lost_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr("python_trainer.command_line.report.report", Mock(side_effect=RuntimeError(LOST)))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match="closed by peer"):
        main(["report", str(tmp_path)])


@pytest.mark.parametrize("command", ["compare", "sft", "probe"])
def test_what_runs_in_one_process_refuses_several(tmp_path, monkeypatch, capsys, command):
    """Several would train in one folder, or measure each other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    output = [] if command == "probe" else ["--output-dir", str(tmp_path)]
    assert main([command, "--config", "smoke", "--set", "model.path=/nowhere", *output]) == 2
    assert f"{command} runs in one process: start it without torchrun\n" in capsys.readouterr().err


LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("name", "value", "message"), [
    ("WORLD_SIZE", "abc", "WORLD_SIZE must be an integer of at least 1, got 'abc'"),
    ("WORLD_SIZE", "0", "WORLD_SIZE must be an integer of at least 1, got '0'"),
    ("WORLD_SIZE", "2.0", "WORLD_SIZE must be an integer of at least 1, got '2.0'"),
    ("RANK", "x", "RANK must be an integer from 0 to 1, got 'x'"),
    ("RANK", "2", "RANK must be an integer from 0 to 1, got '2'"),
    ("RANK", "-1", "RANK must be an integer from 0 to 1, got '-1'"),
    ("RANK", None, "RANK must be set where WORLD_SIZE is above 1"),
    ("LOCAL_RANK", "q", "LOCAL_RANK must be an integer of at least 0, got 'q'"),
    ("MASTER_PORT", "zz", "MASTER_PORT must be an integer from 1 to 65535, got 'zz'"),
    ("MASTER_PORT", "70000", "MASTER_PORT must be an integer from 1 to 65535, got '70000'"),
    ("MASTER_ADDR", "", "MASTER_ADDR must be set where WORLD_SIZE is above 1"),
])  # fmt: skip
def test_a_wrong_variable_of_the_launcher_is_named(tmp_path, monkeypatch, capsys, name, value, message):
    monkeypatch.setattr(errors, "HEAD_START", 0.0)
    for variable, text in {**LAUNCHED, name: value}.items():
        monkeypatch.delenv(variable, raising=False) if text is None else monkeypatch.setenv(variable, text)
    arguments = ["--config", "smoke", "--set", "parallel=ddp", "--output-dir", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert f"{message}: torchrun sets it" in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_port_that_another_program_has_is_named(monkeypatch):
    with socket.socket() as program:
        program.bind(("127.0.0.1", 0))
        program.listen()
        port = str(program.getsockname()[1])
        for variable, text in {**LAUNCHED, "MASTER_PORT": port}.items():
            monkeypatch.setenv(variable, text)
        message = rf"cannot meet at 127.0.0.1:{port} \(MASTER_ADDR:MASTER_PORT\): .*address already in use"
        with pytest.raises(UserError, match=message), start("ddp", "cpu"):
            pass


def test_one_process_needs_no_meeting_point(monkeypatch):
    """WORLD_SIZE alone may be left of another program."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    with start("ddp", "cpu") as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)


@pytest.mark.parametrize("local_rank", ["0", "1"])
@pytest.mark.parametrize(("arguments", "message"), [
    (["--config", "nowhere.yaml"], "nowhere.yaml"),
    (["--config", "smoke", "--set", "max_steps=0"], "max_steps"),
    (["--config", "smoke"], "parallel is none, but torchrun started 2 processes"),
    (["--config"], "--config"),
])  # fmt: skip
def test_what_each_process_finds_is_told_by_the_first(tmp_path, monkeypatch, capsys, arguments, message, local_rank):
    """The first of a host tells it; the others wait until torchrun ends them, and tell it if they live on."""
    events = []
    monkeypatch.setattr(errors.time, "sleep", lambda seconds: events.append((seconds, capsys.readouterr().err)))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("RANK", local_rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        code = main(["train", "--output-dir", str(tmp_path / "run"), *arguments])
    except SystemExit as ended:  # as argparse does it
        code = ended.code
    assert code == 2 and message in capsys.readouterr().err
    assert [seconds for seconds, _ in events] == ([] if local_rank == "0" else [errors.HEAD_START])
    assert not any(message in output for _, output in events)
