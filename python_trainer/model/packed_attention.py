"""Attention of packed groups under any Transformers model: ``AttentionInterface`` with the layout as an argument."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

import rlkernels.backend
from python_trainer.errors import UserError
from rlkernels import grouped_attention
from rlkernels.prefix_cache import GroupedLayout
from rlkernels.prefix_cache.layout import Lengths

IMPLEMENTATION = "rlkernels_grouped"
# arguments of attention functions that change the result and that neither grouped nor paged attention knows
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias")


@dataclass
class PaddedRows:
    """The sequences of a layout as padded rows: one per prefix and one per suffix, which also sees the keys of its
    prefix. R rows, at most Q queries and K keys each."""

    query_index: torch.Tensor  # int64 [R, Q]
    key_index: torch.Tensor  # int64 [R, K]
    bias: torch.Tensor  # float32 [R, Q, K], 0 where a query sees a key, else -inf
    row_of: torch.Tensor  # int64 [T] place of each token among the R x Q queries

    @classmethod
    def of(cls, layout: GroupedLayout, device: torch.device) -> "PaddedRows":
        own_lens = torch.cat([layout.prefix_lens, layout.suffix_lens])
        own_starts = torch.cat([layout.prefix_starts, layout.suffix_starts])
        before_lens = torch.cat([torch.zeros_like(layout.prefix_lens), layout.prefix_lens[layout.suffix_groups]])
        before_starts = torch.cat([layout.prefix_starts, layout.prefix_starts[layout.suffix_groups]])
        q = torch.arange(int(own_lens.max()) if len(own_lens) else 0, device="cpu")
        k = torch.arange(int((before_lens + own_lens).max()) if len(own_lens) else 0, device="cpu")
        has_query = q < own_lens[:, None]  # [R, Q]
        has_key = k < (before_lens + own_lens)[:, None]  # [R, K]
        query_index = torch.where(has_query, own_starts[:, None] + q, 0)
        own_key = own_starts[:, None] + k - before_lens[:, None]
        key_index = torch.where(k < before_lens[:, None], before_starts[:, None] + k, own_key)
        visible = k <= (before_lens[:, None] + q)[..., None]  # [R, Q, K]
        row_of = torch.empty(layout.num_tokens, dtype=torch.int64, device="cpu")
        row_of[query_index[has_query]] = torch.arange(has_query.numel(), device="cpu").view_as(has_query)[has_query]
        tables = query_index, torch.where(has_key, key_index, 0), torch.where(visible, 0.0, -torch.inf), row_of
        return cls(*(table.to(device) for table in tables))


class PackedLayout(GroupedLayout):
    """A layout that answers what a decoder asks of attention while it trains on packed groups."""

    def __init__(self, prefix_lens: Lengths, suffix_lens: Lengths, group_starts: Lengths):
        super().__init__(prefix_lens, suffix_lens, group_starts)
        self._padded: dict[torch.device, PaddedRows] = {}

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:  # fmt: skip
        """query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d].

        Raises:
            UserError: sequences beyond a sliding window.
        """
        if window is not None and (longest := int(self.position_ids.max()) + 1) > window:
            raise UserError(
                f"prompt and answer must be within the model's sliding window of {window} tokens, got {longest}: "
                "rollout.max_completion_length must be lower"
            )
        if rlkernels.backend.choose("grouped_attention", query.device) == "torch":
            if query.device not in self._padded:  # the same for all layers
                self._padded[query.device] = PaddedRows.of(self, query.device)
            return padded_attention(query, key, value, self._padded[query.device], scale)
        return grouped_attention(query, key, value, self, scale=scale)


def padded_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padded: PaddedRows,
                     scale: float) -> torch.Tensor:  # fmt: skip
    """What :func:`rlkernels.grouped_attention` computes, as batched matrix products over padded rows.

    For devices on which that op has no kernel of its own and would loop over sequences.
    """
    (rows, width), heads, dim = padded.query_index.shape, key.shape[1], query.shape[2]
    per_head = query.shape[1] // heads
    q = functional.embedding(padded.query_index, (query * scale).flatten(1)).view(rows, width, heads, per_head, dim)
    k = functional.embedding(padded.key_index, key.flatten(1)).view(rows, -1, heads, dim)
    v = functional.embedding(padded.key_index, value.flatten(1)).view(rows, -1, heads, dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(rows, heads, per_head * width, dim)
    score = q @ k.permute(0, 2, 3, 1)  # [R, Hk, g Q, K]
    score = score.view(rows, heads, per_head, width, -1) + padded.bias[:, None, None].to(score.dtype)
    weight = score.softmax(-1, dtype=torch.float32).to(value.dtype)
    out = weight.view(rows, heads, per_head * width, -1) @ v.transpose(1, 2)  # [R, Hk, g Q, d]
    out = out.view(rows, heads, per_head, width, dim).permute(0, 3, 1, 2, 4).reshape(rows * width, -1)
    return functional.embedding(padded.row_of, out).view_as(query)


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, scaling: float | None = None, *, layout: PackedLayout,
               sliding_window: int | None = None, **kwargs: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The attention function that Transformers calls: [1, H, T, d] each -> [1, T, Hq, d]."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(f"cannot train {type(module).__name__} on packed groups: its attention uses {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return layout.attend(module.layer_idx, query, key, value, scale, sliding_window)[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)
