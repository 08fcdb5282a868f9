"""How token sequences that begin alike are packed into one row of tokens."""

import itertools
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

Lengths = torch.Tensor | Sequence[int]
TokenIds = torch.Tensor | np.ndarray | Sequence[int]


class TreeLayout:
    """Tokens of a trie, packed depth first: query i sees key j where ``j <= i < end[j]``.

    Args:
        position_ids: int64 [T], the depth of each token.
        end: int64 [T], the place behind the last token that continues this one.
        ids, places: see below.

    Attributes:
        position_ids, end: as given.
        ids: int64 [T], the tokens; None in a layout made of lengths.
        places: for each sequence, the places of its tokens, int64; empty in a layout made of lengths.
        nodes: int64 [N, 3], start, stop and end of each stretch without a fork, depth first.
        num_tokens: T.
        longest: tokens of the longest sequence.
        tiles: what kernels have worked out for this layout and use in every layer, by sizes and device.

    All tensors are on the CPU. They are made at once, so that torch.compile finds tensors and need not look into them.
    """

    def __init__(
        self,
        position_ids: torch.Tensor,
        end: torch.Tensor,
        ids: torch.Tensor | None = None,
        places: Sequence[torch.Tensor] = (),
    ):
        self.position_ids, self.end, self.ids, self.places = position_ids, end, ids, list(places)
        self.num_tokens = len(end)
        self.longest = int(position_ids.max()) + 1 if len(end) else 0
        # the same end: a token and its only continuation
        starts = torch.cat([end[:1] * 0, (end[1:] != end[:-1]).nonzero().flatten() + 1])
        self.nodes = torch.stack(
            [starts, torch.cat([starts[1:], end.new_tensor([len(end)])])[: len(starts)], end[starts]], 1
        )
        self.tiles: dict[tuple[Any, ...], Any] = {}

    @staticmethod
    def from_sequences(sequences: Iterable[TokenIds]) -> "TreeLayout":
        """Pack the trie of token sequences: what several of them begin with is in the batch once.

        Args:
            sequences: lists, arrays or tensors of token ids, in any order; they may be empty, equal, or begin others.

        Raises:
            TypeError, ValueError: a sequence that is not a row of integers.
        """
        rows = [token_ids(f"sequences[{i}]", sequence) for i, sequence in enumerate(sequences)]
        order, shared = sort_by_tokens(rows)
        lens = np.array([len(row) for row in rows], dtype=np.int64)
        starts, total = lens.cumsum() - lens, int(lens.sum())
        numbers = np.arange(total)
        flat, ends = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
        places = [flat[a:b] for a, b in zip(starts.tolist(), (starts + lens).tolist())]
        path, size = flat[:0], 0
        for i, common in zip(order, shared):
            ends[path[common:]] = size
            place = places[i]
            place[:common] = path[:common]
            path, added = place, len(place) - common
            path[common:] = numbers[size : size + added]
            size += added
        ends[path] = size
        ids, depths = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
        if rows:
            ids[flat] = np.concatenate(rows)
        depths[flat] = numbers - starts.repeat(lens)
        position_ids, end, tokens = (torch.from_numpy(array) for array in (depths, ends[:size], ids))
        return TreeLayout(position_ids, end, tokens, [torch.from_numpy(place) for place in places])

    def paths(self) -> list[list[slice]]:
        """List for each node the stretches of tokens on the path to it, in order."""
        found = []
        open_nodes: list[tuple[int, list[slice]]] = []  # those on the path: end, stretches up to their own
        for start, stop, end in self.nodes.tolist():
            while open_nodes and open_nodes[-1][0] <= start:
                open_nodes.pop()
            path = open_nodes[-1][1] if open_nodes else []
            found.append(path)
            joined = bool(path) and path[-1].stop == start
            own = slice(path[-1].start if joined else start, stop)
            open_nodes.append((end, [*path[: len(path) - joined], own]))
        return found

    def seen_by_nodes(self, window: int | None = None) -> list[list[slice]]:
        """List for each node the stretches of tokens that one of its queries sees, in order: the path and itself.

        Args:
            window: that of :func:`rlkernels.tree_attention`; it leaves at most ``window`` - 1 tokens of the path.
        """
        paths = self.paths() if window is None else [_last_tokens(path, window - 1) for path in self.paths()]
        return [[*path, slice(start, stop)] for (start, stop, _), path in zip(self.nodes.tolist(), paths)]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
               window: int | None, **options: Any) -> Any:  # fmt: skip
        """Attend as a layer of a model, see ``rlkernels.integrations.transformers_attention.Attention``."""
        from rlkernels.prefix_cache import tree_attention

        return tree_attention(query, key, value, self, scale=scale, window=window, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nodes={len(self.nodes)}, tokens={self.num_tokens})"


class GroupedLayout(TreeLayout):
    """A tree of two levels: per group [prefix | suffix 1 | suffix 2 | ...], groups one after the other.

    Args:
        prefix_lens: [G] tokens of each group's prefix; 0 is allowed.
        suffix_lens: [S] tokens of each suffix; 0 is allowed.
        group_starts: [G + 1]; group g has the suffixes ``group_starts[g]`` .. ``group_starts[g + 1] - 1``.

    Attributes:
        prefix_lens, suffix_lens, group_starts: int64, on the CPU.
        prefix_starts [G], suffix_starts [S]: first token of each part, int64, on the CPU.

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
        # parts in order of place; those without tokens are no matter
        place = torch.cat([self.prefix_starts, self.suffix_starts])
        lens = torch.cat([self.prefix_lens, self.suffix_lens])
        depth = torch.cat([torch.zeros_like(self.prefix_lens), self.prefix_lens.repeat_interleave(members)])
        group_ends = torch.cat([self.prefix_starts[1:], lens.sum()[None]])[:groups]
        end = torch.cat([group_ends, self.suffix_starts + self.suffix_lens])
        order = place.argsort()
        place, depth, end = (t[order].repeat_interleave(lens[order]) for t in (place, depth, end))
        super().__init__(torch.arange(len(place), device="cpu") - place + depth, end)

    @classmethod
    def from_sequences(  # type: ignore[override]
        cls, sequences: Iterable[TokenIds], prefix_lens: Sequence[int]
    ) -> "GroupedLayout":
        """Pack token sequences; those whose first ``prefix_lens[i]`` tokens are equal share these.

        A sequence may be shorter than its prefix: then it has no suffix, and shares its tokens if others begin with
        them and are as long.

        Raises:
            TypeError, ValueError: a sequence that is not a row of integers, or not one length for each.
        """
        rows = [token_ids(f"sequences[{i}]", sequence) for i, sequence in enumerate(sequences)]
        if len(prefix_lens) != len(rows):
            raise ValueError(
                f"prefix_lens must have {len(rows)} lengths, one for each sequence, got {len(prefix_lens)}"
            )
        groups: dict[bytes, list[int]] = {}
        for i, (row, length) in enumerate(zip(rows, prefix_lens)):
            groups.setdefault(row[:length].tobytes(), []).append(i)
        order = [i for members in groups.values() for i in members]
        shared = [min(prefix_lens[members[0]], len(rows[members[0]])) for members in groups.values()]
        suffixes = [len(rows[i]) - min(prefix_lens[i], len(rows[i])) for i in order]
        layout = cls(shared, suffixes, [0, *itertools.accumulate(map(len, groups.values()))])
        layout.ids = torch.empty(layout.num_tokens, dtype=torch.int64, device="cpu")
        places: dict[int, torch.Tensor] = {}
        numbers = torch.arange(layout.num_tokens, device="cpu")
        for members, (prefix, stretches) in zip(groups.values(), layout.spans()):
            for i, stretch in zip(members, stretches):
                places[i] = torch.cat([numbers[prefix], numbers[stretch]])
                layout.ids[places[i]] = torch.from_numpy(rows[i])
        layout.places = [places[i] for i in range(len(rows))]
        return layout

    def spans(self) -> list[tuple[slice, list[slice]]]:
        """List for each group the tokens of its prefix and of each of its suffixes."""
        prefixes = [slice(s, s + n) for s, n in zip(self.prefix_starts.tolist(), self.prefix_lens.tolist())]
        suffixes = [slice(s, s + n) for s, n in zip(self.suffix_starts.tolist(), self.suffix_lens.tolist())]
        starts = self.group_starts.tolist()
        return [(prefix, suffixes[a:b]) for prefix, a, b in zip(prefixes, starts, starts[1:])]

    def __repr__(self) -> str:
        return (
            f"GroupedLayout(groups={len(self.prefix_lens)}, suffixes={len(self.suffix_lens)}, tokens={self.num_tokens})"
        )


def sort_by_tokens(rows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return the order of int64 token sequences by their tokens, and how many each has in common with the one before.

    In this order a stretch of sequences takes the sum of (length - tokens in common) tokens, the first counted whole.
    """
    keys = [row.astype(">i8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared, before = [], np.empty(0, dtype=np.int64)
    for i in order:
        shared.append(common_tokens(rows[i], before))
        before = rows[i]
    return order, shared


def common_tokens(row: np.ndarray, other: np.ndarray) -> int:
    """Count the tokens that two sequences begin with."""
    most = min(len(row), len(other))
    differs = row[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most


def token_ids(name: str, value: TokenIds) -> np.ndarray:
    """Check a token sequence, and return it as int64 [L]."""
    try:
        ids = np.asarray(value.numpy(force=True) if isinstance(value, torch.Tensor) else value)
    except ValueError:  # lists of several lengths
        ids = np.empty(0, dtype=object)
    if ids.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got shape {ids.shape}")
    if ids.dtype.kind not in "iu" and (len(ids) or ids.dtype == object):
        raise TypeError(f"{name} must hold integers, got {reprlib.repr(value)}")
    return np.ascontiguousarray(ids, dtype=np.int64)


def _last_tokens(stretches: Sequence[slice], tokens: int) -> list[slice]:
    """Cut stretches to so many of their last tokens."""
    last = []
    for stretch in reversed(stretches):
        if tokens > 0:
            last.append(slice(max(stretch.start, stretch.stop - tokens), stretch.stop))
        tokens -= stretch.stop - stretch.start
    return last[::-1]


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
