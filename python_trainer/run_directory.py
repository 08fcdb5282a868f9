"""The files of a run: writing that a kill cannot damage, the lock of its directory, rows of metrics, evaluations."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from python_trainer.errors import UserError

EVALUATIONS = "eval_test.safetensors"
LOCK = ".lock"


def flush(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_output_dir(folder: Path) -> None:
    """Raises UserError where ``folder`` is no folder, or one that cannot be made or written; makes nothing."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        problem = f"{there} is a file" if not there.is_dir() else f"{there} is not writable"
        usable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError as error:
        raise unusable_output_dir(folder, error.strerror) from error
    if not usable:
        raise unusable_output_dir(folder, problem)


def unusable_output_dir(folder: Path, problem: str | None) -> UserError:
    return UserError(f"--output-dir must be a folder that can be written, got {folder}: {problem}")


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step: readers see the old text or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Like :func:`write_text`."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_bytes(data)
    flush(aside)
    aside.replace(path)
    flush(path.parent)


def append(path: Path, text: str) -> None:
    """Adds lines to a file. An OSError names it, which one of a write does not by itself."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def usual_mode(folder: Path) -> None:
    """Gives the files of a folder the permissions of any new file; safetensors writes them for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def publish(aside: Path, target: Path) -> None:
    """Flushes a folder that is complete and renames it to ``target``, which is replaced."""
    for path in sorted(aside.rglob("*"), reverse=True):
        flush(path)
    flush(aside)
    if target.exists():
        old = target.with_name(f".old-{target.name}")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    flush(target.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within it no other process has the run directory, which must exist; the lock goes with the process that holds it.

    Raises:
        UserError: another process has it.
    """
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            # of a process, not of the file: what a reward function leaves running in a fork does not hold it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                raise UserError(
                    f"--output-dir {folder} is in use by another run, process {file.read().strip() or 'unknown'}: wait "
                    "until it has ended, or choose another folder"
                ) from error
            # a file system without locks: nothing can be known
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield


def check_unlocked(folder: Path) -> None:
    """Raises UserError where another process has the run directory."""
    if (folder / LOCK).exists():
        with locked(folder):
            pass


def check_new(folder: Path) -> None:
    """Raises UserError where a run has made steps in the folder."""
    if any((folder / "checkpoints").glob("step-*")) or any(row["step"] for row in read_metrics(folder)):
        raise UserError(f"{folder} already holds a run: add --resume to go on, or choose another --output-dir")


def check_resumable(folder: Path) -> None:
    """Raises UserError where a finished run has left a model and no checkpoint: one begun anew would take its place."""
    if (folder / "model").exists() and not any((folder / "checkpoints").glob("step-*")):
        raise UserError(f"{folder} holds a finished run, and no checkpoint to go on from: choose another --output-dir")


def read_lines(path: Path) -> list[str]:
    """Lines that were written to their end; a kill can leave half of one."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged ({error})") from error
    return text[: text.rfind("\n") + 1].split("\n")[:-1]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Rows with a number ``step`` each, of the lines that were written to their end.

    Raises:
        UserError: the file is damaged.
    """
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number} is damaged ({error})") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path}:{number} is damaged: no object with a step")
        rows.append(row)
    return rows


def lines_until(path: Path, step: int | None) -> list[str]:
    """Lines of a file of rows up to a step; none for step None or a file that is not there."""
    if step is None or not path.exists():
        return []
    return [line for line, row in zip(read_lines(path), read_json_lines(path)) if row["step"] <= step]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run."""
    path = folder / "metrics.jsonl"
    return read_json_lines(path) if path.exists() else []


def read_samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Step -> the answers kept of it, as :func:`choose_samples` gives them; empty where a run has none."""
    path = folder / "samples.jsonl"
    rows = read_json_lines(path) if path.exists() else ()
    return {row["step"]: row["samples"] for row in rows if "samples" in row}


def load_evaluations(folder: Path) -> dict[str, numpy.ndarray]:
    """``start`` and ``final``: [N], 1 where the answer to a test prompt was right (uint8), or with several answers the
    share of right ones (float32); empty when there are none.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / EVALUATIONS
    try:
        return dict(load_file(path)) if path.exists() else {}
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())})") from error


def save_evaluation(folder: Path, name: str, correct: Sequence[float]) -> None:
    """Adds one evaluation to the file, or replaces it."""
    kind = numpy.uint8 if set(correct) <= {0, 1} else numpy.float32
    found = load_evaluations(folder) | {name: numpy.asarray(correct, dtype=kind)}
    write_bytes(folder / EVALUATIONS, save(found))
