"""Cases for the tests of ``python -m bench.gpu``: of the providers one dies, one hangs, one is wrong."""

import os
import signal
import time
from pathlib import Path

import torch

from rlkernels.proof.problem import Case, Problem

SLOW_S = 0.5


def right():
    return torch.linspace(0, 1, 1000)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(3600)


def fail():
    raise MemoryError("no room for 40 GiB")


def wrong():
    out = right()
    out[-1] *= 1.3  # a single number of a thousand
    return out


def planted(behaviour):
    return lambda device: Problem(lambda backend: behaviour() if backend == "triton" else right())


def slow(device):
    """Rows that come one by one; says who the worker is."""
    Path(os.environ["PLANTED_PID"]).write_text(str(os.getpid()))

    def call(backend):
        time.sleep(SLOW_S)
        return right()

    return Problem(call)


CASES = [
    Case("merge_attention", "dies", planted(die)),
    Case("write_kv", "hangs", planted(hang)),
    Case("delta_matvec", "wrong", planted(wrong)),
    Case("add_rank1_", "fails", planted(fail)),
    *(Case(op, "slow", slow) for op in ("token_logprobs", "sample_tokens", "verify_drafts", "top1_delta")),
]
