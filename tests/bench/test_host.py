"""The benchmark of the host's time."""

import pytest

from bench import host
from bench._calls import inputs
from rlkernels.registry import OPS

WAITS = {"top1_delta", "top1_deltas"}  # the host waits for results on the way


def test_every_op_with_a_kernel_is_timed():
    assert {op for op in inputs() if OPS[op].cpu or OPS[op].triton} - WAITS == {*host.TIMED}


@pytest.mark.parametrize("op", ["keyed_uniform", "token_logprobs", "paged_attention"])
def test_rows(op):
    pytest.importorskip("triton")
    rows = host.rows(op, inputs()[op], "no gradient", turns=2)
    assert [row.provider for row in rows] == ["torch.add", "rlkernels, cpu", "rlkernels, triton"][: len(rows)]
    assert all(row.op == op and row.median_s > 0 and row.extra.endswith("x torch.add") for row in rows)
    assert len(rows) == 2 + OPS[op].triton


@pytest.mark.parametrize("with_drafts", [False, True])
def test_row_of_a_pass(with_drafts):
    (row,) = host.pass_rows("256 sequences", 6, with_drafts)
    assert row.op == "decode pass" and 0 < row.q20_s <= row.median_s <= row.q80_s
