"""A disk that is full, read-only, full in the middle of a write, or fails once, at one write of a run after another.

Writes of Python go through :class:`Disk`, which replaces ``open``, ``os.fsync``, ``os.rename`` and the like in the
process of the run, for files in the run directory; so the n-th of them can fail, whichever it is. Compiled code writes
two kinds of files by itself: safetensors, made in memory here so that they go the same way, and SQLite databases.
Those, and all others once more, meet a file system of a few kilobytes (:func:`small_disk`), for which one must be root.
"""

import builtins
import errno
import io
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from bench.faults.case import Case, Outcome, Place, with_

KINDS = {
    "full": errno.ENOSPC,  # from the n-th write on there is no room
    "short": errno.ENOSPC,  # of the n-th one half is written, then there is no room
    "read-only": errno.EROFS,  # from the n-th write on nothing can be changed
    "fails once": errno.EIO,  # the n-th one alone
}
SHORT = {"max_steps": 4, "save": {"save_steps": 2}}  # a run of some hundred writes
MARGIN = 60  # kilobytes that a small disk has at least: the settings and the first rows


def cases(times: int, seed: int) -> Iterator[Case]:
    """Each kind at every write of a run, ``times`` of every hundred, and as many small disks."""
    for number in range(seed, seed + times):
        for kind in KINDS:
            yield Case(f"disk: {kind}", "plain", number, with_(failing, kind, times))
        for variant in ("plain", "rhyme", "all accelerators"):
            yield Case("disk: a small file system", variant, number, small)


class Disk:
    """Counts what is written to files below a folder, and lets the n-th of it fail.

    Args:
        kind: of KINDS.
        at: which one, from 0 on.
        count: file that gets the number of writes, at the end.
    """

    def __init__(self, folder: Path, kind: str, at: int, count: Path | None = None):
        self.folder, self.kind, self.at, self.count = str(folder), kind, at, count
        self.writes = 0

    def __call__(self) -> None:
        """Takes the place of what writes."""
        opened = io.open

        def open_(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
                  newline: Any = None, *args: Any, **options: Any) -> Any:  # fmt: skip
            if set(mode) <= set("rbt") or not self.holds(file):
                return opened(file, mode, buffering, encoding, errors, newline, *args, **options)
            self.meet(file)
            raw = _File(self, file, mode.replace("b", "").replace("t", ""))
            buffer: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

        builtins.open = io.open = open_
        for name in ("mkdir", "rename", "replace", "rmdir", "unlink", "chmod"):
            setattr(os, name, self.guarded(getattr(os, name)))
        synced = os.fsync
        os.fsync = lambda handle: synced(handle) if self.meet(f"/proc/self/fd/{handle}") else None  # type: ignore[assignment]

        def save_file(tensors: dict[str, Any], filename: Any, metadata: Any = None) -> None:
            try:
                Path(filename).write_bytes(safetensors.torch.save(tensors, metadata))
            except OSError as error:
                raise SafetensorError(f"I/O error: {error}") from error

        from python_trainer import checkpoint

        checkpoint.save_file = save_file

    def holds(self, file: Any) -> bool:
        path = os.path.realpath(file) if isinstance(file, str | os.PathLike) else ""
        return path.startswith(self.folder)

    def meet(self, file: Any) -> bool:
        """Counts one; raises what the disk says to it."""
        if self.holds(file):
            number, self.writes = self.writes, self.writes + 1
            if self.count is not None:
                os.pwrite(self.handle(), f"{self.writes:8d}".encode(), 0)
            if number == self.at or (number > self.at and self.kind != "fails once"):
                raise OSError(KINDS[self.kind], os.strerror(KINDS[self.kind]), str(file))
        return True

    def handle(self) -> int:
        if not hasattr(self, "_handle"):
            self._handle = os.open(str(self.count), os.O_WRONLY | os.O_CREAT)
        return self._handle

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A call that changes names; a full disk takes those."""

        def call(path: Any, *args: Any, **options: Any) -> Any:
            if self.kind == "read-only" or function.__name__ == "mkdir":
                self.meet(path)
            return function(path, *args, **options)

        return call


class _File(io.FileIO):
    """A file on that disk."""

    def __init__(self, disk: Disk, file: Any, mode: str):
        super().__init__(file, mode)
        self.disk = disk

    def write(self, data: Any, /) -> int:
        if self.disk.kind == "short" and self.disk.writes == self.disk.at and len(data) > 1:
            self.disk.writes += 1
            return super().write(bytes(data)[: len(data) // 2])
        self.disk.meet(self.name)
        return super().write(data)


def count_writes(place: Place) -> int:
    """Of a run that nothing is done to."""
    count = place.root / "writes"
    if not count.exists():
        place.train(changes=SHORT, fault=Disk(place.run, "read-only", 1 << 30, count), folder=place.run).end()
    return int(count.read_text())


def failing(place: Place, case: Case, args: tuple[str, int]) -> Outcome:
    """A kind at each of a share of the writes."""
    kind, share = args
    outcome, untouched, total = Outcome(times=0), place.untouched("short", SHORT), count_writes(place)
    every = max(100 // share, 1)
    for at in range(case.seed % every, total, every):
        place.clear()
        place.folder.mkdir(parents=True)
        before = len(outcome.problems)
        ended = place.train(changes=SHORT, fault=Disk(place.run, kind, at)).end()
        outcome.times += 1
        place.check_end(outcome, ended, 0, 2)
        place.check_newest(outcome, 0)
        place.check_resume(outcome, untouched, SHORT)
        outcome.problems[before:] = [f"write {at}: {text}" for text in outcome.problems[before:]]
    return outcome


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A file system of this size in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def small(place: Place, case: Case) -> Outcome:
    """A run, and the database that it writes, on a disk that is too small, at any size; it gets larger, it goes on."""
    outcome, untouched, changes = Outcome(), place.untouched("short", SHORT), dict[str, Any](SHORT)
    kept = untouched.parent if case.variant == "rhyme" else untouched
    whole = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file()) >> 10
    if case.variant == "rhyme":
        changes["accelerators"] = {"rhyme": {"database": str(place.run / "history.db")}}
    size = random.Random(f"disk/{case.variant}/{case.seed}").randint(MARGIN, whole)
    with small_disk(place.run, size):
        place.check_end(outcome, place.train(changes=changes).end(), 0, 2)
        place.check_newest(outcome, 0)
        larger = f"remount,size={8 * whole}k"
        subprocess.run(["mount", "-o", larger, str(place.run)], check=True)
        place.check_resume(outcome, untouched, changes)
    return outcome
