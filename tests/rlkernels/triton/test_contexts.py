"""The Triton launchers state the dtype and the device of all that they allocate."""

import op_calls
import pytest
import torch
from op_calls import CONTEXTS
from support import assert_equal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from bench._calls import inputs
from rlkernels.registry import OPS


@pytest.mark.parametrize("op", [op for op in inputs() if OPS[op].triton])
def test_launchers_depend_on_no_default(op):
    kwargs = inputs()[op]
    expected = op_calls.run(op, kwargs, "triton")
    for name in ("default device", "default torch.float64", "default torch.float16"):
        with CONTEXTS[name]():
            result = op_calls.run(op, kwargs, "triton")
        assert_equal(result, expected, equal_nan=True)


@pytest.mark.parametrize("op", ["token_logprobs", "merge_attention", "write_kv", "paged_attention", "delta_matvec"])
def test_launchers_see_no_negation_that_is_pending(op):
    kwargs = inputs()[op]
    floats = {name: t for name, t in kwargs.items() if isinstance(t, torch.Tensor) and t.dtype.is_floating_point}
    pending = {name: torch._neg_view(-t) for name, t in floats.items()}
    expected = op_calls.run(op, kwargs, "triton")
    assert_equal(op_calls.run(op, kwargs | pending, "triton"), expected)


def test_keys_are_written_from_their_own_cache():
    op_calls.check_write_from_itself("triton")


def run_on_fakes(op, **changes):
    kwargs = inputs()[op] | changes
    with FakeTensorMode() as mode:
        return op_calls.run(
            op, tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, kwargs), "triton"
        )


@pytest.mark.parametrize(("op", "changes"), [
    ("token_logprobs", {}), ("linear_token_logprobs", {}), ("sample_tokens", {}), ("delta_matvec", {}),
    ("add_rank1_", {}), ("dtw", {}), ("dtw", {"mode": "subsequence", "band": None}), ("dtw_topk", {}),
    ("write_kv", {}),
])  # fmt: skip
def test_fake_tensors_give_shapes(op, changes):
    expected = op_calls.run(op, inputs()[op] | changes, "triton")
    assert [(t.shape, t.dtype) for t in run_on_fakes(op, **changes)] == [(t.shape, t.dtype) for t in expected]


@pytest.mark.parametrize("op", ["top1_delta", "top1_deltas"])
def test_what_needs_values_refuses_fake_tensors(op):
    with pytest.raises(TypeError, match=f"{op} needs the values of .*, got a fake tensor"):
        run_on_fakes(op)


def test_opcheck():
    check = torch.library.opcheck
    weight, u, v = torch.randn(5, 7), torch.randn(5), torch.randn(7)
    x, y, lengths = torch.randn(2, 5, 1), torch.randn(3, 6, 1), torch.tensor([5, 1, 4])
    ops = torch.ops.rlkernels
    check(ops.delta_matvec_triton.default, (weight, weight + 1, v))
    check(ops.add_rank1_triton_.default, (weight, u, v, 0.5, True, 3))
    for subsequence in (False, True):
        check(ops.dtw_triton.default, (x, y, lengths[:2], lengths, None if subsequence else 2, subsequence))
