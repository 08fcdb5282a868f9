"""Attention of many sequences at once over padded rows.

The stand-in of generation on devices where paged attention has no kernel of its own, and its reference would loop over
sequences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding, scaled_dot_product_attention

# elements of a piece's gathered keys and values, or of its mask: 1 GiB in float32, 512 MiB in bfloat16
LARGEST_PIECE = 1 << 28


@dataclass
class PaddedRows:
    """R sequences, of at most Q queries out of T and K keys out of N each.

    Keys are gathered, and no score is held where ``kernel`` holds none; sequences too many or too long for that are
    attended to in pieces.
    """

    query_index: torch.Tensor  # int64 [R, Q], any number where there is no query
    key_index: torch.Tensor  # int64 [R, K], of a key that is finite where there is none
    newest: torch.Tensor  # int64 [R, Q] place among a sequence's keys of the last one that a query sees
    row_of: torch.Tensor  # int64 [T] place of each query among the R x Q
    kernel: Callable[..., torch.Tensor] = scaled_dot_product_attention
    _bias: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)  # of one piece

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query [T, Hq, d], key and value [N, Hk, d] -> [T, Hq, d], differentiable."""
        (rows, width), (_, heads, dim) = self.query_index.shape, key.shape
        per_head = query.shape[1] // heads
        q = embedding(self.query_index, query.flatten(1)).view(rows, width, heads, per_head, dim)
        q = q.permute(0, 2, 3, 1, 4)  # [R, Hk, g, Q, d]
        out = joined([self._attend(q[piece], key, value, piece, scale) for piece in self._pieces(per_head, key)], 0)
        return embedding(self.row_of, out.flatten(0, 1).flatten(1)).view_as(query)

    def _attend(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: slice, scale: float
    ) -> torch.Tensor:
        """q [r, Hk, g, Q, d] of some sequences -> [r, Q, Hk, g, d]."""
        rows, heads, per_head, width, dim = q.shape
        index = self.key_index[piece]
        k, v = (embedding(index, x.flatten(1)).view(rows, -1, heads, dim).transpose(1, 2) for x in (key, value))
        most = max(1, LARGEST_PIECE // (rows * per_head * max(1, index.shape[1])))  # queries of a sequence
        found = []
        for first in range(0, width, most):
            part = q[:, :, :, first : first + most].flatten(2, 3)  # [r, Hk, g w, d]
            bias = self._bias_of(piece, first, first + most, per_head, q.dtype)  # [r, 1, g w, K]
            found.append(self.kernel(part, k, v, attn_mask=bias, scale=scale).unflatten(2, (per_head, -1)))
        return joined(found, 3).permute(0, 3, 1, 2, 4)

    def _pieces(self, per_head: int, key: torch.Tensor) -> Iterator[slice]:
        """Of the sequences."""
        (rows, width), keys = self.query_index.shape, max(1, self.key_index.shape[1])
        most = max(1, LARGEST_PIECE // (keys * max(per_head * width, 2 * key[0].numel())))
        return (slice(first, min(first + most, rows)) for first in range(0, max(1, rows), most))

    def _bias_of(self, piece: slice, first: int, last: int, per_head: int, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees a key, else -inf; where all is one piece, every layer has the same."""
        name = piece.start, first, per_head, dtype
        if name not in self._bias:
            self._bias.clear()
            places = torch.arange(self.key_index.shape[1], device=self.newest.device)
            seen = places <= self.newest[piece, first:last, None]  # [r, w, K]
            bias = torch.where(seen, 0.0, -torch.inf).to(dtype)
            self._bias[name] = bias[:, None].repeat(1, 1, per_head, 1)
        return self._bias[name]


def joined(pieces: list[torch.Tensor], dim: int) -> torch.Tensor:
    """One of them is not copied."""
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]
