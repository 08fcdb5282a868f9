"""A real training run, small enough to repeat hundreds of times, in a separate process that can be killed.

The process is a fork of this one, so that it need not repeat the imports.
"""

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from python_trainer.errors import UserError
from python_trainer.model.hub import policy_folder
from python_trainer.run.checkpoint import SHARDS, encode, list_checkpoints, load_checkpoint, read_shards, step_of
from python_trainer.run.directory import read_metrics

RUN_TIMEOUT = 120.0  # seconds, many times what a run takes
RANK_TIMEOUT = 30.0  # seconds for the other ranks to end after one of them failed
STEPS = 8
# keys that depend on the clock: seconds, and drafts, whose length follows the measured cost of a pass
CLOCK = re.compile("time/|per_second|_s$|^drafts/")
CLOCK_STATE = {"seconds", "pass_overhead", "created"}


def digits(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """Return a reward that a random policy can learn: the share of digits in an answer."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def make_inputs(folder: Path) -> None:
    """Write a random policy of 20 thousand weights, and a file of prompts."""
    if (folder / "prompts.jsonl").exists():
        return
    # in a separate process: threads started here would be missing in the forks that run
    process = multiprocessing.get_context("fork").Process(target=_write_inputs, args=(folder,))
    process.start()
    process.join()


def _write_inputs(folder: Path) -> None:
    source = policy_folder("small")
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source, **small, **heads, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "policy")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "policy")
    rng = random.Random(0)
    rows = [{"prompt": f"{rng.randint(1, 99)}+{rng.randint(1, 99)}="} for _ in range(32)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def settings(folder: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of the run, with changes by section."""
    path = str(folder / "prompts.jsonl")
    values: dict[str, Any] = {
        "max_steps": STEPS,
        "task": {"name": "jsonl", "train_path": path, "test_path": path, "train_size": 8, "test_size": 4,
                 "gate_size": 8, "reward": "bench.faults.training:digits"},
        "model": {"path": str(folder / "policy"), "device": "cpu"},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 12},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"eval_steps": 3},
        "save": {"save_steps": 1},
    }  # fmt: skip
    for key, value in (changes or {}).items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return values


def write_settings(inputs: Path, path: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write the settings of the run to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(settings(inputs, changes)), encoding="utf-8")
    return path


@dataclass
class Ended:
    """The end of a run.

    Attributes:
        code: exit code of the first process; None: it did not end in time.
        output: standard output and standard error.
    """

    code: int | None
    output: str

    @property
    def line(self) -> str:
        """Return the line that names the error, else the last line."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")


class Training:
    """``python -m python_trainer train`` in ``ranks`` processes.

    Args:
        config: file of settings.
        folder: the run directory.
    """

    def __init__(self, config: Path, folder: Path, *, resume: bool = False, ranks: int = 1):
        self.folder = folder
        self.log = folder.with_name(f"{folder.name}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        argv = ["train", "--config", str(config), "--output-dir", str(folder), *(["--resume"] if resume else [])]
        port = _free_port() if ranks > 1 else 0
        context = multiprocessing.get_context("fork")
        self.processes = []
        for rank in range(ranks):
            variables = _rank_variables(rank, ranks, port) if ranks > 1 else {}
            process = context.Process(target=_command, args=(argv, self.log, variables))
            process.start()
            self.processes.append(process)

    def alive(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def steps(self) -> int:
        """Count the rows of metrics."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_step(self, step: int) -> None:
        """Wait for the row of this step, or for the end."""
        deadline = time.monotonic() + RUN_TIMEOUT
        while self.alive() and self.steps() <= step and time.monotonic() < deadline:
            time.sleep(0.005)

    def kill(self, number: signal.Signals, rank: int = 0) -> None:
        pid = self.processes[rank].pid
        if self.processes[rank].exitcode is None and pid is not None:
            os.kill(pid, number)

    def end(self) -> Ended:
        """Wait for the end, and kill the processes that do not end in time."""
        deadline = time.monotonic() + RUN_TIMEOUT
        while self.alive() and time.monotonic() < deadline:
            codes = [process.exitcode for process in self.processes]
            if any(codes) and None in codes:  # torchrun ends the other ranks when one has failed
                for process in self.processes:
                    process.join(RANK_TIMEOUT)
                    if process.exitcode is None:
                        process.terminate()
            time.sleep(0.01)
        code = self.processes[0].exitcode
        for process in self.processes:
            process.kill()
            process.join()
        return Ended(code, self.log.read_text(encoding="utf-8", errors="replace"))


def _command(argv: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
    """Run the command inside the forked process."""
    os.setsid()  # Ctrl-C in the terminal of the campaign must not reach it
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ |= variables
    from python_trainer import __main__ as program
    from python_trainer.command_line import report

    report.report = lambda folders, console=None: None  # drawing takes longer than the run
    code = 1
    try:
        code = program.main(list(argv))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.exit(code)


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), **address}


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that exist."""
    return [step_of(path) for path in list_checkpoints(folder / "checkpoints")]


def load_whole(path: Path) -> dict[str, Any]:
    """Load a checkpoint with all shards, in any process."""
    state = load_checkpoint(path)
    return state | read_shards(path, {}) if (path / SHARDS).is_dir() else state


def differences(folder: Path, other: Path) -> list[str]:
    """List bitwise differences of two runs: newest checkpoint, metrics without times, published model."""
    try:
        first, second = (load_whole(list_checkpoints(path / "checkpoints")[-1]) for path in (folder, other))
    except (UserError, IndexError) as error:
        return [f"no checkpoint that can be read: {error}"]
    for saved in (first, second):
        for state in saved["accelerators"].values():
            for part in (state, state.get("recorder", {})):
                for key in part.keys() & CLOCK_STATE:
                    del part[key]
    problems = []
    for section in ("model", "optimizer", "critic", "accelerators", "lengths"):
        tensors: dict[str, torch.Tensor] = {}
        other_tensors: dict[str, torch.Tensor] = {}
        same_structure = encode(first.get(section), tensors) == encode(second.get(section), other_tensors)
        same_names = tensors.keys() == other_tensors.keys()
        if not (same_structure and same_names and all(_same(tensors[name], other_tensors[name]) for name in tensors)):
            problems.append(f"{section} differs")
    for key in ("step", "prompts", "counts", "evaluations", "policy_version"):
        if first["state"][key] != second["state"][key]:
            problems.append(f"{key} differs: {first['state'][key]!r:.40} and {second['state'][key]!r:.40}")
    if _rows(folder) != _rows(other):
        problems.append("rows of metrics differ")
    model, other_model = (path / "model" / "model.safetensors" for path in (folder, other))
    if other_model.exists() and not (model.exists() and model.read_bytes() == other_model.read_bytes()):
        problems.append("the trained model differs")
    return problems


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not CLOCK.search(k)} for row in read_metrics(folder)]
