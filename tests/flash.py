"""What FlashAttention of torch computes on rows of queries and keys, on a CPU, for which torch has no kernels."""

from collections.abc import Iterator
from typing import Any

import torch

from rlkernels.prefix_cache import reference


def parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts_q: Any, starts_k: Any) -> Iterator[Any]:
    for row in range(len(starts_q) - 1):
        q, k = (slice(int(s[row]), int(s[row + 1])) for s in (starts_q, starts_k))
        yield q, query[q], k, key[k], value[k]


def forward(query, key, value, starts_q, starts_k, max_q, max_k, dropout, causal, debug, *, scale):
    """``aten._flash_attention_forward``: a query without keys gives 0, and inf as its log-sum-exp."""
    assert not dropout and not debug and starts_q.dtype == starts_k.dtype == torch.int32
    assert int(starts_q.diff().max()) == max_q and int(starts_k.diff().max()) == max_k
    out, lse = torch.zeros_like(query), query.new_full((query.shape[1], len(query)), torch.inf, dtype=torch.float32)
    for rows, q, _, k, v in parts(query, key, value, starts_q, starts_k):
        if len(k):
            found, found_lse = reference.attend(q, k, v, scale, causal)
            out[rows], lse[:, rows] = found.to(query.dtype), found_lse.T
    return out, lse, torch.zeros(2), torch.zeros(()), torch.zeros(0)


def backward(grad, query, key, value, out, lse, starts_q, starts_k, max_q, max_k, dropout, causal, seed, unused, *,
             scale):  # fmt: skip
    """``aten._flash_attention_backward``, by its formulas: here torch records nothing that it could differentiate."""
    grads = [torch.zeros_like(t) for t in (query, key, value)]
    for rows, q, keys, k, v in parts(query, key, value, starts_q, starts_k):
        q, k, v, do, o = (t.float() for t in (q, k, v, grad[rows], out[rows]))
        times = q.shape[1] // max(k.shape[1], 1)
        k, v = (t.repeat_interleave(times, 1) for t in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) * scale
        if causal:
            score = score.masked_fill(~reference.causal(len(q), len(k), q.device), -torch.inf)
        weight = (score - lse[:, rows, None]).exp()
        slope = weight * (torch.einsum("qhd,khd->hqk", do, v) - (do * o).sum(-1).T[..., None]) * scale
        found = (
            torch.einsum("hqk,khd->qhd", slope, k),
            torch.einsum("hqk,qhd->khd", slope, q).unflatten(1, (-1, times)).sum(2),
            torch.einsum("hqk,qhd->khd", weight, do).unflatten(1, (-1, times)).sum(2),
        )
        for whole, place, part in zip(grads, (rows, keys, keys), found):
            whole[place] += part.to(whole.dtype)
    return tuple(grads)
