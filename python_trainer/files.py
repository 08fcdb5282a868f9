"""Files that a kill cannot damage: written aside, flushed, then renamed into place."""

import os
import shutil
from pathlib import Path

from python_trainer.errors import UserError


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
