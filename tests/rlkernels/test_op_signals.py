"""Ctrl-C ends a compiled op that would take minutes: its loops look for signals about once a second."""

import os
import signal
import struct
import sys
import threading
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from support import assert_equal

import rlkernels

pytestmark = pytest.mark.usefixtures("compiled")


class Interrupted(Exception):
    """What the handler of this file raises."""


def check_interrupted(call):
    """Check that a signal from another Python thread ends compiled code with the exception of its handler.

    Python would run the handler as soon as the code has returned. Its profiler tells whether it has.
    """
    events = []

    def handler(*_):
        raise Interrupted

    old_handler = signal.signal(signal.SIGUSR1, handler)
    sender = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    sender.start()
    try:
        sys.setprofile(lambda frame, event, _: events.append((event, frame.f_code.co_name)))
        with pytest.raises(Interrupted):
            call()
    finally:
        sys.setprofile(None)
        sender.join()
        signal.signal(signal.SIGUSR1, old_handler)
    assert ("return", "handler") in events, "the handler ran in the profiler: the code had returned"
    handled = events.index(("return", "handler"))
    assert events[handled + 1][0] == "c_exception", events[handled - 3 : handled + 3]


def many_pairs():
    return partial(rlkernels.dtw, *torch.randn(2, 2000, 3000))


def one_long_pair():
    return partial(rlkernels.dtw, *torch.randn(2, 1, 1_000_000))


def one_long_stretch():
    return partial(rlkernels.dtw, *torch.randn(2, 1, 1_000_000), mode="subsequence")


def nearest_of_long_ones():
    return partial(rlkernels.dtw_topk, *torch.randn(2, 50, 50_000), 30)


def many_updates():
    """Return a call with many updates of the same two matrices, each of more entries than one thread takes."""
    pair = torch.randn(2, 2048, 2048).unbind()
    return partial(rlkernels.top1_deltas, {str(i): pair for i in range(400)})


def many_queries():
    """Return a call with many queries of one sequence, 64 heads each, for 2^18 keys that lie in one block."""
    query = torch.randn(8192, 64, 32)
    caches = torch.randn(2, 1, 16, 1, 32).unbind()
    tables = torch.zeros(1, 1 << 14, dtype=torch.int32)
    lens = torch.tensor([1 << 18]).int()
    starts = torch.tensor([0, len(query)]).int()
    return partial(rlkernels.paged_attention, query, *caches, tables, lens, starts, scale=0.1)


def large_history():
    """Return the bytes of a history of 20 million indexed tokens: one prompt, 40,000 rollouts of 500."""
    rollouts = np.zeros(40_000, [("numbers", "<u4", 2), ("reward", "<f8"), ("epoch", "<i8"), ("tokens", "<i4", 500)])
    rollouts["numbers"] = 0, 500  # of the prompt, of tokens
    rollouts["tokens"] = np.random.default_rng(0).integers(0, 1 << 30, (40_000, 500))
    head = struct.pack("<qdqqQQ", -1, 0.02, 24, 0, 1, len(rollouts)) + struct.pack("<Ii", 1, 7)
    payload = head + rollouts.tobytes()
    data = b"RLKHIST\0" + struct.pack("<IIQ", 1, zlib.crc32(payload), len(payload)) + payload
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("op", [many_pairs, one_long_pair, many_updates, many_queries])
def test_a_signal_ends_an_op(op):
    check_interrupted(partial(op(), backend="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("op", [one_long_stretch, nearest_of_long_ones])
def test_a_signal_ends_other_loops(op):
    check_interrupted(partial(op(), backend="cpu"))


@pytest.mark.slow
def test_a_signal_ends_the_reading_of_a_history():
    data = large_history()
    check_interrupted(partial(rlkernels.RolloutHistory.from_bytes, data, backend="cpu"))


@pytest.mark.parametrize("options", [{}, {"band": 20}, {"mode": "subsequence"}])
def test_long_trajectories_are_worked_on_in_parts(cpu_isa, options):
    """The costs of whole numbers, whose sums are exact, are those of the reference."""
    x = torch.randint(0, 3, (1, 523, 8)).float()
    y = torch.randint(0, 3, (2, 1031, 8)).float()
    assert_equal(*(rlkernels.dtw(x, y, backend=name, **options) for name in ("cpu", "torch")))
