"""Cases for the tests of ``rlkernels.prove``: of each op one candidate misbehaves in its own way."""

import os
import signal
import time
from functools import partial

import torch

from rlkernels.proof.problem import Case, Problem

runs = iter(range(10**9))


def right():
    return torch.linspace(0, 1, 1000)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(3600)


def fail():
    raise RuntimeError("PTX assembly aborted")


def wrong():
    out = right()
    out[-1] *= 1.3  # a single number of a thousand
    return out


def change():
    return right() * (1 + 1e-7 * next(runs))


def wait():
    time.sleep(0.2)
    return right()


# op -> what its candidate "triton" does in the small case, and in the timed one
PLANTED = {
    "merge_attention": (die, die),
    "write_kv": (hang, hang),
    "dtw": (wrong, wrong),
    "dtw_topk": (fail, fail),
    "add_rank1_": (change, change),
    "sample_tokens": (right, wait),
    "verify_drafts": (right, die),
    "token_logprobs": (right, wrong),
    "top1_delta": (right, right),
}


def planted(behaviour, device):
    def call(backend):
        if backend == "torch":
            time.sleep(0.05)
            return right()
        return behaviour() if backend == "triton" else right()

    return Problem(call, floor=1e-4)


def cases_of(workload):
    """Where the variable names another process as the parent, there is no device."""
    if os.environ.get("PLANTED_PARENT", str(os.getpid())) != str(os.getpid()):
        raise RuntimeError("all CUDA-capable devices are busy or unavailable")
    small = [Case(op, "small", partial(planted, what[0])) for op, what in PLANTED.items()]
    return small + [Case(op, "large", partial(planted, what[1]), timed=True) for op, what in PLANTED.items()]
