"""A real training, small enough to be repeated hundreds of times, in a process of its own that faults can be put into.

The process is forked from this one, so that what takes seconds to import is there; it is a session of its own, by which
whatever it leaves behind is found.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from python_trainer.checkpoint import encode, list_checkpoints, step_of
from python_trainer.distributed.shard_files import load_whole
from python_trainer.errors import UserError
from python_trainer.model.shipped import policy_folder
from python_trainer.run_directory import read_metrics

LIMIT = 120.0  # seconds that a run may take, many times what it needs
PATIENCE = 30.0  # and what it has started, after its end
STEPS = 8
# what depends on the clock: seconds, and drafts, whose length follows the measured cost of a pass; and what was sent to
# vLLM, which a run that goes on sends again
CLOCK = re.compile("time/|per_second|_s$|^drafts/")
CLOCK_STATE = ("seconds", "pass_overhead")

Fault = Callable[[], object]


def make_inputs(folder: Path) -> None:
    """The policy, random and of 20 thousand weights, and files of prompts."""
    if not (folder / "prompts.jsonl").exists():
        apart(_write_inputs, folder)


def apart(write: Callable[[Path], None], folder: Path) -> None:
    """Calls it in a process of its own: threads that work here would be missing in the forks that runs are."""
    process = multiprocessing.get_context("fork").Process(target=write, args=(folder,))
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
    """Of the run, with changes by section."""
    path = str(folder / "prompts.jsonl")
    values: dict[str, Any] = {
        "max_steps": STEPS,
        "task": {"name": "jsonl", "train_path": path, "test_path": path, "train_size": 8, "test_size": 4,
                 "gate_size": 8, "reward": "bench.faults.rewards:digits"},
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
    """A file with them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(settings(inputs, changes)), encoding="utf-8")
    return path


@dataclass
class Ended:
    """How a run ended."""

    code: int | None  # of the first process; None: it was still there when the time was up
    said: str  # on standard output and standard error
    left: list[str] = field(default_factory=list)  # processes and shared memory

    @property
    def line(self) -> str:
        """The line that says why, or the last one."""
        lines = [line for line in self.said.splitlines() if line.strip()]
        return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")


class Training:
    """``python -m python_trainer train`` in ``ranks`` processes.

    Args:
        config: file of settings.
        folder: the run directory.
        fault: called in each process before the command.
        picture: draw the report, which takes longer than the run.
    """

    def __init__(
        self,
        config: Path,
        folder: Path,
        *,
        resume: bool = False,
        fault: Fault | None = None,
        ranks: int = 1,
        picture: bool = False,
    ):
        self.folder, self.log = folder, folder.with_name(f"{folder.name}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.shared = set(os.listdir("/dev/shm"))
        argv = ["train", "--config", str(config), "--output-dir", str(folder), *(["--resume"] if resume else [])]
        port = _free_port() if ranks > 1 else 0
        context = multiprocessing.get_context("fork")
        self.processes = []
        for rank in range(ranks):
            group = _rank_variables(rank, ranks, port) if ranks > 1 else {}
            process = context.Process(target=_command, args=(argv, self.log, fault, group, picture))
            process.start()
            self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None]

    def alive(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def steps(self) -> int:
        """Rows of metrics so far."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_step(self, step: int) -> None:
        """Until it has a row of this step, or has ended."""
        deadline = time.monotonic() + LIMIT
        while self.alive() and self.steps() <= step and time.monotonic() < deadline:
            time.sleep(0.005)

    def kill(self, number: signal.Signals, rank: int = 0) -> None:
        pid = self.processes[rank].pid
        if self.processes[rank].exitcode is None and pid is not None:
            os.kill(pid, number)

    def end(self, limit: float = LIMIT) -> Ended:
        """Waits for the end, and ends what does not end in time."""
        deadline = time.monotonic() + limit
        while self.alive() and time.monotonic() < deadline:
            codes = [process.exitcode for process in self.processes]
            if any(codes) and None in codes:  # as torchrun does where one of several has failed
                for process in self.processes:
                    process.join(PATIENCE)
                    if process.exitcode is None:
                        process.terminate()
            time.sleep(0.01)
        code = self.processes[0].exitcode
        patience = time.monotonic() + PATIENCE
        while (left := processes_of(self.pids)) and time.monotonic() < patience:
            time.sleep(0.05)
        names = [f"process {pid} ({name})" for pid, name in left.items()]
        ours = {str(pid) for pid in (*self.pids, *left)}
        memory = [name for name in set(os.listdir("/dev/shm")) - self.shared if ours & set(name.split("_"))]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.join()
        return Ended(code, self.log.read_text(encoding="utf-8", errors="replace"), [*names, *memory])


def _command(argv: Sequence[str], log: Path, fault: Fault | None, group: Mapping[str, str], picture: bool) -> None:
    """Inside of the process."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ |= group
    from python_trainer import __main__ as program
    from python_trainer import commands
    from python_trainer.report import page

    if not picture:
        page.report = _no_report
    commands.tell_of_load = lambda: None
    code = 1
    try:
        if fault is not None:
            fault()
        code = program.main(list(argv))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.exit(code)


def _no_report(folders: Sequence[Path], console: Console | None = None) -> None:
    pass


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), **address}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def processes_of(sessions: Sequence[int]) -> dict[int, str]:
    """Processes of these sessions that have not ended -> their names."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = path.read_text().rpartition(")")[2]
        except OSError:
            continue
        state, _, _, session = rest.split()[:4]
        if int(session) in sessions and state != "Z":
            command = path.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
            found[int(path.parent.name)] = command.strip()[-60:]
    return found


def saved_steps(folder: Path) -> list[int]:
    """Of the checkpoints that are there."""
    return [step_of(path) for path in list_checkpoints(folder / "checkpoints")]


def differences(folder: Path, other: Path) -> list[str]:
    """In what the newest checkpoints, metrics but for times, and published models of two runs differ, bit for bit."""
    try:
        first, second = (load_whole(list_checkpoints(path / "checkpoints")[-1]) for path in (folder, other))
    except (UserError, IndexError) as error:
        return [f"no checkpoint that can be read: {error}"]
    for saved in (first, second):
        saved["accelerators"] = {
            name: {key: value for key, value in state.items() if key not in CLOCK_STATE}
            for name, state in saved["accelerators"].items()
        }
    found = []
    for part in ("model", "optimizer", "critic", "accelerators", "lengths"):
        tensors: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        same = encode(first.get(part), tensors) == encode(second.get(part), others) and tensors.keys() == others.keys()
        if not same or not all(_same(tensors[name], others[name]) for name in tensors):
            found.append(f"{part} differs")
    for key in ("step", "counts", "evaluations", "policy_version"):
        if first["state"][key] != second["state"][key]:
            found.append(f"{key} differs: {first['state'][key]!r:.40} and {second['state'][key]!r:.40}")
    if _rows(folder) != _rows(other):
        found.append("rows of metrics differ")
    models = [path / "model" / "model.safetensors" for path in (folder, other)]
    if models[1].exists() and not (models[0].exists() and models[0].read_bytes() == models[1].read_bytes()):
        found.append("the trained model differs")
    return found


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not CLOCK.search(k)} for row in read_metrics(folder)]
