"""Cases for the tests of ``python -m bench.gpu``: of the providers one dies, one hangs, one is wrong."""

import os
import signal
import time
from pathlib import Path

import torch

from bench.gpu.problem import GpuCase, Problem, Rival

SLOW_S = 0.5


def right():
    return torch.linspace(0, 1, 1000)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(3600)


def raises():
    raise MemoryError("no room for 40 GiB")


def planted(device):
    # 30 % off in a single number of a thousand
    wrong = right()
    wrong[-1] *= 1.3
    calls = {"dies": dies, "wrong": lambda: wrong, "hangs": hangs, "raises": raises, "peer": right}
    rivals = {name: Rival(lambda call=call: call) for name, call in calls.items()}
    return Problem(lambda backend: right(), rivals=rivals)


def slow(device):
    """Rows that come one by one; says who the worker is."""
    Path(os.environ["PLANTED_PID"]).write_text(str(os.getpid()))

    def wait():
        time.sleep(SLOW_S)
        return right()

    return Problem(lambda backend: right(), rivals={f"peer {i}": Rival(lambda: wait) for i in range(20)})


CASES = [
    GpuCase("merge_attention", "planted", planted),
    GpuCase("rope", "slow", slow),
]
