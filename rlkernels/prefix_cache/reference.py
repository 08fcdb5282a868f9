"""Attention over paged keys and values in plain torch: the single source of truth for tests and benchmarks.

Arithmetic is float32, or float64 when the query is float64. Loops over sequences; written to be read. A GPU runs it if
no kernel is proven there, so it holds no more than ``MAX_SCORES`` scores at a time.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rlkernels._precision import without_autocast
from rlkernels.backend import may_share
from rlkernels.prefix_cache.layout import TreeLayout

MAX_SCORES = 1 << 26  # scores of all heads


def apart(key: torch.Tensor, value: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy keys and values that share memory with the caches to which they are written."""
    if may_share(key, *caches) or may_share(value, *caches):
        return key.clone(), value.clone()
    return key, value


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """See :func:`rlkernels.write_kv`; a negative slot counts from the end of the cache.

    On a GPU nothing checks slots before; only the Triton kernel skips those outside the cache. Skipping them here would
    take 16 launches instead of 4, in every layer.
    """
    key, value = apart(key, value, key_cache, value_cache)
    block = slots // key_cache.shape[1]
    offset = slots % key_cache.shape[1]
    key_cache[block, offset] = key.to(key_cache.dtype)
    value_cache[block, offset] = value.to(value_cache.dtype)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causally: bool,
    window: int | None = None, softcap: float | None = None, recompute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute softmax attention of query [q, Hq, d] over key, value [k, Hk, d] -> out [q, Hq, d], lse [q, Hq].

    ``causally``: with the mask of :func:`causal`, else all queries see all keys; a query without keys gives 0 and -inf.
    ``recompute``: compute scores again for the gradient instead of storing them.
    """
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads_per_kv = query.shape[1] // key.shape[1]
    key, value = (t.to(exact).repeat_interleave(heads_per_kv, 1) for t in (key, value))
    queries, keys = len(query), len(key)
    step = max(MAX_SCORES // max(query.shape[1] * keys, 1), 1)
    attend_part: Any = _attend
    if recompute:
        attend_part = functools.partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for first in range(0, max(queries, 1), step):
        piece = query[first : first + step].to(exact)
        make_mask = functools.partial(causal, queries, keys, query.device, first, first + len(piece), window)
        out, lse = attend_part(piece, key, value, scale, make_mask if causally else None, softcap)
        outs.append(out)
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
    make_mask: Callable[[], torch.Tensor] | None, softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend with the same number of heads in all inputs; the mask [q, k] is True where a query sees a key."""
    with without_autocast(query.device):
        score = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        score = softcap * (score / softcap).tanh()
    if make_mask is not None:
        score = score.masked_fill(~make_mask(), -torch.inf)
    lse = score.logsumexp(-1)  # [Hq, q]
    lse = lse.masked_fill(lse == torch.inf, torch.nan)  # the output is inf / inf there
    weight = (score - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    with without_autocast(query.device):
        return torch.einsum("hqk,khd->qhd", weight, value), lse.T


def gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first ``length`` entries of the sequence with this block table, [length, Hk, d]."""
    blocks = -(-length // cache.shape[1])
    return cache[table[:blocks].long()].flatten(0, 1)[:length]


def causal(
    queries: int, keys: int, device: torch.device, first: int = 0, end: int | None = None, window: int | None = None
) -> torch.Tensor:
    """Return the mask [rows ``first:end``, keys], True where a query sees a key; the last query is at the last key."""
    rows = torch.arange(first, queries if end is None else end, device=device)
    place = rows[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)
    return key <= place if window is None else (key <= place) & (key > place - window)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`rlkernels.paged_attention`; always returns (out, lse)."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
    if query.dtype == torch.float64:
        lse = lse.double()
    starts = query_starts.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        key, value = (gather(cache, block_tables[i], length) for cache in (key_cache, value_cache))
        result, lse[rows] = attend(query[rows], key, value, scale, True, window, softcap)
        out[rows] = result.to(query.dtype)
    return out, lse


def shared_prefix_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    group_tables: torch.Tensor,
    group_lens: torch.Tensor,
    group_starts: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`rlkernels.shared_prefix_attention`; always returns (out, lse)."""
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    suffix_out, suffix_lse = paged_attention(
        query.to(exact), key_cache, value_cache, block_tables, seq_lens, query_starts, scale
    )
    prefix_out = torch.zeros_like(suffix_out)
    prefix_lse = torch.full_like(suffix_lse, -torch.inf)
    members = group_starts.tolist()
    starts = query_starts.tolist()
    for g, length in enumerate(group_lens.tolist()):
        rows = slice(starts[members[g]], starts[members[g + 1]])
        key, value = (gather(cache, group_tables[g], length) for cache in (key_cache, value_cache))
        prefix_out[rows], prefix_lse[rows] = attend(query[rows].to(exact), key, value, scale, causally=False)
    out, lse = merge_attention(prefix_out, prefix_lse, suffix_out, suffix_lse)
    return out.to(query.dtype), lse


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`rlkernels.merge_attention`."""
    exact = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    lse = torch.logaddexp(lse_a.to(exact), lse_b.to(exact))
    lse = lse.masked_fill(lse == torch.inf, torch.nan)  # no softmax has such a denominator
    finite = lse.masked_fill(lse == -torch.inf, 0)

    def weighted(side_out: torch.Tensor, side_lse: torch.Tensor) -> torch.Tensor:
        product = (side_lse - finite).exp()[..., None] * side_out.to(exact)
        return product.masked_fill(side_lse[..., None] == -torch.inf, 0)  # without keys any output counts as 0

    return (weighted(out_a, lse_a) + weighted(out_b, lse_b)).to(out_a.dtype), lse


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, scale: float,
    window: int | None = None, softcap: float | None = None, recompute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See :func:`rlkernels.tree_attention`; torch's autograd differentiates it.

    ``recompute``: as for :func:`attend`; without it all scores are stored for the gradient.
    """
    nodes = _by_nodes(query, key, value, layout, window)
    results = [attend(*node, scale, True, window, softcap, recompute) for node in nodes]
    out = torch.cat([node_out for node_out, _ in results])
    lse = torch.cat([node_lse for _, node_lse in results])
    return out.to(query.dtype), lse


def tree_attention_by_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, scale: float,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute the output by torch's kernels, which on a GPU store scores in float64 only, and never for the gradient.

    A node with more keys than queries gets queries of zeros in front, whose results are dropped. ``is_causal`` then
    replaces a mask; only a window needs one.
    """
    heads_per_kv = query.shape[1] // key.shape[1]
    outs: list[torch.Tensor] = []
    for q, k, v in _by_nodes(query, key, value, layout, window):
        padding = 0 if window is not None else len(k) - len(q)
        mask = None if window is None else causal(len(q), len(k), q.device, window=window)
        k = k.repeat_interleave(heads_per_kv, 1)
        v = v.repeat_interleave(heads_per_kv, 1)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        with without_autocast(q.device):
            out = scaled_dot_product_attention(
                pad(q, (0, 0, padding, 0)), k, v, attn_mask=mask, is_causal=mask is None, scale=scale
            )
        outs.append(out[0, :, padding:].transpose(0, 1))
    return torch.cat(outs)


def _by_nodes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, window: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield for each node its queries, and the keys and values that any of them sees; at least once."""
    for runs in layout.seen_by_nodes(window) or [[slice(0, 0)]]:
        node = runs[-1]
        yield query[node], torch.cat([key[run] for run in runs]), torch.cat([value[run] for run in runs])
