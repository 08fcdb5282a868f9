"""Block pool and prefix tree in plain Python: which block holds which tokens.

The compiled pool (``csrc/runtime/block_pool.h``) does the same faster. Tests compare it with this one.

A block is *pinned* (some sequence uses it), *cached* (unpinned, in the tree under the current policy version, least
recently used first) or *free*. A sequence that commits a block puts it into the tree; from then on its contents never
change. The tree looks blocks up by (parent block, tokens), so it compares tokens, not only hashes. The parent of a
first block is the policy version: raising it makes all blocks unreachable at once.

A pinned block of the tree pins its parent, and sequences release their blocks tail first. So the first of the cached
blocks never has a child in the tree: eviction always takes a leaf.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from rlkernels import _check

Key = tuple[int, tuple[int, ...]]  # (parent block, or -1 - version for a first block; tokens of the block)


def integers(token_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return lists of token ids as int; raise TypeError or ValueError for one outside 0 .. 2^31 - 1."""
    return [[_check.integer("an entry of token_ids", token, 0, 2**31 - 1) for token in tokens] for tokens in token_ids]


class OutOfBlocks(RuntimeError):
    """The cache has too few free or evictable blocks for a call, which has changed nothing."""


def compiled_pool(num_blocks: int, block_size: int) -> Any:
    """Return the compiled pool: it has :class:`BlockPool`'s calls and raises this module's :class:`OutOfBlocks`."""
    from rlkernels import _C

    _C.OutOfBlocks = OutOfBlocks
    return _C.BlockPool(num_blocks, block_size)


@dataclass
class _Sequence:
    tokens: list[int]
    table: list[int]
    num_cached: int  # leading tokens whose keys and values existed when the sequence was opened or forked
    computed: int  # leading tokens whose keys and values are known to be written
    committed: int  # leading blocks that are in the tree
    version: int


class BlockPool:
    """Block tables of sequences, by integer handles. :class:`rlkernels.PagedKVCache` documents the calls."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.version = self.hits = self.misses = self.evictions = 0
        self._sequences: dict[int, _Sequence] = {}
        self._next_handle = 0
        self._refs = [0] * num_blocks  # sequences that use a block, and pinned children in the tree
        self._tree: dict[Key, int] = {}
        self._place: dict[int, tuple[Key, int]] = {}  # block in the tree -> its key and version
        self._free = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the order of eviction
        # unpinned blocks of earlier versions' trees: as good as free, but still taken leaf first, so that no block
        # becomes a parent again while the tree holds a child of its earlier contents
        self._stale: list[OrderedDict[int, None]] = []

    def open_many(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Open all or none. A block that several prompts begin with is taken once, by the first of them."""
        prompts = integers(prompts)
        size = self.block_size
        plans: list[list[int]] = []  # per prompt: block >= 0 of the tree, or -1 - n for the n-th new block
        unpinned: set[int] = set()  # planned blocks of the tree that no sequence uses yet
        nums_cached = []  # per prompt: tokens in planned blocks that exist, or that an earlier prompt computes
        in_batch: dict[Key, int] = {}
        num_new = 0
        for tokens in prompts:
            plan = []
            parent = -1 - self.version
            num_cached = 0
            for start in range(0, len(tokens), size):
                key = (parent, tuple(tokens[start : start + size]))
                block = None
                # the last token is always computed: it gives the logits
                if num_cached == start and start + size < len(tokens):
                    block = self._tree.get(key, in_batch.get(key))
                if block is not None:
                    num_cached += size
                if block is None:
                    block = -1 - num_new
                    num_new += 1
                    in_batch.setdefault(key, block)
                elif block >= 0 and not self._refs[block]:
                    unpinned.add(block)
                plan.append(block)
                parent = block if block >= 0 else block - (1 << 60)  # a number that no version has
            plans.append(plan)
            nums_cached.append(num_cached)
        self._require(num_new, reserved=len(unpinned))
        for plan in plans:
            for block in plan:
                if block >= 0:
                    self._pin(block)
        new_blocks = [self._take() for _ in range(num_new)]
        handles = []
        for tokens, plan, num_cached in zip(prompts, plans, nums_cached):
            table = [block if block >= 0 else new_blocks[-1 - block] for block in plan]
            for block, planned in zip(table, plan):
                self._refs[block] += planned < 0
            committed = sum(1 for block in plan[: num_cached // size] if block >= 0)
            handles.append(self._add(_Sequence(list(tokens), table, num_cached, num_cached, committed, self.version)))
            self.hits += num_cached
            self.misses += len(tokens) - num_cached
        return handles

    def append(self, handles: Sequence[int], ids: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
        """Append to all of the sequences or none; return blocks (from, to) whose contents must be copied first.

        Args:
            ids: the tokens of all sequences, one after the other.
            counts: how many of them belong to each.
        """
        sequences = [self._sequences[handle] for handle in handles]
        all_ids = iter(integers([ids])[0])
        tokens = [list(islice(all_ids, count)) for count in counts]
        num_new = 0
        writers: dict[int, int] = {}  # partly filled block -> how many of these sequences write into it
        for sequence, new_tokens in zip(sequences, tokens):
            length = len(sequence.tokens)
            num_new += self._num_blocks(length + len(new_tokens)) - len(sequence.table)
            if new_tokens and length % self.block_size:
                last = sequence.table[-1]
                writers[last] = writers.get(last, 0) + 1
        for block, count in writers.items():
            # the last user of a block outside of the tree writes into it; all others copy it
            last_user_writes = block not in self._place and count >= self._refs[block]
            num_new += count - last_user_writes
        self._require(num_new)
        copies = []
        for sequence, new_tokens in zip(sequences, tokens):
            if new_tokens and len(sequence.tokens) % self.block_size:
                last = sequence.table[-1]
                if self._refs[last] > 1 or last in self._place:
                    sequence.table[-1] = self._take(pin=True)
                    copies.append((last, sequence.table[-1]))
                    self._release(last)
            sequence.tokens.extend(new_tokens)
            while len(sequence.table) < self._num_blocks(len(sequence.tokens)):
                sequence.table.append(self._take(pin=True))
        return copies

    def truncate(self, handle: int, length: int) -> None:
        sequence = self._sequences[handle]
        del sequence.tokens[length:]
        while len(sequence.table) > self._num_blocks(length):
            self._release(sequence.table.pop())
        sequence.num_cached = min(sequence.num_cached, length)
        sequence.computed = min(sequence.computed, length)
        sequence.committed = min(sequence.committed, length // self.block_size)

    def fork(self, handle: int, n: int) -> list[int]:
        parent = self._sequences[handle]
        for block in parent.table:
            self._refs[block] += n
        length = len(parent.tokens)
        child = replace(parent, num_cached=length, computed=length)
        return [self._add(replace(child, tokens=[*child.tokens], table=[*child.table])) for _ in range(n)]

    def commit(self, handle: int) -> None:
        """Put the full blocks into the tree. A block with the same tokens there replaces the sequence's."""
        sequence = self._sequences[handle]
        sequence.computed = len(sequence.tokens)
        if sequence.version != self.version:
            return
        size = self.block_size
        parent = sequence.table[sequence.committed - 1] if sequence.committed else -1 - self.version
        for i in range(sequence.committed, len(sequence.tokens) // size):
            key = (parent, tuple(sequence.tokens[i * size : (i + 1) * size]))
            block = sequence.table[i]
            in_tree = self._tree.get(key)
            if in_tree is None:
                self._tree[key] = block
                self._place[block] = key, self.version
                if parent >= 0:  # the block is in use
                    self._pin(parent)
            elif in_tree != block:
                self._pin(in_tree)
                self._release(block)
                sequence.table[i] = in_tree
            parent = sequence.table[i]
        sequence.committed = len(sequence.tokens) // size

    def close(self, handle: int) -> None:
        for block in reversed(self._sequences.pop(handle).table):
            self._release(block)

    def advance_version(self) -> None:
        self.version += 1
        self._stale = [*filter(None, self._stale), self._cached]
        self._cached = OrderedDict()

    def length(self, handle: int) -> int:
        return len(self._sequences[handle].tokens)

    def num_cached(self, handle: int) -> int:
        return self._sequences[handle].num_cached

    def computed(self, handle: int) -> int:
        return self._sequences[handle].computed

    def token_ids(self, handle: int) -> list[int]:
        return list(self._sequences[handle].tokens)

    def tables(self, handles: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block tables int32 [B, most blocks], filled up with -1, and lengths int32 [B]."""
        tables = [self._sequences[h].table for h in handles]
        out = torch.full((len(tables), max(map(len, tables), default=0)), -1, dtype=torch.int32, device="cpu")
        for row, table in zip(out, tables):
            row[: len(table)] = torch.tensor(table, dtype=torch.int32, device="cpu")
        return out, torch.tensor([self.length(h) for h in handles], dtype=torch.int32, device="cpu")

    def slots(self, handles: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """Return the slots of the last tokens of each sequence, so many of each, one after the other, int64 [T]."""
        slots = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for handle, count in zip(handles, counts):
            length = self.length(handle)
            position = torch.arange(length - count, length, device="cpu")
            table = torch.tensor(self._sequences[handle].table, dtype=torch.int64, device="cpu")
            slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
        return torch.cat(slots)

    def counts(self) -> tuple[int, int, int]:
        """Count the blocks (free, cached, pinned)."""
        free = len(self._free) + sum(map(len, self._stale))
        return free, len(self._cached), self.num_blocks - free - len(self._cached)

    def _num_blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def _add(self, sequence: _Sequence) -> int:
        self._next_handle += 1
        self._sequences[self._next_handle] = sequence
        return self._next_handle

    def _require(self, num_blocks: int, reserved: int = 0) -> None:
        free, cached, _ = self.counts()
        available = free + cached - reserved
        if num_blocks > available:
            raise OutOfBlocks(
                f"{num_blocks} blocks are needed, {available} of {self.num_blocks} are free or evictable: "
                f"close what has ended of the {len(self._sequences)} open sequences, or make a larger cache"
            )

    def _take(self, pin: bool = False) -> int:
        if self._free:
            block = self._free.pop()
        else:
            stale = next(filter(None, self._stale), None)
            self.evictions += stale is None
            block, _ = (self._cached if stale is None else stale).popitem(last=False)
            key, _ = self._place.pop(block)
            del self._tree[key]
        self._refs[block] += pin
        return block

    def _pin(self, block: int) -> None:
        """Count one more user of a block that is in the tree."""
        self._refs[block] += 1
        if self._refs[block] == 1:
            del self._cached[block]
            (parent, _), _ = self._place[block]
            if parent >= 0:
                self._pin(parent)

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if block not in self._place:
            self._free.append(block)
            return
        (parent, _), version = self._place[block]
        unpinned = self._cached if version == self.version else self._stale[-1]
        unpinned[block] = None
        if parent >= 0:
            self._release(parent)
