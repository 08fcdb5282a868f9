"""Attention of packed groups as rows of queries and rows of keys, end to end: what FlashAttention kernels take.

A row is a prefix or a suffix. The queries lie as they are packed; the keys are gathered, so that a suffix has a copy of
those of its prefix before its own. Nothing is padded, and no mask is made: memory grows linearly with the tokens.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from rlkernels.prefix_cache import GroupedLayout

# windows of varlen_attn: everything before, where the last query stands at the last key; all keys
CAUSAL, WHOLE = (-1, 0), (-1, -1)
HALVES = (torch.bfloat16, torch.float16)  # what FlashAttention computes in
LARGEST_HEAD, HEAD_STEP = 256, 8  # and its largest head dimension, and what all have to be multiples of
OLDEST = (8, 0)  # and the compute capability that it needs


@dataclass(frozen=True)
class VarlenRows:
    """N rows of T queries and M gathered keys."""

    key_index: torch.Tensor  # int64 [M] token whose key stands there
    cu_seq_q: torch.Tensor  # int32 [N + 1] first query of each row
    cu_seq_k: torch.Tensor  # int32 [N + 1] first key of each row
    max_q: int
    max_k: int

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d], differentiable."""
        if not len(query):
            return query * 1
        key, value = (embedding(self.key_index, x.flatten(1)).unflatten(1, x.shape[1:]) for x in (key, value))
        rows = key, value, self.cu_seq_q, self.cu_seq_k, self.max_q, self.max_k
        return kernel_for(query)(query, *rows, scale=scale)


def varlen_rows(layout: GroupedLayout, device: torch.device) -> VarlenRows:
    """The layout's prefixes and suffixes as rows, in their order.

    The starts are where the kernel for ``device`` reads them: there on a GPU, else on the host.
    """
    # of each row: its own first token and their number, the same of the prefix before it
    spans: list[tuple[int, int, int, int]] = []
    for prefix, suffixes in layout.spans():
        shared = prefix.start, prefix.stop - prefix.start
        spans += [(*shared, prefix.start, 0), *((s.start, s.stop - s.start, *shared) for s in suffixes)]
    table = torch.tensor([span for span in spans if span[1]], dtype=torch.int64, device="cpu").view(-1, 4)
    lengths = table[:, 1] + table[:, 3]  # [N] keys of each row
    inside = torch.arange(int(lengths.sum()), device="cpu") - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    own_start, _, shared_start, shared_len = table.repeat_interleave(lengths, 0).unbind(1)  # [M]
    index = torch.where(inside < shared_len, shared_start + inside, own_start + inside - shared_len)
    home = device if device.type == "cuda" else torch.device("cpu")
    cu_seq_q, cu_seq_k = (pad(x.cumsum(0), (1, 0)).int().to(home) for x in (table[:, 1], lengths))
    max_q, max_k = (int(x.max()) if len(x) else 0 for x in (table[:, 1], lengths))
    return VarlenRows(index.to(device), cu_seq_q, cu_seq_k, max_q, max_k)


def kernel_for(query: torch.Tensor) -> Callable[..., torch.Tensor]:
    """varlen_attn of torch where it runs, else :func:`attend_rows`; both take the same."""
    if (
        query.is_cuda
        and suits_flash(query)
        and torch.cuda.get_device_capability(query.device) >= OLDEST
        and varlen_options() >= {"scale", "window_size"}
    ):
        return flash_rows
    return attend_rows


def suits_flash(query: torch.Tensor) -> bool:
    """Whether FlashAttention has kernels for such queries [T, Hq, d]."""
    return query.dtype in HALVES and query.shape[2] <= LARGEST_HEAD and query.shape[2] % HEAD_STEP == 0


@functools.cache
def varlen_options() -> set[str]:
    """Arguments of this torch's varlen_attn, which have changed from release to release."""
    return set(inspect.signature(varlen_attn).parameters)


def flash_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
) -> torch.Tensor:
    """varlen_attn; heads of keys are repeated where it cannot share them."""
    # a single query sees all keys anyway; without a window they are read once for the heads that share them, and in
    # pieces side by side, which the backward pass knows nothing of
    single = max_q == 1 and len(query) == len(cu_seq_q) - 1
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "window_size": WHOLE if single and not learns else CAUSAL}
    if "enable_gqa" in varlen_options():
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key, value = repeat_heads(query, key, value)
    out = varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
    assert isinstance(out, torch.Tensor)
    return out


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
) -> torch.Tensor:
    """What varlen_attn computes, by scaled_dot_product_attention of a row at a time, on any device and in any dtype.

    A row with more keys than queries gets queries of zeros in front, whose results go: so all that is said of who sees
    whom is ``is_causal``, for which there are kernels that hold neither a mask nor scores. The host reads ``cu_seq_q``
    and ``cu_seq_k``.
    """
    key, value = repeat_heads(query, key, value)
    starts_q, starts_k, out = cu_seq_q.tolist(), cu_seq_k.tolist(), []
    for row, first in enumerate(starts_q[:-1]):
        q = query[first : starts_q[row + 1]].transpose(0, 1)[None]  # [1, Hq, q, d]
        keys = slice(starts_k[row], starts_k[row + 1])
        k, v = (x[keys].transpose(0, 1)[None] for x in (key, value))
        given = k.shape[2] - q.shape[2]
        found = scaled_dot_product_attention(pad(q, (0, 0, given, 0)), k, v, is_causal=True, scale=scale)
        out.append(found[0, :, given:].transpose(0, 1))
    return torch.cat(out)


def repeat_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [M, Hq, d]: kernels that hold no scores may want as many heads of both."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
