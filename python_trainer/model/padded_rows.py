"""Attention of many sequences as batched matrix products over padded rows.

The stand-in of generation on devices where paged attention has no kernel of its own, and its reference would loop over
sequences.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding


@dataclass
class PaddedRows:
    """R sequences, of at most Q queries out of T and K keys out of N each."""

    query_index: torch.Tensor  # int64 [R, Q], any number where there is no query
    key_index: torch.Tensor  # int64 [R, K], of a key that is finite where there is none
    bias: torch.Tensor  # float32 [R, Q, K], 0 where a query sees a key, else -inf
    row_of: torch.Tensor  # int64 [T] place of each query among the R x Q

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query [T, Hq, d], key and value [N, Hk, d] -> [T, Hq, d], differentiable."""
        (rows, width), heads, dim = self.query_index.shape, key.shape[1], query.shape[2]
        per_head = query.shape[1] // heads
        q = embedding(self.query_index, (query * scale).flatten(1)).view(rows, width, heads, per_head, dim)
        k = embedding(self.key_index, key.flatten(1)).view(rows, -1, heads, dim)
        v = embedding(self.key_index, value.flatten(1)).view(rows, -1, heads, dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, heads, per_head * width, dim)
        score = q @ k.permute(0, 2, 3, 1)  # [R, Hk, g Q, K]
        score = score.view(rows, heads, per_head, width, -1) + self.bias[:, None, None].to(score.dtype)
        weight = score.softmax(-1, dtype=torch.float32).to(value.dtype)
        out = weight.view(rows, heads, per_head * width, -1) @ v.transpose(1, 2)  # [R, Hk, g Q, d]
        out = out.view(rows, heads, per_head, width, dim).permute(0, 3, 1, 2, 4).reshape(rows * width, -1)
        return embedding(self.row_of, out).view_as(query)
