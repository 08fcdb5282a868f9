"""Attention over paged keys and values in plain torch: the single source of truth for tests and benchmarks.

Arithmetic is float32, or float64 when the query is float64. Loops over sequences; written to be read.
"""

import torch

from rlkernels._precision import without_autocast
from rlkernels.prefix_cache.layout import GroupedLayout


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """See :func:`rlkernels.write_kv`; a negative slot counts from the end of the cache.

    On a GPU, where slots are not looked at before, only the Triton kernel leaves out those outside the cache. To do so
    here would take 16 launches instead of 4, in every layer.
    """
    block, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[block, offset] = key.to(key_cache.dtype)
    value_cache[block, offset] = value.to(value_cache.dtype)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of query [q, Hq, d] over key, value [k, Hk, d] -> out [q, Hq, d], lse [q, Hq].

    mask [q, k] is True where a query may look; a query that may look nowhere gives 0 and -inf.
    """
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads_per_kv = query.shape[1] // key.shape[1]
    key, value = (t.to(exact).repeat_interleave(heads_per_kv, 1) for t in (key, value))
    with without_autocast(query.device):
        score = torch.einsum("qhd,khd->hqk", query.to(exact), key) * scale
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    lse = score.logsumexp(-1) if score.shape[-1] else score.new_full(score.shape[:2], -torch.inf)  # [Hq, q]
    lse = lse.masked_fill(lse == torch.inf, torch.nan)  # inf / inf, as of the output
    weight = (score - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    with without_autocast(query.device):
        return torch.einsum("hqk,khd->qhd", weight, value), lse.T


def gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` entries of the sequence with this block table, [length, Hk, d]."""
    blocks = -(-length // cache.shape[1])
    return cache[table[:blocks].long()].flatten(0, 1)[:length]


def causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[queries, keys], True where the query may look: the last query sits on the last key."""
    return torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None] + (keys - queries)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
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
        mask = causal(rows.stop - rows.start, length, query.device)
        result, lse[rows] = attend(query[rows], key, value, scale, mask)
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
    own, own_lse = paged_attention(query.to(exact), key_cache, value_cache, block_tables, seq_lens, query_starts, scale)
    out, lse = torch.zeros_like(own), torch.full_like(own_lse, -torch.inf)
    members, starts = group_starts.tolist(), query_starts.tolist()
    for g, length in enumerate(group_lens.tolist()):
        rows = slice(starts[members[g]], starts[members[g + 1]])
        key, value = (gather(cache, group_tables[g], length) for cache in (key_cache, value_cache))
        out[rows], lse[rows] = attend(query[rows].to(exact), key, value, scale, None)
    out, lse = merge_attention(out, lse, own, own_lse)
    return out.to(query.dtype), lse


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`rlkernels.merge_attention`."""
    exact = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    lse = torch.logaddexp(lse_a.to(exact), lse_b.to(exact))
    lse = lse.masked_fill(lse == torch.inf, torch.nan)  # no softmax has such a denominator
    finite = lse.masked_fill(lse == -torch.inf, 0)
    # a side that saw no key takes no part, whatever its output holds
    parts = [
        ((side_lse - finite).exp()[..., None] * side_out.to(exact)).masked_fill(side_lse[..., None] == -torch.inf, 0)
        for side_out, side_lse in ((out_a, lse_a), (out_b, lse_b))
    ]
    return (parts[0] + parts[1]).to(out_a.dtype), lse


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: GroupedLayout, scale: float
) -> torch.Tensor:
    """See :func:`rlkernels.grouped_attention`; torch's autograd differentiates it."""
    out = []
    for prefix, suffixes in layout.spans():
        key_prefix, value_prefix = key[prefix], value[prefix]
        for rows in [prefix, *suffixes]:
            beyond = [] if rows is prefix else [(key[rows], value[rows])]
            keys = torch.cat([key_prefix, *(k for k, _ in beyond)])
            values = torch.cat([value_prefix, *(v for _, v in beyond)])
            mask = causal(rows.stop - rows.start, len(keys), query.device)
            out.append(attend(query[rows], keys, values, scale, mask)[0].to(query.dtype))
    return torch.cat(out) if out else query * 1
