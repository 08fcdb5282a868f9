"""Layouts of token sequences with common prefixes, packed into one row of tokens."""

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
        end: int64 [T], the place after the last token that continues this one.
        ids, places: see below.

    Attributes:
        position_ids, end: the arguments.
        ids: int64 [T], the tokens; None in a layout made of lengths.
        places: for each sequence, the places of its tokens, int64; empty in a layout made of lengths.
        nodes: int64 [N, 3], start, stop and end of each run of tokens without a fork, depth first.
        num_tokens: T.
        longest: tokens of the longest sequence.
        kernel_tables: what kernels need of this layout, made once for all layers, by kernel, sizes and device.
        attended: during a pass of a model of Transformers, whether a layer has attended by this layout; else None.

    All tensors are on the CPU. The constructor makes them, so torch.compile need not trace how.
    """

    def __init__(
        self,
        position_ids: torch.Tensor,
        end: torch.Tensor,
        ids: torch.Tensor | None = None,
        places: Sequence[torch.Tensor] = (),
    ):
        self.position_ids = position_ids
        self.end = end
        self.ids = ids
        self.places = list(places)
        self.num_tokens = len(end)
        self.longest = int(position_ids.max()) + 1 if len(end) else 0
        # a token and its only continuation have the same end
        starts = torch.cat([end[:1] * 0, (end[1:] != end[:-1]).nonzero().flatten() + 1])
        stops = torch.cat([starts[1:], end.new_tensor([len(end)])])[: len(starts)]
        self.nodes = torch.stack([starts, stops, end[starts]], 1)
        self.kernel_tables: dict[tuple[Any, ...], Any] = {}
        self.attended: bool | None = None

    @staticmethod
    def from_sequences(sequences: Iterable[TokenIds]) -> "TreeLayout":
        """Pack the trie of token sequences: each common prefix is in the batch once.

        Args:
            sequences: lists, arrays or tensors of token ids, in any order; they may be empty, equal, or prefixes of
                others.

        Raises:
            TypeError, ValueError: a sequence that is not a row of integers.
        """
        rows = [token_ids(f"sequences[{i}]", sequence) for i, sequence in enumerate(sequences)]
        order, shared = sort_by_tokens(rows)
        lens = np.array([len(row) for row in rows], dtype=np.int64)
        starts = lens.cumsum() - lens
        total = int(lens.sum())
        numbers = np.arange(total)
        flat_places = np.empty(total, dtype=np.int64)
        ends = np.empty(total, dtype=np.int64)
        places = [flat_places[start:stop] for start, stop in zip(starts.tolist(), (starts + lens).tolist())]
        path = flat_places[:0]  # places of the sequence before
        size = 0
        for i, common in zip(order, shared):
            ends[path[common:]] = size
            place = places[i]
            added = len(place) - common
            place[:common] = path[:common]
            place[common:] = numbers[size : size + added]
            path = place
            size += added
        ends[path] = size
        ids = np.empty(size, dtype=np.int64)
        depths = np.empty(size, dtype=np.int64)
        if rows:
            ids[flat_places] = np.concatenate(rows)
        depths[flat_places] = numbers - starts.repeat(lens)
        return TreeLayout(
            torch.from_numpy(depths),
            torch.from_numpy(ends[:size]),
            torch.from_numpy(ids),
            [torch.from_numpy(place) for place in places],
        )

    def parents(self) -> list[int]:
        """Return the parent of each node, -1 without one."""
        parents: list[int] = []
        ancestors: list[tuple[int, int]] = []  # end and number of each
        for node, (start, _, end) in enumerate(self.nodes.tolist()):
            while ancestors and ancestors[-1][0] <= start:
                ancestors.pop()
            parents.append(ancestors[-1][1] if ancestors else -1)
            ancestors.append((end, node))
        return parents

    def paths(self) -> list[list[slice]]:
        """Return for each node the runs of tokens on the path to it, in order."""
        paths: list[list[slice]] = []
        extended: list[list[slice]] = []  # each path with the node's own tokens
        for (start, stop, _), parent in zip(self.nodes.tolist(), self.parents()):
            path = extended[parent] if parent >= 0 else []
            paths.append(path)
            if path and path[-1].stop == start:  # the node continues the last run
                extended.append([*path[:-1], slice(path[-1].start, stop)])
            else:
                extended.append([*path, slice(start, stop)])
        return paths

    def seen_by_nodes(self, window: int | None = None) -> list[list[slice]]:
        """Return for each node the runs of tokens that its queries attend to, in order: the path and the node.

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
        starts = self.group_starts
        groups = len(self.prefix_lens)
        suffixes = len(self.suffix_lens)
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
        # prefixes and suffixes, sorted by place below; those without tokens vanish
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
        """Pack token sequences; those with the same first ``prefix_lens[i]`` tokens share them.

        A sequence may be shorter than ``prefix_lens[i]``: then it is its whole prefix, and has no suffix.

        Raises:
            TypeError, ValueError: a sequence that is not a row of integers, or another number of lengths.
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
        for members, (prefix, suffix_spans) in zip(groups.values(), layout.spans()):
            for i, suffix in zip(members, suffix_spans):
                places[i] = torch.cat([numbers[prefix], numbers[suffix]])
                layout.ids[places[i]] = torch.from_numpy(rows[i])
        layout.places = [places[i] for i in range(len(rows))]
        return layout

    def spans(self) -> list[tuple[slice, list[slice]]]:
        """Return for each group the tokens of its prefix and of each of its suffixes."""
        prefixes = [slice(s, s + n) for s, n in zip(self.prefix_starts.tolist(), self.prefix_lens.tolist())]
        suffixes = [slice(s, s + n) for s, n in zip(self.suffix_starts.tolist(), self.suffix_lens.tolist())]
        starts = self.group_starts.tolist()
        return [(prefix, suffixes[a:b]) for prefix, a, b in zip(prefixes, starts, starts[1:])]

    def __repr__(self) -> str:
        return (
            f"GroupedLayout(groups={len(self.prefix_lens)}, suffixes={len(self.suffix_lens)}, tokens={self.num_tokens})"
        )


def sort_by_tokens(rows: Sequence[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return the order of int64 token sequences by their tokens, and each one's common prefix with the one before.

    In this order neighbours need the sum of (length - common prefix) tokens, the first one all of its tokens.
    """
    keys = [row.astype(">i8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared: list[int] = []
    previous = np.empty(0, dtype=np.int64)
    for i in order:
        shared.append(common_tokens(rows[i], previous))
        previous = rows[i]
    return order, shared


def common_tokens(row: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the longest common prefix."""
    shorter = min(len(row), len(other))
    differs = row[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def token_ids(name: str, value: TokenIds) -> np.ndarray:
    """Check a token sequence, and return it as int64 [L]."""
    try:
        ids = np.asarray(value.numpy(force=True) if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError):  # a dtype that NumPy lacks, lists of several lengths
        ids = np.empty(0, dtype=object)
    if ids.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got shape {ids.shape}")
    if ids.dtype.kind not in "iu" and (len(ids) or ids.dtype == object):
        raise TypeError(f"{name} must hold integers, got {reprlib.repr(value)}")
    return np.ascontiguousarray(ids, dtype=np.int64)


def _last_tokens(runs: Sequence[slice], count: int) -> list[slice]:
    """Return the last ``count`` tokens of runs of tokens, in order."""
    last: list[slice] = []
    for run in reversed(runs):
        if count > 0:
            last.append(slice(max(run.start, run.stop - count), run.stop))
        count -= run.stop - run.start
    return last[::-1]


def _lengths(name: str, value: Lengths) -> torch.Tensor:
    try:
        out = torch.as_tensor(value, device="cpu").clone()  # later changes of the argument do not reach the layout
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a list or a tensor of integers, got {reprlib.repr(value)}") from None
    if out.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got shape {tuple(out.shape)}")
    if out.numel() and (out.dtype.is_floating_point or out.dtype.is_complex or out.dtype == torch.bool):
        raise TypeError(f"{name} must hold integers, got {out.dtype}")
    out = out.to(torch.int64)  # narrower integers do not hold the bound
    if (out < 0).any() or (out >= 2**31).any():
        raise ValueError(f"{name} must be between 0 and 2**31 - 1, got {out.tolist()}")
    return out
