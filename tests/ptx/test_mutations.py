"""The interpreter notices faults planted in the PTX of our kernels. ``python -m ptx.mutations`` has a larger sample."""

import pytest

from ptx.mutations import attempt

FEW = [  # kernel, kind of fault, its place
    ("paged attention, decode", "barrier removed", 6), ("paged attention, decode", "wait for copies removed", 1),
    ("paged attention, decode", "one group of copies more left running", 0), ("writing", "mask removed", 0),
    ("log-probabilities", "barrier removed", 0),
]  # fmt: skip
MORE = [
    ("paged attention, prefill", "fence of the asynchronous proxy removed", 1),
    ("paged attention, prefill", "one group of products left running", 0),
    ("paged attention, prefill", "address of a load or store moved by a word", 0),
    ("grouped attention, key", "barrier removed", 2), ("grouped attention, key", "wait for copies removed", 1),
    ("sampling", "barrier removed", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "kind", "number"), [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]
)
def test_a_planted_fault_is_noticed(case, kind, number):
    noticed, places = attempt(case, kind, number, 90)
    assert number < places and noticed != "nothing"
