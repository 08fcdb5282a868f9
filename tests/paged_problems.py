"""Random paged problems, and the plain attention they must equal."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_as_plain, with_gradients
from support import assert_equal
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
    num_blocks = sum(-(-n // block_size) for n in lens) + 3
    pages = Pages(num_blocks, block_size, kv_heads, dim, dtype, torch.empty(0).device)
    query = torch.randn(sum(q_lens), heads, dim).to(dtype)
    tables = pages.table(lens)
    starts = pages.ints([0, *itertools.accumulate(q_lens)])
    return Problem(query, *pages.finished(), tables, pages.ints(lens), starts, dim**-0.5)


def shared_prefix(groups, dtype, heads, kv_heads, dim, block_size=16):
    """Return arguments of shared_prefix_attention, those of paged_attention on the same sequences, and the scale."""
    prefix_lens = [prefix_len for prefix_len, _, _ in groups]
    suffix_lens = [suffix_len for _, lens, _ in groups for suffix_len in lens]
    q_lens = [q_len for _, _, lens in groups for q_len in lens]
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size, "dtype": dtype}
    problem = paged(prefix_lens + suffix_lens, [0] * len(prefix_lens) + q_lens, **sizes)
    num_groups = len(groups)
    group_tables, tables = problem.block_tables[:num_groups], problem.block_tables[num_groups:]
    starts = torch.tensor([0, *(len(lens) for _, lens, _ in groups)]).cumsum(0).int()
    group_lens, lens = problem.seq_lens[:num_groups].clone(), problem.seq_lens[num_groups:].clone()
    query_starts = problem.query_starts[num_groups:].clone()
    caches = problem.key_cache, problem.value_cache
    shared = (problem.query, *caches, group_tables, group_lens, starts, tables, lens, query_starts)

    # unshared, token by token in blocks of one, so that a prefix may end anywhere
    group_of = torch.arange(num_groups).repeat_interleave(starts.diff().long())
    slots = []
    for row, group in enumerate(group_of.tolist()):
        parts = ((group_tables[group], int(group_lens[group])), (tables[row], int(lens[row])))
        slots.append([int(t[i // block_size]) * block_size + i % block_size for t, n in parts for i in range(n)])
    slot_rows = [torch.tensor(row, dtype=torch.int32) for row in slots]
    slot_tables = pad_sequence(slot_rows, batch_first=True, padding_value=-1)
    total_lens = torch.tensor([len(row) for row in slots], dtype=torch.int32)
    slot_caches = [c.flatten(0, 1)[:, None] for c in caches]
    return shared, (problem.query, *slot_caches, slot_tables, total_lens, query_starts), problem.scale


def attend_where(visible, query, key, value, scale, softcap=None):
    """Attend to the visible pairs [Q, K], each step rounded to the inputs' dtype; log-sum-exp in float32 at least."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (key, value))
    score = (query.transpose(0, 1) * scale) @ key.transpose(1, 2)
    score = score if softcap is None else (score / softcap).tanh() * softcap
    score = score.masked_fill(~visible, -torch.inf)
    lse = score.to(torch.promote_types(score.dtype, torch.float32)).logsumexp(-1)
    return (score.softmax(-1) @ value).transpose(0, 1), lse.T


def attend_in_their_dtype(query, key, value, scale, causally, window=None, softcap=None, recompute=False):
    """Attend as ``reference.attend``, each step rounded to the inputs' dtype."""
    shape = len(query), len(key)
    if causally:
        visible = reference.causal(*shape, query.device, window=window)
    else:
        visible = torch.ones(shape, dtype=torch.bool, device=query.device)
    return attend_where(visible, query, key, value, scale, softcap)


def check_attention(op: str, arguments, scale: float, backend: str, floor: float = 2e-6, relative: float = 0.0,
                    **options: Any):  # fmt: skip
    """Judge "paged_attention" or "shared_prefix_attention" by its reference; return output and log-sum-exp."""
    results = getattr(rlkernels, op)(*arguments, scale=scale, return_lse=True, backend=backend, **options)
    plain = getattr(reference, op)(*arguments, scale, **options)
    exact = getattr(reference, op)(*(t.double() for t in arguments[:3]), *arguments[3:], scale, **options)
    assert_as_plain(results, plain, exact, floor, relative)
    return results


def visible_pairs(layout, window=None):
    """Return bool [T, T] on the CPU, as the layout: which query sees which key."""
    index = torch.arange(layout.num_tokens, device="cpu")
    visible = (index <= index[:, None]) & (index[:, None] < layout.end)
    if window is not None:
        visible &= layout.position_ids[:, None] - layout.position_ids < window
    return visible


def attend_by_mask(query, key, value, layout, scale, window=None, softcap=None):
    """Attend among packed tokens by a mask of all pairs, each step rounded to the inputs' dtype."""
    return attend_where(visible_pairs(layout, window).to(query.device), query, key, value, scale, softcap)


def check_tree(function: Callable[..., Any], layout: rlkernels.TreeLayout, heads: int, kv_heads: int, dim: int,
               dtype: torch.dtype, size: float = 1, runs: Iterable[Any] = (None,), **options: Any) -> None:  # fmt: skip
    """Judge output, log-sum-exp and the gradients from both, in each of ``runs``, by the mask of all pairs."""
    shapes = [(layout.num_tokens, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    torch.manual_seed(0)  # hypothesis runs an example again
    *tensors, grad = (torch.randn(shape).to(dtype) for shape in shapes)
    grads = grad, torch.randn(shapes[0][:2])
    settings = {"layout": layout, "scale": size * dim**-0.5, **options}
    plain, exact = (
        with_gradients(partial(attend_by_mask, **settings), inputs, *grads)
        for inputs in (tensors, [t.double() for t in tensors])
    )
    for _ in runs:
        results = with_gradients(partial(function, **settings), tensors, *grads)
        # exp(score - lse) loses a few more bits than a softmax: allow for that relative to the largest element
        assert_as_plain(results, plain, exact, floor=1e-6, relative=backward_rounding(dtype))


def backward_rounding(dtype: torch.dtype) -> float:
    """Return the relative slack of gradients: ours start from the rounded output, where plain torch keeps weights."""
    return 3e-6 if dtype == torch.float32 else torch.finfo(dtype).eps


def check_grouped(function: Callable[..., Any], layout: rlkernels.GroupedLayout, heads: int, kv_heads: int, dim: int,
                  dtype: torch.dtype, **slack: float):  # fmt: skip
    """Judge output and gradients of grouped attention by its reference; return what computes them, and them."""
    shapes = [(layout.num_tokens, h, dim) for h in (heads, kv_heads, kv_heads)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    grad = torch.randn(shapes[0]).to(dtype)
    settings = {"layout": layout, "scale": dim**-0.5}
    compute = partial(with_gradients, partial(function, **settings), tensors, grad)
    plain, exact = (
        with_gradients(lambda *qkv: reference.tree_attention(*qkv, **settings)[0], inputs, grad)
        for inputs in (tensors, [t.double() for t in tensors])
    )
    results = compute()
    assert_as_plain(results, plain, exact, **slack or {"floor": 0, "relative": backward_rounding(dtype)})
    return compute, results


def check_grouped_without_tokens_or_gradients(backend: str) -> None:
    """Check a layout without tokens, and that a gradient flows only to tensors that require it."""
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
    """Judge the merge of parts of which one, the other or neither saw a key; a part without keys is NaN."""
    outs, lses = torch.randn(2, tokens, heads, dim).to(dtype), torch.randn(2, tokens, heads) * 20
    for side, rows in ((0, slice(1, None, 7)), (1, slice(1, None, 5))):  # token 1: neither
        outs[side, rows] = torch.nan
        lses[side, rows] = -torch.inf
    parts = outs[0], lses[0], outs[1], lses[1]
    results = rlkernels.merge_attention(*parts, backend=backend)
    exact = reference.merge_attention(*(t.double() for t in parts))
    assert_as_plain(results, reference.merge_attention(*parts), exact, floor)


def check_write_kv(backend: str, tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Check that rounded keys and values are written to their slots and nowhere else."""
    caches = torch.full((2, tokens, 4, 3, 20), torch.nan, dtype=cache_dtype)
    key, value = (torch.randn(2, tokens, 3, 40) * 3).to(dtype)[..., ::2]
    slots = torch.randperm(4 * tokens)[:tokens]
    rlkernels.write_kv(key[:0], value[:0], *caches, slots[:0], backend=backend)
    assert caches.isnan().all()
    rlkernels.write_kv(key, value, *caches, slots, backend=backend)
    flat = caches.flatten(1, 2)
    assert torch.equal(flat[0, slots], key.to(cache_dtype)) and torch.equal(flat[1, slots], value.to(cache_dtype))
    assert flat.isnan().sum() == 2 * 3 * tokens * 60
    other_caches = torch.full_like(caches, torch.nan)
    rlkernels.write_kv(key.contiguous(), value.contiguous(), *other_caches, slots, backend=backend)
    assert_equal(other_caches, caches, equal_nan=True)


def check_change(backend: str) -> None:
    """Check that autograd sees what write_kv writes as a change."""
    caches = [torch.zeros(3, 4, 2, 32) for _ in range(2)]  # views of one tensor have one version
    key, value = torch.randn(2, 1, 2, 32)
    slots = torch.tensor([3])
    products = [torch.ones(32, requires_grad=True) * cache for cache in caches]
    rlkernels.write_kv(key, value, *caches, slots, backend=backend)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
