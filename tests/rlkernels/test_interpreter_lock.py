"""Long calls into compiled code let other Python threads run: batch drafting and verification release the GIL."""

import sys
import threading
import time

import numpy as np
import pytest
import torch

import rlkernels
from rlkernels.sampling import _settings

PATIENCE = 60.0  # seconds of calls; one call of a millisecond is enough where a processor is free


def runs_during(call, seconds=PATIENCE) -> bool:
    """Whether a thread that has nothing left to wait for but the interpreter lock runs during calls.

    The interpreter is told never to take the lock from a thread that does not release it.
    """
    may, ran = threading.Lock(), threading.Event()
    before, end = sys.getswitchinterval(), time.monotonic() + seconds

    def work():
        with may:
            total = sum(i * i for i in range(1000))  # progress: bytecode, not one atomic call
        if total:
            ran.set()

    thread = threading.Thread(target=work)
    with may:
        thread.start()
        sys.setswitchinterval(1000.0)
    try:
        while not ran.is_set() and time.monotonic() < end:
            call()
        return ran.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()


def long_calls():
    """Drafting calls on handles, and a verification, by name."""
    rng = np.random.default_rng(0)
    history = rlkernels.RolloutHistory(backend="cpu")
    for _ in range(50):
        history.add([1, 2], rng.integers(0, 4, 400))
    handles = np.array([history.track([1, 2]) for _ in range(500)])
    new, lengths = rng.integers(0, 4, 500 * 20).astype(np.int32), np.full(500, 20)
    history.extend_tracked(handles, new, lengths)
    core, many = history._core, np.tile(handles, 400)
    ones = np.ones_like(many)
    logits, uniforms, drafts = torch.randn(64, 20_000), torch.rand(64), torch.randint(20_000, (48,))
    starts, settings = torch.arange(0, 65, 4), _settings(1.0, 0.9, 50, 16, logits.device)
    return {
        "draft_tracked": lambda: core.draft_tracked(handles, 64, 0.0),
        "extend_tracked": lambda: core.extend_tracked(handles, new, lengths),
        "observe": lambda: core.observe(many, ones, ones),
        "verify_drafts": lambda: torch.ops.rlkernels.verify_drafts(logits, drafts, starts, uniforms, *settings),
    }


@pytest.mark.parametrize("name", ["draft_tracked", "extend_tracked", "observe", "verify_drafts"])
def test_another_thread_makes_progress_during_a_long_call(name, compiled):
    assert runs_during(long_calls()[name])


def test_a_call_that_keeps_the_lock_lets_nobody_run():
    """The test above can fail."""
    numbers = list(range(10_000, 0, -1))
    assert not runs_during(lambda: sorted(numbers, key=int.bit_count), seconds=0.3)
