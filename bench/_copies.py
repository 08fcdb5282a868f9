"""Layouts of a batch that hold some of its tokens more than once, as rivals without tries need."""

from collections.abc import Sequence

import torch


class Copies:
    """Where the tokens of a batch lie in another layout.

    Args:
        places: int64 [...], the token at each place of the layout, -1 where it is padded; every token is there.
        num_tokens: of the batch.
        device: of the attributes.

    Attributes:
        at: ``places`` with 0 for padding.
        real: bool [...], False where the layout is padded.
        counts: bool [...], True for the first copy of each token.
    """

    def __init__(self, places: torch.Tensor, num_tokens: int, device: torch.device | str = "cpu"):
        self.num_tokens = num_tokens
        real = places >= 0
        at = places.clamp(min=0)
        order = torch.arange(places.numel()).view_as(places)
        first = torch.full((num_tokens,), places.numel()).scatter_reduce(0, at[real], order[real], "amin")
        self.at, self.real, self.counts = (t.to(device) for t in (at, real, real & (order == first[at])))

    def outputs(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return output and gradients of the layout [..., H, d] by token [T, H, d], gradients of copies added up."""
        out, *grads = results
        by_token = out.new_empty(self.num_tokens, *out.shape[-2:])
        by_token[self.at[self.counts]] = out[self.counts]
        sums = [g.new_zeros(self.num_tokens, *g.shape[-2:], dtype=torch.float32) for g in grads]
        return [by_token, *(s.index_add_(0, self.at[self.real], g[self.real].float()) for s, g in zip(sums, grads))]
