"""How a run ends early: errors in one line, without a traceback, and signals that let the step finish."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

HEAD_START = 5.0  # seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class UserError(Exception):
    """A wrong setting, file, model or reward function; exit code 2. The message says its value and what is allowed."""


class Interrupted(Exception):
    """The run was asked to stop, and has saved everything; exit code 0."""


class NotFinite(Exception):
    """NaN or infinity in an update, which was not applied.

    Attributes:
        samples: indices, within the step, of the answers that alone cause it; empty when no single one does.
    """

    def __init__(self, what: str, samples: Sequence[int] = ()):
        super().__init__(what)
        self.samples = list(samples)


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, that of C++, torch's on a CPU or torch's on a GPU."""
    said = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(text in str(error) for text in said)


def is_lost_connection(error: BaseException) -> bool:
    """Whether another process of the run has ended, as gloo or NCCL notice it."""
    said = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return os.environ.get("WORLD_SIZE", "1") != "1" and any(text in str(error) for text in said)


def kind_of(error: BaseException) -> type[Exception] | None:
    """Which error that ends a run in one line it is, for another process to raise; None: it is none of them."""
    for kind in (UserError, NotFinite):
        if isinstance(error, kind):
            return kind
    return MemoryError if is_out_of_memory(error) else None


def hide_passwords(text: str) -> str:
    """With *** for the password of every URL in it: of ``scheme://user:password@host`` and of ``?password=``."""
    text = re.sub(r"(://[^:/@\s]*:)[^@\s]*@", r"\1***@", text)
    return re.sub(r"([?&]password=)[^&\s'\"]*", r"\1***", text)


def tell(message: str) -> None:
    """Once, whatever the number of processes that torchrun started."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(message, file=sys.stderr)


def after_the_first() -> None:
    """Lets the first process of a host tell before this one, which torchrun ends when that one has ended.

    For errors that all find before they know of one another. What one alone finds is told a little later.
    """
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        time.sleep(HEAD_START)


@contextmanager
def found_by_each() -> Iterator[None]:
    """Within it every process finds the same errors, each by itself; of a host the first one tells."""
    try:
        yield
    except UserError:
        after_the_first()
        raise


def mark_shared(error: BaseException) -> None:
    """Marks an error that all ranks raise together, each as an object of its own."""
    error.shared = True  # type: ignore[attr-defined]


def is_shared(error: BaseException | None) -> bool:
    """Whether all ranks raise it together, or what it was raised from."""
    while error is not None:
        # loss and norm are sums over all ranks; what one alone samples from is raised together
        if isinstance(error, NotFinite) or getattr(error, "shared", False):
            return True
        error = error.__cause__
    return False


def tell_error(error: BaseException, message: str) -> None:
    """Of an error that all ranks raise together the first tells; of others each that has one, by its number."""
    if is_shared(error):
        tell(f"error: {message}")
        return
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    who = "" if size == "1" else f"process {rank} of {size}: "
    print(f"error: {who}{message}", file=sys.stderr)


class StopSignal:
    """Within it the first signal is noted; the next raises KeyboardInterrupt, as Ctrl-C does without it.

    Signals reach the main thread only; in any other one this does nothing. ``loud`` says on standard error that one
    came.

    Attributes:
        name: of the signal that came, None before.
    """

    def __init__(self, *, loud: bool = True) -> None:
        self.name: str | None = None
        self.loud = loud
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if self.loud:
            print(f"{self.name}: finishing the step, then saving; once more stops at once", file=sys.stderr)
