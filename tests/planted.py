"""Kernels that misbehave, each in its own way: for the tests of ``rlkernels.prove`` and of ``python -m bench.gpu``."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import torch

from rlkernels.proof.problem import Case, Problem

SLOW_S = 0.5
runs = iter(range(10**9))


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


def change():
    return right() * (1 + 1e-7 * next(runs))


def wait():
    time.sleep(0.2)
    return right()


def planted(behaviour, device):
    """Return a problem for which plain torch is slow, and "triton" misbehaves."""

    def call(backend):
        if backend == "torch":
            time.sleep(0.05)
        return behaviour() if backend == "triton" else right()

    return Problem(call, floor=1e-4)


def slow(device):
    """Return a problem whose rows come one by one; write the id of the worker's process."""
    Path(os.environ["PLANTED_PID"]).write_text(str(os.getpid()))

    def call(backend):
        time.sleep(SLOW_S)
        return right()

    return Problem(call)


# op -> what its candidate "triton" does in the small case, and in the large one
PROVED = {
    "merge_attention": (die, die),
    "write_kv": (hang, hang),
    "dtw": (wrong, wrong),
    "delta_matvec": (fail, fail),
    "add_rank1_": (change, change),
    "sample_tokens": (right, wait),
    "verify_drafts": (right, die),
    "token_logprobs": (right, wrong),
    "top1_delta": (right, right),
}


def cases_of(workload):
    """Return the cases; fail as without a device where the variable names another process as the parent."""
    if os.environ.get("PLANTED_PARENT", str(os.getpid())) != str(os.getpid()):
        raise RuntimeError("all CUDA-capable devices are busy or unavailable")
    cases = [Case(op, "small", partial(planted, small)) for op, (small, _) in PROVED.items()]
    cases += [Case(op, "large", partial(planted, large), timed=True) for op, (_, large) in PROVED.items()]
    return cases


TIMED = [
    Case("merge_attention", "dies", partial(planted, die)),
    Case("write_kv", "hangs", partial(planted, hang)),
    Case("delta_matvec", "wrong", partial(planted, wrong)),
    Case("add_rank1_", "fails", partial(planted, fail)),
    *(Case(op, "slow", slow) for op in ("token_logprobs", "sample_tokens", "verify_drafts", "top1_delta")),
]
