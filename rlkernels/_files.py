"""Replacing a file or a folder as a whole: readers see the old content or the new one, and so does who comes after a
kill.

A symbolic link stays, and what it leads to is replaced. What is replaced hands on its permissions.
"""

import os
import shutil
import tempfile
from pathlib import Path


def flush(path: str | os.PathLike[str]) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file. A device or a pipe, which cannot be replaced, is written to.

    Raises:
        OSError: the file cannot be written, and is as it was; it names ``path``.
    """
    target = Path(os.path.realpath(os.fsdecode(path)))
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=target.parent) as aside:
            draft = Path(aside, "draft")
            draft.write_bytes(content)
            flush(draft)
            if target.exists():
                shutil.copymode(target, draft)
            draft.replace(target)
        flush(target.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fsdecode(path)) from None


def draft_of(folder: str | os.PathLike[str]) -> Path:
    """Return where to write what :func:`replace_folder` puts in the place of a folder: beside what it leads to."""
    target = Path(os.path.realpath(folder))
    return target.with_name(f".{target.name}.tmp")


def replace_folder(folder: str | os.PathLike[str]) -> None:
    """Flush the complete folder at :func:`draft_of`, and put it in the place of ``folder``, which need not exist."""
    draft, target = draft_of(folder), Path(os.path.realpath(folder))
    for path in (*sorted(draft.rglob("*"), reverse=True), draft):
        flush(path)
        before = target / path.relative_to(draft)
        if before.exists():
            shutil.copymode(before, path)
    old = _hidden(target)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)  # a kill may have left it
    flush(target.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists: a kill leaves all of it or nothing. Of a symbolic link only the link goes."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        old = _hidden(folder)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(folder.rename(old))


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".old-{folder.name}")
