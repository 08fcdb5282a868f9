"""How groups of a shared prefix and several suffixes are packed into one row of tokens."""

import functools
import reprlib
from collections.abc import Sequence
from typing import Any

import torch

Lengths = torch.Tensor | Sequence[int]


class GroupedLayout:
    """Tokens packed per group as [prefix | suffix 1 | suffix 2 | ...], groups one after the other.

    Args:
        prefix_lens: [G] tokens of each group's prefix; 0 is allowed.
        suffix_lens: [S] tokens of each suffix; 0 is allowed.
        group_starts: [G + 1]; group g has the suffixes ``group_starts[g]`` .. ``group_starts[g + 1] - 1``.

    Attributes:
        prefix_lens, suffix_lens, group_starts: int64, on the CPU.
        prefix_starts [G], suffix_starts [S]: first token of each part, int64, on the CPU.
        num_tokens: T.
        paged: what :func:`shared_prefix_attention` takes after the caches, if every token is a block of its own; made
            at once, so that torch.compile finds tensors and need not look into them.
        tiles: what kernels have worked out for this layout and use in every layer, by sizes and device.

    Raises:
        ValueError: negative lengths, or ``group_starts`` that does not rise from 0 to S in G + 1 entries.
    """

    def __init__(self, prefix_lens: Lengths, suffix_lens: Lengths, group_starts: Lengths):
        self.prefix_lens = _lengths("prefix_lens", prefix_lens)
        self.suffix_lens = _lengths("suffix_lens", suffix_lens)
        self.group_starts = _lengths("group_starts", group_starts)
        starts, groups, suffixes = self.group_starts, len(self.prefix_lens), len(self.suffix_lens)
        if len(starts) != groups + 1 or starts[0] != 0 or starts[-1] != suffixes or (starts.diff() < 0).any():
            raise ValueError(
                f"group_starts must rise from 0 to {suffixes} (number of suffixes) in {groups + 1} entries "
                f"(number of prefixes + 1), got {starts.tolist()}"
            )
        members = starts.diff()
        before_suffix = self.suffix_lens.cumsum(0) - self.suffix_lens  # tokens of earlier suffixes
        before_prefix = self.prefix_lens.cumsum(0) - self.prefix_lens
        padded = torch.cat([before_suffix, self.suffix_lens.sum()[None]])
        self.prefix_starts = before_prefix + padded[starts[:-1]]
        self.suffix_starts = before_suffix + self.prefix_lens.cumsum(0).repeat_interleave(members)
        self.suffix_groups = torch.arange(groups, device="cpu").repeat_interleave(members)  # [S]
        self.num_tokens = int(self.prefix_lens.sum() + self.suffix_lens.sum())
        self.paged = self._as_pages()
        self.tiles: dict[tuple[Any, ...], Any] = {}

    def spans(self) -> list[tuple[slice, list[slice]]]:
        """List for each group the tokens of its prefix and of each of its suffixes."""
        prefixes = [slice(s, s + n) for s, n in zip(self.prefix_starts.tolist(), self.prefix_lens.tolist())]
        suffixes = [slice(s, s + n) for s, n in zip(self.suffix_starts.tolist(), self.suffix_lens.tolist())]
        starts = self.group_starts.tolist()
        return [(prefix, suffixes[a:b]) for prefix, a, b in zip(prefixes, starts, starts[1:])]

    @functools.cached_property
    def position_ids(self) -> torch.Tensor:
        """Return int64 [T]: the position of each token in its own sequence; every suffix continues its prefix."""
        lens = torch.cat([self.prefix_lens, self.suffix_lens])
        first = torch.cat([torch.zeros_like(self.prefix_lens), self.prefix_lens[self.suffix_groups]])
        starts = torch.cat([self.prefix_starts, self.suffix_starts])
        out = torch.empty(self.num_tokens, dtype=torch.int64, device="cpu")
        inside = torch.arange(self.num_tokens, device="cpu") - (lens.cumsum(0) - lens).repeat_interleave(lens)
        out[starts.repeat_interleave(lens) + inside] = first.repeat_interleave(lens) + inside
        return out

    def _as_pages(self) -> tuple[torch.Tensor, ...]:
        """Return two entries per group: the prefix as an unshared sequence, then the suffixes that share it."""
        groups, members = len(self.prefix_lens), self.group_starts.diff()
        order = torch.argsort(
            torch.cat([torch.arange(groups, device="cpu") * 2, self.suffix_groups * 2 + 1]), stable=True
        )
        starts = torch.cat([self.prefix_starts, self.suffix_starts])[order]
        lens = torch.cat([self.prefix_lens, self.suffix_lens])[order]
        shared = torch.stack([torch.zeros_like(self.prefix_lens), self.prefix_lens], 1).flatten()
        counts = torch.stack([torch.ones_like(members), members], 1).flatten()
        group_tables = self.prefix_starts.repeat_interleave(2)[:, None] + torch.arange(
            _longest(self.prefix_lens), device="cpu"
        )
        block_tables = starts[:, None] + torch.arange(_longest(lens), device="cpu")
        zero = torch.zeros(1, dtype=torch.int64, device="cpu")
        parts = (group_tables, shared, torch.cat([zero, counts.cumsum(0)]), block_tables, lens)
        return tuple(t.int() for t in (*parts, torch.cat([zero, lens.cumsum(0)])))

    def __repr__(self) -> str:
        return (
            f"GroupedLayout(groups={len(self.prefix_lens)}, suffixes={len(self.suffix_lens)}, tokens={self.num_tokens})"
        )


def _longest(lens: torch.Tensor) -> int:
    return int(lens.max()) if len(lens) else 0


def _lengths(name: str, value: Lengths) -> torch.Tensor:
    try:
        out = torch.as_tensor(value, device="cpu").clone()  # what is done to the given one is not done to the layout
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a list or a tensor of integers, got {reprlib.repr(value)}") from None
    if out.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got shape {tuple(out.shape)}")
    if out.numel() and (out.dtype.is_floating_point or out.dtype.is_complex or out.dtype == torch.bool):
        raise TypeError(f"{name} must hold integers, got {out.dtype}")
    if (out < 0).any() or (out >= 2**31).any():
        raise ValueError(f"{name} must be between 0 and 2**31 - 1, got {out.tolist()}")
    return out.to(torch.int64)
