"""The reward ``math``: whether an answer equals the known one, by the library math-verify.

It reads numbers, fractions, percentages, units, LaTeX, sets, intervals and equations, and takes the last expression
of an answer, boxed ones first.
"""

import atexit
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

from python_trainer.data import Messages
from python_trainer.errors import UserError

ANSWER_SECONDS = 5.0  # of processor time for one answer, which then counts as wrong
WORKER = Path(__file__).with_name("math_worker.py")


class Verifier:
    """Judge answers in a worker process, which starts at the first one."""

    def __init__(self, seconds: float = ANSWER_SECONDS):
        self.seconds = seconds
        self._worker: subprocess.Popen[str] | None = None

    def __call__(self, completion: str, gold: str) -> bool | None:
        """Return whether the completion's answer equals ``gold``; None where ``gold`` holds no mathematics.

        An answer that takes too long, or too much memory, is wrong.
        """
        if self._worker is None:
            self._worker = self._start()
        assert self._worker.stdin is not None and self._worker.stdout is not None
        with suppress(BrokenPipeError):  # it has ended
            self._worker.stdin.write(json.dumps([completion, gold]) + "\n")
            self._worker.stdin.flush()
            if reply := self._worker.stdout.readline():
                return json.loads(reply)
        self.close()
        return False

    def _start(self) -> "subprocess.Popen[str]":
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("reward math needs the package math-verify: pip install math-verify")
        # a session of its own: Ctrl-C is for the trainer, which still judges what it has begun
        worker = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(WORKER), str(self.seconds)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, encoding="utf-8", start_new_session=True,
        )  # fmt: skip
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise RuntimeError(f"the worker of reward math ended at its start with exit code {worker.wait()}")
        return worker

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None


_verifier = Verifier()
atexit.register(_verifier.close)


def math_reward(
    prompts: Sequence,
    completions: Sequence[str | Messages],
    completion_ids: Sequence,
    answer: Sequence[str | float],
    **_: object,
) -> list[float | None]:
    """Return 1 for every completion that ends in the value of ``answer``, mathematics or a number, else 0."""
    judged: list[float | None] = []
    for completion, value in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        right = _verifier(text, gold) if (gold := _as_text(value)) is not None else None
        if right is None:
            raise ValueError(f"column answer must be a number, or a string with mathematics in it, got {value!r:.80}")
        judged.append(float(right))
    return judged


def _as_text(answer: object) -> str | None:
    """Return an answer as text, a number without an exponent; None if it is neither text nor a finite number."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bool) or not isinstance(answer, int | float | Decimal) or not math.isfinite(answer):
        return None
    return f"{Decimal(str(answer)):f}"
