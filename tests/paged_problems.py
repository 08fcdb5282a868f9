"""Random paged problems, and the plain attention they must equal."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_as_plain, with_gradients
from torch.nn.utils.rnn import pad_sequence

import rlkernels
from rlkernels.prefix_cache import reference
from rlkernels.proof.cases.attention import Pages

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Problem:
    """Arguments of paged_attention, with NaN wherever nothing may be read."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    scale: float

    def args(self) -> tuple[torch.Tensor, ...]:
        return (self.query, *self.tables())

    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.key_cache, self.value_cache, self.block_tables, self.seq_lens, self.query_starts


def paged(lens, q_lens, *, heads=4, kv_heads=2, dim=32, block_size=4, dtype=torch.float32) -> Problem:
    blocks = sum(-(-n // block_size) for n in lens) + 3
    pages = Pages(blocks, block_size, kv_heads, dim, dtype, torch.empty(0).device)
    query, tables = torch.randn(sum(q_lens), heads, dim).to(dtype), pages.table(lens)
    starts = pages.ints([0, *itertools.accumulate(q_lens)])
    return Problem(query, *pages.finished(), tables, pages.ints(lens), starts, dim**-0.5)


def shared_prefix(groups, dtype, heads, kv_heads, dim, block_size=16):
    """(arguments of shared_prefix_attention, the same sequences as a float64 paged problem)."""
    prefix_lens = [p for p, _, _ in groups]
    own_lens = [n for _, lens, _ in groups for n in lens]
    queries = [q for _, _, qs in groups for q in qs]
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size, "dtype": dtype}
    problem = paged(prefix_lens + own_lens, [0] * len(prefix_lens) + queries, **sizes)
    count = len(groups)
    group_tables, own = problem.block_tables[:count], problem.block_tables[count:]
    starts = torch.tensor([0, *(len(lens) for _, lens, _ in groups)]).cumsum(0).int()
    group_lens, lens = problem.seq_lens[:count].clone(), problem.seq_lens[count:].clone()
    query_starts = problem.query_starts[count:].clone()
    caches = problem.key_cache, problem.value_cache
    shared = (problem.query, *caches, group_tables, group_lens, starts, own, lens, query_starts)

    # unshared, token by token in blocks of one, so that a prefix may end anywhere
    group_of = torch.arange(count).repeat_interleave(starts.diff().long())
    rows = []
    for b, g in enumerate(group_of.tolist()):
        parts = ((group_tables[g], int(group_lens[g])), (own[b], int(lens[b])))
        rows.append([int(t[i // block_size]) * block_size + i % block_size for t, n in parts for i in range(n)])
    tables = pad_sequence([torch.tensor(row, dtype=torch.int32) for row in rows], batch_first=True, padding_value=-1)
    total = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    single = [c.flatten(0, 1)[:, None] for c in caches]
    return shared, (problem.query, *single, tables, total, query_starts), problem.scale


def attend_in_their_dtype(query, key, value, scale, causally, window=None, softcap=None, recompute=False):
    """``reference.attend`` with every step rounded to the dtype of its inputs; the log-sum-exp in float32 at least."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (key, value))
    score = (query.transpose(0, 1) * scale) @ key.transpose(1, 2)
    score = score if softcap is None else (score / softcap).tanh() * softcap
    if causally:
        score = score.masked_fill(~reference.causal(*score.shape[1:], score.device, window=window), -torch.inf)
    lse = score.to(torch.promote_types(score.dtype, torch.float32)).logsumexp(-1)
    return (score.softmax(-1) @ value).transpose(0, 1), lse.T


def check_attention(op: str, arguments, scale: float, backend: str, floor: float = 2e-6, relative: float = 0.0,
                    **options: Any):  # fmt: skip
    """Judges "paged_attention" or "shared_prefix_attention" by its reference -> output and log-sum-exp."""
    ours = getattr(rlkernels, op)(*arguments, scale=scale, return_lse=True, backend=backend, **options)
    plain = getattr(reference, op)(*arguments, scale, **options)
    exact = getattr(reference, op)(*(t.double() for t in arguments[:3]), *arguments[3:], scale, **options)
    assert_as_plain(ours, plain, exact, floor, relative)
    return ours


def attend_by_mask(query, key, value, layout, scale, window=None, softcap=None):
    """Attention among packed tokens by a mask of all pairs, every step rounded to the dtype of the inputs."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (key, value))
    place = torch.arange(layout.num_tokens)
    seen = (place <= place[:, None]) & (place[:, None] < layout.end)
    if window is not None:
        seen &= layout.position_ids[:, None] - layout.position_ids < window
    score = (query.transpose(0, 1) * scale) @ key.transpose(1, 2)
    score = (score if softcap is None else (score / softcap).tanh() * softcap).masked_fill(~seen, -torch.inf)
    lse = score.to(torch.promote_types(score.dtype, torch.float32)).logsumexp(-1)
    return (score.softmax(-1) @ value).transpose(0, 1), lse.T


def check_tree(function: Callable[..., Any], layout: rlkernels.TreeLayout, heads: int, kv_heads: int, dim: int,
               dtype: torch.dtype, size: float = 1, **options: Any) -> list[torch.Tensor]:  # fmt: skip
    """Judges output, log-sum-exp and the gradients from both by the mask of all pairs -> them."""
    shapes = [(layout.num_tokens, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    *tensors, grad = (torch.randn(shape).to(dtype) for shape in shapes)
    grads, settings = (grad, torch.randn(shapes[0][:2])), {"layout": layout, "scale": size * dim**-0.5, **options}
    plain, exact = (
        with_gradients(partial(attend_by_mask, **settings), inputs, *grads)
        for inputs in (tensors, [t.double() for t in tensors])
    )
    ours = with_gradients(partial(function, **settings), tensors, *grads)
    # exp(score - lse) loses a few more bits than a softmax: allow for that relative to the largest element
    assert_as_plain(ours, plain, exact, floor=1e-6, relative=2e-6)
    return ours


def check_grouped(function: Callable[..., Any], layout: rlkernels.GroupedLayout, heads: int, kv_heads: int, dim: int,
                  dtype: torch.dtype, strides: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
                  **slack: float):  # fmt: skip
    """Judges output and gradients of grouped attention by its reference -> a function that computes them again, and
    what it gave."""
    shapes = [(layout.num_tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
    tensors, grad = [strides(torch.randn(shape).to(dtype)) for shape in shapes], torch.randn(shapes[0]).to(dtype)
    settings = {"layout": layout, "scale": dim**-0.5}
    again = partial(with_gradients, partial(function, **settings), tensors, grad)
    plain, exact = (
        with_gradients(lambda *qkv: reference.tree_attention(*qkv, **settings)[0], inputs, grad)
        for inputs in (tensors, [t.double() for t in tensors])
    )
    ours = again()
    # the backward pass starts from the rounded output, where plain torch keeps its weights
    rounding = {"floor": 0, "relative": 3e-6 if dtype == torch.float32 else torch.finfo(dtype).eps}
    assert_as_plain(ours, plain, exact, **slack or rounding)
    return again, ours


def check_grouped_without_tokens_or_gradients(backend: str) -> None:
    """Of nothing comes nothing; a gradient flows only where it is asked for."""
    layout = rlkernels.GroupedLayout([], [], [0])
    empty = torch.zeros(0, 2, 8, requires_grad=True)
    out = rlkernels.grouped_attention(empty, empty, empty, layout, scale=1.0, backend=backend)
    out.sum().backward()
    assert out.shape == (0, 2, 8) and empty.grad.shape == (0, 2, 8)
    query, key, value = torch.randn(3, 9, 2, 8)
    layout = rlkernels.GroupedLayout([4], [3, 2], [0, 2])
    attend = partial(rlkernels.grouped_attention, query, key, layout=layout, scale=0.5, backend=backend)
    assert not attend(value).requires_grad
    attend(value.requires_grad_()).sum().backward()
    assert value.grad is not None and query.grad is None


def check_merge(backend: str, tokens: int, heads: int, dim: int, dtype: torch.dtype, floor: float = 2e-6) -> None:
    """Of parts of which one, the other or neither saw a key; the outputs of those that saw none are NaN."""
    outs, lses = torch.randn(2, tokens, heads, dim).to(dtype), torch.randn(2, tokens, heads) * 20
    for side, rows in ((0, slice(1, None, 7)), (1, slice(1, None, 5))):  # token 1: neither
        outs[side, rows], lses[side, rows] = torch.nan, -torch.inf
    parts = outs[0], lses[0], outs[1], lses[1]
    ours = rlkernels.merge_attention(*parts, backend=backend)
    exact = reference.merge_attention(*(t.double() for t in parts))
    assert_as_plain(ours, reference.merge_attention(*parts), exact, floor)


def check_write_kv(backend: str, tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Rounded keys and values are written to their slots and nowhere else."""
    caches = torch.full((2, tokens, 4, 3, 20), torch.nan, dtype=cache_dtype)
    key, value = (torch.randn(2, tokens, 3, 40) * 3).to(dtype)[..., ::2]
    slots = torch.randperm(4 * tokens)[:tokens]
    rlkernels.write_kv(key[:0], value[:0], *caches, slots[:0], backend=backend)
    assert caches.isnan().all()
    rlkernels.write_kv(key, value, *caches, slots, backend=backend)
    flat = caches.flatten(1, 2)
    assert torch.equal(flat[0, slots], key.to(cache_dtype)) and torch.equal(flat[1, slots], value.to(cache_dtype))
    assert flat.isnan().sum() == 2 * 3 * tokens * 60
    again = torch.full_like(caches, torch.nan)
    rlkernels.write_kv(key.contiguous(), value.contiguous(), *again, slots, backend=backend)
    torch.testing.assert_close(again, caches, rtol=0, atol=0, equal_nan=True)


def check_change(backend: str) -> None:
    """What write_kv writes counts as a change."""
    caches = [torch.zeros(3, 4, 2, 32) for _ in range(2)]  # views of one tensor have one version
    new, slots = torch.randn(2, 1, 2, 32), torch.tensor([3])
    products = [torch.ones(32, requires_grad=True) * cache for cache in caches]
    rlkernels.write_kv(*new, *caches, slots, backend=backend)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
