"""Grouped attention for training in Triton: through the interpreter here, compiled where there is a GPU."""

import pytest
import torch

import rlkernels
from rlkernels.prefix_cache import reference

pytest.importorskip("triton", reason="this machine lacks triton")
LAYOUTS = {
    "odd": ([5, 0, 3, 40], [2, 4, 1, 0, 6, 3, 37, 1], [0, 3, 5, 6, 8]),
    "no suffixes": ([35, 1], [], [0, 0, 0]),
    "no prefixes": ([0], [32, 31, 33], [0, 3]),
    "several tiles": ([80], [40, 33], [0, 2]),
}


def run(tensors, grad, function):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def check(layout, heads, kv_heads, dim, dtype):
    layout = rlkernels.GroupedLayout(*layout)
    shapes = [(layout.num_tokens, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    *tensors, grad = [torch.randn(s).to(dtype) for s in shapes]
    scale = dim**-0.5
    ours = run(
        tensors, grad, lambda q, k, v: rlkernels.grouped_attention(q, k, v, layout, scale=scale, backend="triton")
    )
    plain = run(tensors, grad, lambda *a: reference.grouped_attention(*a, layout, scale))
    exact = run([t.double() for t in tensors], grad, lambda *a: reference.grouped_attention(*a, layout, scale))
    for name, a, b, gold in zip(("out", "query", "key", "value"), ours, plain, exact):
        assert a.dtype == dtype and not a.isnan().any()
        error, allowed = ((x.double() - gold).abs().max() for x in (a, b))
        # the backward pass starts from the rounded output, where plain torch keeps its weights
        floor = 3e-6 * gold.abs().max() if dtype == torch.float32 else torch.finfo(dtype).eps * gold.abs().max()
        assert error <= 2 * allowed + floor, f"{name}: error {error:.3g}, of plain torch {allowed:.3g}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_reference(name):
    check(LAYOUTS[name], 2, 1, 40, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    check(LAYOUTS["odd"], 2, 1, 20, dtype)


@pytest.mark.parametrize("dim", [1, 80, 256])
def test_head_dims(dim):
    check(([17], [9, 20], [0, 2]), 2, 2, dim, torch.float32)


def test_nothing_and_no_gradient():
    empty = torch.zeros(0, 2, 8, requires_grad=True)
    layout = rlkernels.GroupedLayout([], [], [0])
    rlkernels.grouped_attention(empty, empty, empty, layout, scale=1.0, backend="triton").sum().backward()
    assert empty.grad.shape == (0, 2, 8)
    query, key, value = torch.randn(3, 9, 2, 8)
    layout = rlkernels.GroupedLayout([4], [3, 2], [0, 2])
    out = rlkernels.grouped_attention(query, key, value.requires_grad_(), layout, scale=0.5, backend="triton")
    out.sum().backward()
    assert value.grad is not None and query.grad is None
