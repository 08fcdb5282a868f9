"""Standard output and error of a command: losing them ends no run, and the log goes on in the run's folder.

A terminal closes, the reader of a pipe ends, a disk is full, or nobody opened the stream. From then on its descriptor
is that of a file, so the file gets what compiled code and other processes write, too.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LOG = "log.txt"


class Log:
    """The file that takes the place of lost streams: a temporary one until the run has a folder."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._folder: Path | None = None
        self._descriptor: int | None = None  # of the file, from the first loss on
        self._streams: list[Stream] = []  # lost

    def replace(self, stream: "Stream", reason: str | None) -> None:
        """Let the file take the place of a stream, or nothing if the file cannot be written either."""
        with self.lock:
            if stream in self._streams:
                with open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), stream.fileno())
                return
            if self._descriptor is None:
                self._descriptor = _open(self._folder)
            self._streams.append(stream)
            os.dup2(self._descriptor, stream.fileno())
            line = f"{time.strftime('%F %T')}: {stream.label} is lost ({reason}), its log goes on here\n"
            with suppress(OSError):
                os.write(self._descriptor, line.encode())  # before the text that the stream still holds

    def move(self, folder: Path) -> None:
        """Go on in a file of this folder, to which the contents of the temporary one move."""
        with self.lock:
            before, temporary, self._folder = self._descriptor, self._folder is None, folder
            if before is None:
                return
            for stream in self._streams:
                stream.flush()
            self._descriptor = _open(folder)
            if temporary:
                with suppress(OSError):
                    os.write(self._descriptor, os.pread(before, os.fstat(before).st_size, 0))
            os.close(before)
            for stream in self._streams:
                os.dup2(self._descriptor, stream.fileno())


def _open(folder: Path | None) -> int:
    """Open the log in a folder, or a temporary file; the null device where that fails."""
    try:
        if folder is not None:
            return os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    except OSError:
        return os.open(os.devnull, os.O_RDWR)


class Stream:
    """A text stream that shows every character somehow, and never raises OSError.

    Args:
        stream: writes to a descriptor; None, as Python has it where the descriptor is closed, is lost from the start.
        label: its name, for the log.
    """

    def __init__(self, stream: Any, label: str, log: Log):
        self.label, self._log = label, log
        self._stream = stream or open(os.devnull, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        if stream is None:
            log.replace(self, "closed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        shown = text.encode(encoding, "backslashreplace").decode(encoding)
        self._attempt(lambda: self._stream.write(shown))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            self._log.replace(self, error.strerror)
            with suppress(OSError):
                self._stream.flush()


_log = Log()


@contextmanager
def surviving() -> Iterator[None]:
    """Replace standard output and error within the block by streams that outlive their terminal."""
    global _log
    _log, before = Log(), (sys.stdout, sys.stderr)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next file gets the number, and what other code prints
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    streams = Stream(sys.stdout, "standard output", _log), Stream(sys.stderr, "standard error", _log)
    sys.stdout, sys.stderr = streams  # type: ignore[assignment]
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr = before


def log_into(folder: Path) -> None:
    """Write to a file of this folder from now on, where the terminal is lost."""
    _log.move(folder)
