"""Hostile input: configurations, JSONL files, database URLs and files, checkpoints and safetensors files, tensors.

Every input is accepted, or refused with one clear line; no other exception, no hang, no written file. The tests run a
fixed share of this; ``python -m bench.faults fuzz --cases N`` runs N cases of every target, others for another seed.
"""

import io
import json
import math
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from safetensors.torch import save

from bench.faults import tensors
from bench.faults.case import Case, Outcome, Place
from python_trainer.__main__ import main
from python_trainer.accelerators.rhyme.database import (
    RetrospectiveDatabase,
    StepRecord,
    StoredAnswer,
    StoredRun,
    make_engine,
    unpack_tensors,
)
from python_trainer.config import describe_settings, dump_config, load_config
from python_trainer.errors import UserError
from python_trainer.run.checkpoint import CHECKSUMS, checksums, load_checkpoint, save_checkpoint
from python_trainer.run.directory import read_evaluations, read_metrics, read_samples
from python_trainer.tasks.files import FileTaskSettings

CASE_TIMEOUT = 20  # seconds

TEXT = st.text(max_size=12) | st.sampled_from(
    ["", ".", "a:b", "math", "none", "null", "../x", "/dev/null", "\0", "\ud800", "é", "1e999", "arithmetic", "jsonl"]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 1, 2**63, 2**1024, 10**400, math.inf, math.nan, 1e-320])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8
)
# values of real settings, so that some cases reach the last checks
PLAUSIBLE: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, 0, 1, 2, 8, 0.5, 1.0, "fifo", "group", "gae", "dapo", [], ["rpo"], ["a"], {}]
)


class Written(AssertionError):
    """A read-only call changed, made or removed a file."""


def attempt(call: Callable[[], Any], folder: Path | None = None) -> str:
    """Return "accepted" or "refused".

    Args:
        folder: files that the call may read; it must not change.

    Raises:
        AssertionError: the call refused without a clear line, took too long, or wrote a file.
        Exception: any other exception of the call.
    """
    files = snapshot(folder)
    try:
        with at_most(CASE_TIMEOUT):
            call()
        verdict = "accepted"
    except UserError as error:
        verdict = "refused"
        if len(str(error).strip()) < 6:
            raise AssertionError(f"refused by {str(error)!r}") from error
    if snapshot(folder) != files:
        raise Written(f"{folder}: {sorted(map(str, files))} became {sorted(map(str, snapshot(folder)))}")
    return verdict


def snapshot(folder: Path | None) -> dict[Path, bytes]:
    if folder is None:
        return {}
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def time_out(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds} s")

    handler = signal.signal(signal.SIGALRM, time_out)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


@st.composite
def damaged(draw: Any, data: bytes) -> bytes:
    """Draw the bytes of a file after a few edits, which are likelier at its start."""
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(len(data) - 1, 0)) | st.integers(0, min(400, max(len(data) - 1, 0))))
        kind = draw(st.sampled_from(["set", "cut", "insert", "delete", "swap"]))
        inserted = draw(st.binary(max_size=9))
        data = {
            "set": data[:position] + inserted + data[position + len(inserted) :],
            "cut": data[:position],
            "insert": data[:position] + inserted + data[position:],
            "delete": data[:position] + data[position + len(inserted) :],
            "swap": data[position:] + data[:position],
        }[kind]
    return data


@cache
def names_of_settings() -> list[str]:
    return [name for name, *_ in describe_settings() if "NAME" not in name]


@st.composite
def configurations(draw: Any) -> dict[str, Any]:
    """Draw settings, some of which exist, with values that may be wrong."""
    values: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(names_of_settings()), max_size=5)):
        *sections, last = draw(st.just(name) | st.just(name) | st.just(f"{name}.{draw(TEXT)}")).split(".")
        inner = values
        for section in sections:
            if not isinstance(inner.setdefault(section, {}), dict):
                inner[section] = {}
            inner = inner[section]
        inner[last] = draw(PLAUSIBLE | VALUES)
    return values | draw(st.dictionaries(TEXT, VALUES, max_size=1))


def configuration(data: Any, folder: Path) -> str:
    """Check settings given as an object; accepted ones stay the same after they are written and read."""
    values = data.draw(configurations())

    def check() -> None:
        config = load_config(values)
        again = load_config(yaml.safe_load(dump_config(config)))
        assert dump_config(again) == dump_config(config)

    return attempt(check)


def configuration_file(data: Any, folder: Path) -> str:
    """Check damaged YAML settings together with settings of the command line."""
    text = yaml.safe_dump({"seed": 3, "task": {"name": "arithmetic"}, "rollout": {"stop": ["a"]}}).encode()
    (folder / "settings.yaml").write_bytes(data.draw(damaged(text) | st.binary(max_size=60)))
    overrides = data.draw(st.lists(st.tuples(st.sampled_from(names_of_settings()) | TEXT, TEXT), max_size=2))
    return attempt(lambda: load_config(folder / "settings.yaml", ["=".join(pair) for pair in overrides]), folder)


def command_line(data: Any, folder: Path) -> str:
    """Check the training command with one setting that is always refused, so that it never trains."""
    (folder / "settings.yaml").write_text(yaml.safe_dump(data.draw(configurations())), encoding="utf-8")
    command = ["train", "--config", str(folder / "settings.yaml"), "--output-dir", str(folder / "run")]

    def call() -> None:
        with redirect_stderr(io.StringIO()) as errors:
            code = main([*command, "--set", "max_steps=0"])
        assert code == 2 and errors.getvalue().startswith("error: ") and errors.getvalue().count("\n") == 1, (
            errors.getvalue()
        )

    attempt(call, folder)
    return "refused"


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"messages": [{"role": "user", "content": "hi"}], "x": None}]


@st.composite
def prompt_files(draw: Any) -> bytes:
    keys = st.sampled_from(["prompt", "messages", "role", "content", "answer", "prompts"]) | TEXT
    values = st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
    )
    rows = draw(st.lists(st.dictionaries(keys, values, max_size=3), max_size=3))
    text = "\n".join(json.dumps(row) for row in [*ROWS, *rows]).encode()
    return draw(st.just(text) | damaged(text) | st.binary(max_size=40))


def prompts(data: Any, folder: Path) -> str:
    path = folder / "prompts.jsonl"
    path.write_bytes(data.draw(prompt_files()))
    settings = FileTaskSettings(train_path=str(path), test_path=str(path), reward="environment")
    return attempt(settings.load, folder)


def database_url(data: Any, folder: Path) -> str:
    parts = ["postgresql", "sqlite", "mysql", "://", ":", "/", "@", "?", "host", "%", "%41", "[", "]", "5432", "x=y",
             "\0"]  # fmt: skip
    url = "".join(data.draw(st.lists(st.sampled_from(parts) | TEXT, max_size=8)))
    return attempt(lambda: make_engine(url))


@cache
def database_bytes() -> bytes:
    """Return the bytes of a database with a run of one step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.db"
        database = RetrospectiveDatabase(str(path))
        run = database.add_run(StoredRun("tokens", "jsonl", {"a": 1}))
        answer = StoredAnswer(run, 1, "key", "12", True, 1.0, "", torch.tensor([1, 2]), torch.tensor([-0.5, -0.25]))
        record = StepRecord(1, 0.5, 0.5, {"lengths": torch.tensor([1])}, 10)
        database.add_step(run, record, [answer])
        return path.read_bytes()


def database_file(data: Any, folder: Path) -> str:
    """Check a database file read as by `history`; a refused file does not change."""
    path = folder / "history.db"
    path.write_bytes(data.draw(damaged(database_bytes()) | st.binary(max_size=60)))
    content = path.read_bytes()

    def read() -> None:
        database = RetrospectiveDatabase(str(path), create=False)
        for run in database.runs():
            database.trajectory(run.id)
        database.samples()

    verdict = attempt(read)  # without a folder, because SQLite makes further files
    if path.read_bytes() != content:
        raise Written(f"{path} was changed")
    return verdict


@cache
def safetensors_bytes() -> bytes:
    return save({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, dtype=torch.bfloat16)})


@st.composite
def safetensors_files(draw: Any) -> bytes:
    """Draw a file whose header may name missing tensors and lengths beyond its end."""
    entries = st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "BF16", "I64", "F8_E4M3", "X"]) | SCALARS,
            "shape": st.lists(st.integers(-2, 2**63), max_size=3) | VALUES,
            "data_offsets": st.lists(st.integers(-2, 2**64), max_size=3) | VALUES,
        },
    )
    header = draw(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]) | TEXT, entries | VALUES, max_size=3))
    text = json.dumps(header).encode()
    length = draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
    file_bytes = struct.pack("<Q", length) + text + draw(st.binary(max_size=24))
    return draw(st.just(file_bytes) | damaged(safetensors_bytes()))


def tensors_of_database(data: Any, folder: Path) -> str:
    return attempt(lambda: unpack_tensors(data.draw(safetensors_files())))


def rows_of_run(data: Any, folder: Path) -> str:
    """Check the files of a run that a report reads."""
    text = b'{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "reward": null}\n'
    (folder / "metrics.jsonl").write_bytes(data.draw(damaged(text)))
    (folder / "samples.jsonl").write_bytes(data.draw(damaged(b'{"step": 1, "samples": [{"prompt": "a"}]}\n')))
    text = b'{"step": 0, "name": "start", "correct": [1, 0, 1]}\n'
    (folder / "evaluations.jsonl").write_bytes(data.draw(damaged(text)))
    return attempt(lambda: (read_metrics(folder), read_samples(folder), read_evaluations(folder)), folder)


def checkpoint(data: Any, folder: Path) -> str:
    """Check a damaged checkpoint, also with matching checksums, as only an attacker would make it."""
    path = save_checkpoint(folder, 3, {"state": {"step": 3}, "w": torch.ones(4), "l": [1, None]}, keep=1)
    name = data.draw(st.sampled_from(["state.json", "tensors.safetensors", CHECKSUMS]))
    content = (path / name).read_bytes()
    json_files = VALUES.map(lambda value: json.dumps(value).encode())
    replacement = safetensors_files() if name == "tensors.safetensors" else json_files
    (path / name).write_bytes(data.draw(damaged(content) | replacement))
    if name != CHECKSUMS and data.draw(st.booleans()):
        (path / CHECKSUMS).write_text(json.dumps(checksums(path)))
    return attempt(lambda: load_checkpoint(path), folder)


Target = Callable[[Any, Path], str]
TARGETS: dict[str, Target] = {
    "configurations": configuration,
    "configuration files": configuration_file,
    "the command line": command_line,
    "prompt files": prompts,
    "database URLs": database_url,
    "database files": database_file,
    "tensors of databases": tensors_of_database,
    "rows of runs": rows_of_run,
    "checkpoints": checkpoint,
    **{f"tensors for {name}": tensors.target(op) for name, op in tensors.OPS.items()},
}


def run_target(target: Target, count: int, seed: int | None = None) -> dict[str, int]:
    """Run ``count`` cases of a target; return the numbers of accepted and refused. Without a seed cases are fixed.

    Raises:
        AssertionError, Exception: as of :func:`attempt`, for the smallest failing case.
    """
    verdicts = {"accepted": 0, "refused": 0}

    @settings(max_examples=count, deadline=None, database=None, derandomize=seed is None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(data=st.data())
    def run_case(data: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            verdicts[target(data, Path(folder))] += 1

    (run_case if seed is None else seeded(seed)(run_case))()
    return verdicts


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield ``count`` cases of every target."""
    for name, target in TARGETS.items():
        yield Case(f"hostile input: {name}", f"{count:,} cases", seed, partial(fuzz_target, target, count))


def fuzz_target(target: Target, count: int, place: Place, case: Case) -> Outcome:
    outcome = Outcome(times=count)
    try:
        verdicts = run_target(target, count, case.seed)
        outcome.times = sum(verdicts.values())
        outcome.ended = [json.dumps(verdicts)]
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        outcome.problems.append(f"{type(error).__name__}: {error} {notes}"[:600])
    return outcome
