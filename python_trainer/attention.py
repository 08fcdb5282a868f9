"""Attention of packed groups under any Transformers model: ``AttentionInterface`` with the layout as an argument."""

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

import rlkernels.backend
from python_trainer.errors import UserError
from rlkernels import grouped_attention
from rlkernels.prefix_cache import GroupedLayout

IMPLEMENTATION = "rlkernels_grouped"
# arguments of attention functions that change the result and that grouped attention does not know
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias")


class PackedLayout(GroupedLayout):
    """A layout that also knows its sequences as padded rows, for :func:`padded_attention`.

    One row per prefix and one per suffix, which also sees the keys of its prefix. R rows, at most Q queries and K
    keys each.
    """

    def to(self, device: torch.device) -> "PackedLayout":
        """Builds the index tensors on a device; the layout itself stays where it is."""
        own_lens = torch.cat([self.prefix_lens, self.suffix_lens])
        own_starts = torch.cat([self.prefix_starts, self.suffix_starts])
        before_lens = torch.cat([torch.zeros_like(self.prefix_lens), self.prefix_lens[self.suffix_groups]])
        before_starts = torch.cat([self.prefix_starts, self.prefix_starts[self.suffix_groups]])
        q = torch.arange(int(own_lens.max()) if len(own_lens) else 0)
        k = torch.arange(int((before_lens + own_lens).max()) if len(own_lens) else 0)
        has_query = q < own_lens[:, None]  # [R, Q]
        has_key = k < (before_lens + own_lens)[:, None]  # [R, K]
        query_index = torch.where(has_query, own_starts[:, None] + q, 0)
        own_key = own_starts[:, None] + k - before_lens[:, None]
        key_index = torch.where(k < before_lens[:, None], before_starts[:, None] + k, own_key)
        visible = k <= (before_lens[:, None] + q)[..., None]  # [R, Q, K]
        row_of = torch.empty(self.num_tokens, dtype=torch.int64)
        row_of[query_index[has_query]] = torch.arange(has_query.numel()).view_as(has_query)[has_query]
        self.query_index = query_index.to(device)
        self.key_index = torch.where(has_key, key_index, 0).to(device)
        self.bias = torch.where(visible, 0.0, -torch.inf).to(device)
        self.row_of = row_of.to(device)  # [T] place of each token among the R x Q queries
        return self


def padded_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout,
                     scale: float) -> torch.Tensor:  # fmt: skip
    """What :func:`rlkernels.grouped_attention` computes, as batched matrix products over padded rows.

    For devices on which that op has no kernel of its own and would loop over sequences.
    """
    (rows, width), heads, dim = layout.query_index.shape, key.shape[1], query.shape[2]
    per_head = query.shape[1] // heads
    q = functional.embedding(layout.query_index, (query * scale).flatten(1)).view(rows, width, heads, per_head, dim)
    k = functional.embedding(layout.key_index, key.flatten(1)).view(rows, -1, heads, dim)
    v = functional.embedding(layout.key_index, value.flatten(1)).view(rows, -1, heads, dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(rows, heads, per_head * width, dim)
    score = q @ k.permute(0, 2, 3, 1)  # [R, Hk, g Q, K]
    score = score.view(rows, heads, per_head, width, -1) + layout.bias[:, None, None].to(score.dtype)
    weight = score.softmax(-1, dtype=torch.float32).to(value.dtype)
    out = weight.view(rows, heads, per_head * width, -1) @ v.transpose(1, 2)  # [R, Hk, g Q, d]
    out = out.view(rows, heads, per_head, width, dim).permute(0, 3, 1, 2, 4).reshape(rows * width, -1)
    return functional.embedding(layout.row_of, out).view_as(query)


def _attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, scaling: float | None = None, *, layout: PackedLayout,
               sliding_window: int | None = None, **kwargs: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The attention function that Transformers calls: [1, H, T, d] each -> [1, T, Hq, d]."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(f"cannot train {type(module).__name__} on packed groups: its attention uses {name}")
    if sliding_window is not None and int(layout.position_ids.max()) >= sliding_window:
        raise UserError(
            f"cannot train {type(module).__name__} on answers beyond its sliding window of {sliding_window} tokens"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if rlkernels.backend.choose("grouped_attention", query.device) == "torch":
        return padded_attention(query, key, value, layout, scale)[None], None
    return grouped_attention(query, key, value, layout, scale=scale)[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)
