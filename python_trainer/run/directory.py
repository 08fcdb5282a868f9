"""The files of a run: writing that a kill cannot damage, the lock of its directory, rows of metrics, evaluations."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from python_trainer.errors import UserError, problem_line
from rlkernels._files import replace_file

EVALUATIONS = "evaluations.jsonl"  # on the test split
ENDS = ("start", "final")  # evaluations before the first step and after the last
LOCK = ".lock"
# no number of a run is larger, and a file may hold any
Count = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
Share = Annotated[float, Field(ge=0, le=1)]


def check_run_directory(folder: Path, *, resume: bool) -> None:
    """Check that a run may begin in a folder, or go on there; write nothing.

    Raises:
        UserError: it is a file, cannot be made or written, or is in use; it holds a run although ``resume`` is false,
            or a model without a checkpoint, which a resumed run would replace, or such files of something else.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        problem = f"{there} is a file" if not there.is_dir() else f"{there} is not writable"
        usable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        if usable and (folder / LOCK).exists():
            with locked(folder):
                pass
    except OSError as error:
        raise unusable_output_dir(folder, error.strerror) from error
    if not usable:
        raise unusable_output_dir(folder, problem)
    begun = any((folder / "checkpoints").glob("step-*"))
    if not resume and (begun or any(row["step"] for row in read_metrics(folder))):
        raise UserError(f"{folder} already holds a run: add --resume to go on, or choose another --output-dir")
    others = " and ".join(name for name in ("config.yaml", "model") if (folder / name).exists())
    if others and not begun and not (folder / LOCK).exists():
        raise UserError(f"{folder} holds {others} of something else, which a run replaces: choose another --output-dir")
    if resume and not begun and (folder / "model").exists():
        raise UserError(f"{folder} holds a finished run without a checkpoint: choose another --output-dir")


def unusable_output_dir(folder: Path, problem: str | None) -> UserError:
    return UserError(f"--output-dir must be a folder that can be written, got {folder}: {problem}")


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: readers see either the old text or the new one."""
    replace_file(path, text.encode())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run directory, which must exist, for this process; the lock ends with the process."""
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            # a lock of the process, not of the file: forks that a reward function leaves running do not hold it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                raise UserError(
                    f"--output-dir {folder} is in use by another run, process {file.read().strip() or 'unknown'}: wait "
                    "until it has ended, or choose another folder"
                ) from error
            # the file system has no locks: others cannot be detected
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


class Row(BaseModel):
    """A row of a JSON-lines file of a run."""

    model_config = ConfigDict(extra="allow", strict=True)
    step: int


class MetricsRow(Row):
    """A row of metrics.jsonl: numbers by name."""

    __pydantic_extra__: dict[str, float | None]
    step: Count


class SamplesRow(Row):
    """A row of samples.jsonl: answers of a step."""

    samples: list[dict[str, Any]] = []


class EvaluationRow(Row):
    """A row of evaluations.jsonl: the share of right answers to each test prompt, and the answers to the first ones."""

    name: str = ""
    correct: list[Share] = Field([], min_length=1)
    samples: list[dict[str, Any]] = []


def read_text(path: Path) -> str | None:
    """Return the text of a file of a run; None if there is none.

    Raises:
        UserError: it is no regular file, or not UTF-8.
    """
    if not path.exists():
        return None
    if not path.is_file():
        raise UserError(f"{path} is damaged: it is no regular file")
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from error


def read_rows(path: Path, schema: type[Row] = Row) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file; none if there is no file.

    A kill can leave half of a line at the end, which is left out.

    Raises:
        UserError: a row that is no JSON, or does not fit the schema.
    """
    rows = []
    for number, line in enumerate((read_text(path) or "").split("\n")[:-1], 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("a row is no object")
            named = {str(name).encode(errors="replace"): value for name, value in row.items()}  # lone surrogates too
            schema.model_validate({name.decode(): value for name, value in named.items()})
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is damaged (line {number}: {first_problem(error)})") from error
        rows.append(row)
    return rows


def first_problem(error: Exception) -> str:
    """Return what a schema, or JSON, has against a file, in one line."""
    if isinstance(error, ValidationError):
        return problem_line(error.errors()[0])
    return str(error) or type(error).__name__


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the path in errors of the block: Python names no file in that of a write."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a JSON-lines file."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return all rows of metrics.jsonl; none if there is no file."""
    return read_rows(folder / "metrics.jsonl", MetricsRow)


def read_samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the sample rollouts kept of each step; empty if the run has none."""
    rows = read_rows(folder / "samples.jsonl", SamplesRow)
    return {row["step"]: row["samples"] for row in rows if "samples" in row}


def read_evaluations(folder: Path, steps: int | None = None, column: str = "correct") -> dict[str, list[Any]]:
    """Return a column of the evaluations ``start`` and ``final``, if any.

    Args:
        steps: of the run; a final evaluation at another step belongs to a run that has gone on. None: any counts, the
            last one of several.
        column: ``correct``, the share of right answers to each test prompt; or ``samples``, ``prompt`` and ``answer``
            of the first test prompts.
    """
    rows = [row for row in read_rows(folder / EVALUATIONS, EvaluationRow) if {"name", column} <= row.keys()]
    return {row["name"]: row[column] for row in rows if row["name"] != "final" or steps in (None, row.get("step"))}


def on_all_prompts(row: Mapping[str, Any], metric: str) -> Any:
    """Return a metric of the first or last evaluation, of all test prompts; None without an evaluation."""
    return row.get(f"eval_all/{metric}", row.get(f"eval/{metric}"))
