"""How a run ends early: errors in one line, without a traceback."""

import os
import re
import sys
import time
from typing import Any

from rlkernels._text import escape_controls

HEAD_START = 5.0  # seconds


class UserError(Exception):
    """Mistake of the user: a setting, file, model or reward function; exit code 2.

    The message names its value and what is allowed. It may quote text from outside, which it escapes.
    """

    def __init__(self, message: object = ""):
        super().__init__(escape_controls(str(message)))


class Interrupted(Exception):
    """A signal stopped the run, which has saved everything; exit code 0."""


class NotFinite(Exception):
    """An update with NaN or infinity, which was not applied."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: in Python, in C++, in torch on a CPU or GPU, or in CUDA's libraries."""
    messages = (
        "can't allocate memory",
        "Cannot allocate memory",
        "not enough memory",
        "out of memory",
        "bad_alloc",
        "_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, MemoryError) or any(text in str(error) for text in messages)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether gloo or NCCL noticed that another rank has ended."""
    messages = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return os.environ.get("WORLD_SIZE", "1") != "1" and any(text in str(error) for text in messages)


def is_timed_out(error: BaseException) -> bool:
    """Return whether gloo, NCCL or the store of the process group has waited for another rank until ddp_timeout."""
    messages = ("Timed out waiting", "Application timeout", "wait timeout after", "collective operation timeout")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in messages)


def kind_of(error: BaseException) -> type[Exception] | None:
    """Return the class that another rank raises for this error; None if it does not end a run in one line."""
    for kind in (UserError, NotFinite):
        if isinstance(error, kind):
            return kind
    return MemoryError if is_out_of_memory(error) else None


def hide_passwords(text: str) -> str:
    """Replace passwords in URLs by ***: in ``scheme://user:password@host`` and ``?password=``."""
    text = re.sub(r"(://[^:/@\s]*:)[^@\s]*@", r"\1***@", text)
    return re.sub(r"([?&]\w*password=)[^&\s'\"]*", r"\1***", text)


def tell(message: str) -> None:
    """Print a message on standard error, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":  # compared as text: the message may be about this variable
        print(escape_controls(message), file=sys.stderr)


def wait_for_first_rank() -> None:
    """Wait on all ranks but the first of a host, so that one message is printed and not one per rank.

    torchrun ends the other ranks as soon as the first has failed.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(HEAD_START)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def on_one_line(error: object) -> str:
    """Return the text of an error on one line; the name of its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def mark_shared(error: BaseException) -> None:
    """Mark an error that all ranks raise together."""
    error.shared = True  # type: ignore[attr-defined]


def is_shared(error: BaseException | None) -> bool:
    """Return whether all ranks raise this error together, or the error that it was raised from."""
    while error is not None:
        # loss and norm are sums over all ranks; a rank that cannot sample raises together with the others
        if isinstance(error, NotFinite) or getattr(error, "shared", False):
            return True
        error = error.__cause__
    return False


def tell_error(error: BaseException, message: str) -> None:
    """Print an error: on rank 0 if all ranks raise it together, else on every failed rank, with its number."""
    if is_shared(error):
        tell(f"error: {message}")
        return
    wait_for_first_rank()  # it may have the same error
    rank = os.environ.get("RANK", "0")
    size = os.environ.get("WORLD_SIZE", "1")
    process = "" if size == "1" else f"process {rank} of {size}: "
    print(f"error: {process}{escape_controls(message)}", file=sys.stderr)


def problem_line(problem: Any) -> str:
    """Write one of the errors of a pydantic ValidationError as: key, what is wrong, value."""
    key = ".".join(map(str, problem["loc"]))
    message = problem["msg"]
    return f"{f'{key}: ' if key else ''}{message[0].lower() + message[1:]}, got {problem['input']!r:.80}"
