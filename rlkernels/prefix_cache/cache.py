"""The paged key/value cache: tensors of blocks, and the sequences that use them."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain
from typing import Any

import numpy as np
import torch

from rlkernels import _check
from rlkernels import backend as _backend
from rlkernels.prefix_cache.block_pool import BlockPool, OutOfBlocks, compiled_pool, integers

__all__ = ["OutOfBlocks", "PagedKVCache", "Sequence"]

# Splitting a query's keys in two costs about as much as reading this many more keys
MIN_SHARED_TOKENS = 64


class Sequence:
    """Tokens and the blocks that hold their keys and values. Made by :class:`PagedKVCache`, valid until closed.

    The cache closes a sequence that nothing refers to any more.
    """

    __slots__ = ("_cache", "_handle")

    def __init__(self, cache: "PagedKVCache", handle: int):
        self._cache = cache
        self._handle = handle

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return self._cache._pool.length(self._cache._open_handle(self))

    @property
    def num_cached(self) -> int:
        """Return how many leading tokens were cached when the sequence was opened or forked."""
        return self._cache._pool.num_cached(self._cache._open_handle(self))

    @property
    def num_computed(self) -> int:
        """Return how many leading tokens are written: ``num_cached``, or all after a commit."""
        return self._cache._pool.computed(self._cache._open_handle(self))

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens, as a new list."""
        return self._cache._pool.token_ids(self._cache._open_handle(self))

    @property
    def slots(self) -> torch.Tensor:
        """Return the slots, int64, of tokens ``num_computed`` .. ``length`` for :func:`write_kv`."""
        return self._cache.slots([self])

    @property
    def block_table(self) -> torch.Tensor:
        """Return int32 [blocks]. ``append`` and ``commit`` may replace entries: read it again after them."""
        return self._cache.tables([self])[0][0]

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Sequence cannot be copied or pickled, its blocks would be let go twice: PagedKVCache.fork makes another"
        )

    def __del__(self) -> None:
        if self._handle >= 0:  # any thread may run this, within any call of the pool
            self._cache._dropped.append(self._handle)

    def __repr__(self) -> str:
        if self._handle < 0:
            return "Sequence(closed)"
        return f"Sequence(length={self.length}, num_cached={self.num_cached})"


class PagedKVCache:
    """Keys and values of many sequences in blocks of fixed size; equal prefixes are stored once.

    Open a sequence with its tokens, append to it, close it. ``commit`` declares its keys and values written: sequences
    that begin with the same tokens then share its full blocks, even after it is closed, until their space is needed.
    The cache evicts the least recently used block first, the tail of a sequence before its head, and never a block in
    use. ``advance_version`` makes all cached prefixes unreachable.

    A method without enough blocks raises :class:`OutOfBlocks`, and changes nothing.

    Args:
        num_layers, num_kv_heads, head_dim: of the model.
        num_blocks, memory_bytes: number of blocks, or the size of all keys and values; exactly one of them.
        block_size: tokens per block.
        dtype, device: of the keys and values.
        backend: "cpu" for compiled bookkeeping, "torch" for plain Python.

    Attributes:
        key_cache, value_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim], uninitialised.

    Raises:
        ValueError: a size below 1, not exactly one of ``num_blocks`` and ``memory_bytes``, or too little memory for
            one block.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, *, num_blocks: int | None = None,
                 memory_bytes: int | None = None, block_size: int = 16, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu", backend: str = "auto"):  # fmt: skip
        sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
        for name, size in sizes.items():
            _check.integer(name, size, 1, _check.MOST)
        _check.one_of("dtype", dtype, (torch.float32, torch.bfloat16, torch.float16, torch.float64))
        if (num_blocks is None) == (memory_bytes is None):
            raise ValueError(
                f"exactly one of num_blocks and memory_bytes must be given, got {num_blocks} and {memory_bytes}"
            )
        self.block_bytes = 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
        if num_blocks is None:
            num_blocks = _check.integer("memory_bytes", memory_bytes) // self.block_bytes
            if num_blocks < 1:
                raise ValueError(f"memory_bytes must be at least {self.block_bytes} (one block), got {memory_bytes}")
        num_blocks = _check.integer("num_blocks", num_blocks, 1, _check.MOST)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.key_cache = torch.empty(shape, dtype=dtype, device=device)
        self.value_cache = torch.empty(shape, dtype=dtype, device=device)
        native = _backend.choose("block_pool", torch.device("cpu"), backend) == "cpu"
        self._blocks: Any = (compiled_pool if native else BlockPool)(num_blocks, block_size)
        self._dropped: deque[int] = deque()  # handles of open sequences that nothing refers to
        if self.device.type == "cpu" and _backend.extension_error() is None:
            torch.ops.rlkernels.advise_huge_pages(self.key_cache)
            torch.ops.rlkernels.advise_huge_pages(self.value_cache)

    def open(self, token_ids: Seq[int]) -> Sequence:
        """Return a sequence that pins the longest cached prefix of ``token_ids`` and has blocks for the rest.

        The last token is never cached: only computing it gives its logits.
        """
        return self.open_many([token_ids])[0]

    def open_many(self, prompts: Seq[Seq[int]]) -> list[Sequence]:
        """Open several sequences, all or none. The first with a new common prefix computes it for the others.

        So compute the sequences in the order of ``prompts``, or in one forward pass in which every layer writes all
        keys and values before it attends.
        """
        return [Sequence(self, handle) for handle in _with_ids(self._pool.open_many, _lists("prompts", prompts))]

    def append(self, seq: Sequence, token_ids: Seq[int]) -> torch.Tensor:
        """Add tokens and return their slots, int64. Copies a last block that other sequences share."""
        return self.append_many([seq], [token_ids])

    def append_many(
        self, sequences: Seq[Sequence], token_ids: Seq[Any] | np.ndarray, counts: Seq[int] | np.ndarray | None = None
    ) -> torch.Tensor:
        """Add tokens to different sequences, all or none, and return all slots one after the other, int64.

        Args:
            token_ids: a list of tokens for each sequence; with ``counts``, integers [T], one sequence after the other.
            counts: integers [B], how many of the tokens each sequence gets.

        Raises:
            ValueError: a sequence is given twice, or the tokens are for another number of sequences.
        """
        handles = self._handles(sequences)
        if counts is None:
            lists = _lists("token_ids", token_ids)
            if len(handles) != len(lists):
                raise ValueError(f"token_ids must have one list per sequence ({len(handles)}), got {len(lists)}")
            counts = [*map(len, lists)]
            ids = [*chain.from_iterable(lists)]
        else:
            ids = _ids(token_ids)
            counts = np.asarray(counts)
            is_integer = counts.dtype.kind in "iu" or not counts.size
            fits = counts.shape == (len(handles),) and counts.min(initial=0) >= 0 and counts.sum() == len(ids)
            if not (is_integer and fits):
                raise ValueError(
                    f"counts must be {len(handles)} integers >= 0 that add up to {len(ids)} tokens, got {counts}"
                )
        if len(set(handles)) < len(handles):
            second = next(i for i, handle in enumerate(handles) if handle in handles[:i])
            first = handles.index(handles[second])
            raise ValueError(f"sequences must be different ones, got one of them twice, as number {first} and {second}")
        slots = torch.empty(len(ids), dtype=torch.int64, device=self.device)  # before anything changes
        copies = _with_ids(lambda lists: self._pool.append(handles, lists[0], counts), [ids])
        for source, target in copies:  # one by one: indexing several blocks would allocate memory
            for blocks in (self.key_cache, self.value_cache):
                blocks[:, target].copy_(blocks[:, source])
        return slots.copy_(torch.as_tensor(self._pool.slots(handles, counts), device="cpu"))

    def truncate(self, seq: Sequence, length: int) -> None:
        """Drop all tokens from ``length`` on, and blocks without other tokens."""
        handle = self._open_handle(seq)
        self._pool.truncate(handle, _check.integer("length", length, 0, self._pool.length(handle)))

    def fork(self, seq: Sequence, n: int) -> list[Sequence]:
        """Return ``n`` new sequences with the same tokens in the same blocks; ``seq`` stays valid.

        Write the keys and values of ``seq`` first: the first append to a partly filled last block copies it.
        """
        handle = self._open_handle(seq)
        return [Sequence(self, child) for child in self._pool.fork(handle, _check.integer("n", n, 0, _check.MOST))]

    def commit(self, seq: Sequence) -> None:
        """Declare all keys and values of ``seq`` written, so that others may share its full blocks.

        Blocks that another sequence has committed with the same tokens replace those of ``seq``. A sequence opened
        before ``advance_version`` shares nothing.
        """
        self._pool.commit(self._open_handle(seq))

    def close(self, seq: Sequence) -> None:
        """End the sequence. Its committed blocks stay cached until the space is needed."""
        self._pool.close(self._open_handle(seq))
        seq._handle = -1

    def advance_version(self) -> None:
        """Make all cached prefixes unreachable, because the policy has changed. Takes constant time."""
        self._pool.advance_version()

    def slots(self, sequences: Seq[Sequence]) -> torch.Tensor:
        """Return the slots of each sequence's tokens after ``num_computed``, one after the other, int64 [T]."""
        handles = self._handles(sequences)
        counts = [self._pool.length(h) - self._pool.computed(h) for h in handles]
        return self._tensor(self._pool.slots(handles, counts))

    def tables(self, sequences: Seq[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block_tables int32 [B, most blocks] and seq_lens int32 [B] for :func:`paged_attention`."""
        tables, lengths = self._pool.tables(self._handles(sequences))
        return self._tensor(tables), self._tensor(lengths)

    def group(self, sequences: Seq[Sequence], *, min_tokens: int = MIN_SHARED_TOKENS) -> tuple[torch.Tensor, ...]:
        """Group neighbours that begin with the same blocks, for :func:`shared_prefix_attention`.

        Shared prefixes hold computed tokens only, so all tokens after ``num_computed`` may be queries.

        Args:
            min_tokens: shortest common prefix of a group.

        Returns:
            int32 tensors: group_tables [G, most shared blocks], group_lens [G] in tokens, group_starts [G + 1], and,
            of each sequence's suffix after the shared prefix, block_tables [B, most blocks] and seq_lens [B].
            Without any shared prefix group_tables is [G, 0], so that the host need not wait for the device.
        """
        handles = self._handles(sequences)
        min_tokens = _check.integer("min_tokens", min_tokens, 0)
        size = self.block_size
        cpu = torch.device("cpu")  # the default device may be another one
        tables, lengths = (torch.as_tensor(values, device=cpu) for values in self._pool.tables(handles))
        computed = torch.tensor([self._pool.computed(h) for h in handles], dtype=torch.int32, device=cpu)
        limits = (torch.minimum(computed, lengths - 1) // size).clamp(min=0)
        starts, shared = _neighbours(tables, limits, max(1, -(-min_tokens // size)))
        group_starts = torch.tensor([*starts, len(handles)], dtype=torch.int32, device=cpu)
        prefix_blocks = torch.tensor(shared, dtype=torch.int64, device=cpu)  # [G]
        skip = prefix_blocks.repeat_interleave(group_starts.diff())  # [B]
        suffix_lens = lengths - skip.int() * size
        width = int((-(-suffix_lens // size)).max()) if handles else 0
        group_tables = tables[starts, : max(shared, default=0)]
        padded = torch.nn.functional.pad(tables, (0, group_tables.shape[1]), value=-1)
        suffix_tables = padded.gather(1, torch.arange(width, device=cpu) + skip[:, None])
        is_padding = torch.arange(group_tables.shape[1], device=cpu) >= prefix_blocks[:, None]
        group_tables = group_tables.masked_fill(is_padding, -1)
        result = (group_tables, prefix_blocks.int() * size, group_starts, suffix_tables, suffix_lens)
        return tuple(tensor.to(self.device) for tensor in result)

    @property
    def stats(self) -> dict[str, int]:
        """Return counts of tokens and blocks.

        ``hits`` and ``misses`` are tokens that ``open`` found cached or not; ``evictions`` counts blocks that were
        reachable. ``blocks_cached`` are reachable and unpinned, beside ``blocks_free`` and ``blocks_pinned``.
        """
        pool = self._pool
        free, cached, pinned = pool.counts()
        return {"hits": pool.hits, "misses": pool.misses, "evictions": pool.evictions,
                "blocks_free": free, "blocks_cached": cached, "blocks_pinned": pinned}  # fmt: skip

    @property
    def _pool(self) -> Any:
        """Close the dropped sequences, and return the pool."""
        while self._dropped:
            self._blocks.close(self._dropped.popleft())
        return self._blocks

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, device=self.device)

    def _open_handle(self, seq: Sequence, name: str = "seq") -> int:
        if not isinstance(seq, Sequence):
            raise TypeError(f"{name} must be a Sequence of this cache, got {seq!r}")
        if seq._cache is not self or seq._handle < 0:
            fault = "a closed one" if seq._handle < 0 else "one of another cache"
            raise ValueError(f"{name} must be an open sequence of this cache, got {fault}")
        return seq._handle

    def _handles(self, sequences: Seq[Sequence]) -> list[int]:
        if not hasattr(sequences, "__iter__"):
            raise TypeError(f"sequences must be a list of Sequences, got {sequences!r}")
        sequences = list(sequences)
        handles = [s._handle for s in sequences if type(s) is Sequence and s._cache is self and s._handle >= 0]
        if len(handles) == len(sequences):
            return handles
        return [self._open_handle(seq, f"sequences[{i}]") for i, seq in enumerate(sequences)]


def _with_ids(call: Callable[[list[list[int]]], Any], lists: list[list[int]]) -> Any:
    """Call the pool with lists of token ids; an error names the token id that the pool does not accept."""
    try:
        return call(lists)
    except (TypeError, ValueError, OverflowError) as error:
        refused = error
    integers(lists)
    raise refused


def _lists(name: str, token_lists: Any) -> list[list[Any]]:
    if not hasattr(token_lists, "__iter__"):
        raise TypeError(f"{name} must be a list of token lists, got {token_lists!r}")
    return [_ids(token_ids) for token_ids in token_lists]


def _ids(token_ids: Any) -> list[Any]:
    if type(token_ids) is list:
        return token_ids
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if not hasattr(ids, "__iter__"):
        raise TypeError(f"token_ids must be a list or a tensor [L] of integers, got {token_ids!r}")
    return list(ids)


def _neighbours(tables: torch.Tensor, limits: torch.Tensor, least: int) -> tuple[list[int], list[int]]:
    """Split rows into runs; return the first row of each run, and the blocks that all of its rows share.

    A run grows by the next row while that saves more reads: (rows - 1) * shared blocks grows. No row shares more blocks
    than its limit, and no run of several rows fewer than ``least``.
    """
    starts: list[int] = []
    shared: list[int] = []
    size = 0
    common_blocks = (tables[1:] == tables[:-1]).cumprod(1).sum(1)  # leading ones that equal the row before, [B - 1]
    limited = common_blocks.minimum(limits[1:]).minimum(limits[:-1]).tolist()
    for i, common in enumerate([0, *limited] if len(tables) else []):
        if size > 1:
            common = min(common, shared[-1])
        if common >= least and size * common > (size - 1) * shared[-1]:
            shared[-1] = common
            size += 1
        else:
            starts.append(i)
            shared.append(0)
            size = 1
    return starts, shared
