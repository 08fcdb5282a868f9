"""Rewards of the runs: one that a random policy can learn, and ones that do what a reward should not."""

import os
import sys
import time
from collections.abc import Sequence

DIGITS = range(10)


def digits(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """Share of digits in an answer."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def hangs(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """Never returns, once the file that the environment names is there."""
    while os.path.exists(os.environ.get("FAULT_FILE", "")):
        time.sleep(0.01)
    return digits(prompts, completions)


def forks(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """Leaves a process behind that has everything open that the trainer has, for a while."""
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    return digits(prompts, completions)


def writes(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """A lot to standard output and standard error, some of it no text."""
    print("noise " * 1000)
    sys.stderr.write("noise\n" * 10)
    os.write(1, bytes(range(256)) * 64)
    return digits(prompts, completions)


def exits(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """Ends the process without a word, as code in C may do."""
    if os.path.exists(os.environ.get("FAULT_FILE", "")):
        os._exit(7)
    return digits(prompts, completions)
