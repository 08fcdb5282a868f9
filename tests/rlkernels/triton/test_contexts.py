"""The Triton launchers state the dtype of all that they allocate."""

import op_calls
import pytest
import torch
from op_calls import CONTEXTS

from bench._calls import inputs
from rlkernels.registry import OPS


@pytest.mark.parametrize("op", [op for op in inputs() if OPS[op].triton])
def test_launchers_depend_on_no_default_dtype(op):
    kwargs = inputs()[op]
    expected = op_calls.run(op, kwargs, "triton")
    for name in ("default torch.float64", "default torch.float16"):
        with CONTEXTS[name]():
            result = op_calls.run(op, kwargs, "triton")
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", ["token_logprobs", "merge_attention", "write_kv", "paged_attention", "delta_matvec"])
def test_launchers_see_no_negation_that_is_pending(op):
    kwargs = inputs()[op]
    floats = {name: t for name, t in kwargs.items() if isinstance(t, torch.Tensor) and t.dtype.is_floating_point}
    pending = {name: torch._neg_view(-t) for name, t in floats.items()}
    expected = op_calls.run(op, kwargs, "triton")
    torch.testing.assert_close(op_calls.run(op, kwargs | pending, "triton"), expected, rtol=0, atol=0)


def test_keys_are_written_from_their_own_cache():
    op_calls.check_write_from_itself("triton")
