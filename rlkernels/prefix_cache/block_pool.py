"""Which block holds which tokens: the plain model of the block pool and prefix tree.

The compiled pool (``csrc/runtime/block_pool.h``) does the same faster and is tested against this one.

Three kinds of blocks: *pinned* (some sequence uses it), *cached* (unpinned, in the tree under the current policy
version, least recently used first) and *free*. A block enters the tree when a sequence commits it; from then on its
contents never change. A block in the tree is found by (parent block, its tokens), so tokens are compared, not only
hashed. The parent of a first block is the policy version: raising it makes everything unreachable at once.

A pinned block of the tree pins its parent, and sequences let go of their blocks tail first, so the front of the list
of cached blocks never has a child in the tree: what is evicted is always a leaf.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlkernels import _check

Key = tuple[int, tuple[int, ...]]  # (parent block, or -1 - version for a first block; tokens of the block)


def integers(token_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Lists of token ids as int; raises TypeError or ValueError for one that is none of 0 .. 2^31 - 1."""
    name, low, high = "an entry of token_ids", 0, 2**31 - 1
    return [[_check.integer(name, token, low, high) for token in tokens] for tokens in token_ids]


class OutOfBlocks(RuntimeError):
    """The cache has too few free or evictable blocks for what was asked; nothing has been changed."""


def compiled_pool(num_blocks: int, block_size: int) -> Any:
    """Return the compiled pool: it has :class:`BlockPool`'s calls and raises this module's :class:`OutOfBlocks`."""
    from rlkernels import _C

    _C.OutOfBlocks = OutOfBlocks
    return _C.BlockPool(num_blocks, block_size)


@dataclass
class _Sequence:
    tokens: list[int]
    table: list[int]
    num_cached: int  # tokens whose keys and values were there when the sequence was opened or forked
    computed: int  # tokens whose keys and values are known to be written
    committed: int  # leading blocks that are in the tree
    version: int


class BlockPool:
    """Block tables of sequences, by integer handles. :class:`rlkernels.PagedKVCache` tells what the calls mean."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.version = self.hits = self.misses = self.evictions = 0
        self._sequences: dict[int, _Sequence] = {}
        self._next_handle = 0
        self._refs = [0] * num_blocks  # sequences that use a block, and pinned children in the tree
        self._tree: dict[Key, int] = {}
        self._place: dict[int, tuple[Key, int]] = {}  # block in the tree -> its key and version
        self._free = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # first out first
        # unpinned, from the trees of earlier versions: as good as free, but still taken leaf first, so that no block
        # becomes somebody else's parent while a child of its old life can be found under it
        self._stale: list[OrderedDict[int, None]] = []

    def open_many(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Opens all or none. A block that several prompts begin with is taken once, by the first of them."""
        prompts = integers(prompts)
        plans: list[list[int]] = []  # per prompt: block >= 0 found in the tree, or -1 - n for the n-th new block
        found: set[int] = set()  # unpinned blocks among those found
        cached = []
        in_batch: dict[Key, int] = {}
        new = 0
        for tokens in prompts:
            size, plan, parent, shared = self.block_size, [], -1 - self.version, 0
            for start in range(0, len(tokens), size):
                key = (parent, tuple(tokens[start : start + size]))
                # one token is always left to compute, else there would be no logits
                if shared == start and start + size < len(tokens):
                    block = self._tree.get(key, in_batch.get(key))
                    shared += size if block is not None else 0
                else:
                    block = None
                if block is None:
                    # a new block; as a parent it gets a number that no version has
                    block, new = -1 - new, new + 1
                    in_batch.setdefault(key, block)
                elif block >= 0 and not self._refs[block]:
                    found.add(block)
                plan.append(block)
                parent = block if block >= 0 else block - (1 << 60)
            plans.append(plan)
            cached.append(shared)
        self._require(new, reserved=len(found))
        for plan in plans:
            for block in plan:
                if block >= 0:
                    self._pin(block)
        fresh = [self._take() for _ in range(new)]
        handles = []
        for tokens, plan, shared in zip(prompts, plans, cached):
            table = [b if b >= 0 else fresh[-1 - b] for b in plan]
            for block, planned in zip(table, plan):
                self._refs[block] += planned < 0
            committed = sum(1 for b in plan[: shared // self.block_size] if b >= 0)
            handles.append(self._add(_Sequence(list(tokens), table, shared, shared, committed, self.version)))
            self.hits += shared
            self.misses += len(tokens) - shared
        return handles

    def append(self, handles: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Appends to all of the sequences or none -> blocks (from, to) whose contents must be copied first."""
        sequences, tokens = [self._sequences[h] for h in handles], integers(tokens)
        need = 0
        writers: dict[int, int] = {}  # how many of these sequences write into a block that they share
        for sequence, more in zip(sequences, tokens):
            length = len(sequence.tokens)
            need += self._blocks(length + len(more)) - len(sequence.table)
            if more and length % self.block_size:
                last = sequence.table[-1]
                writers[last] = writers.get(last, 0) + 1
        for block, count in writers.items():  # the last user of a block that is not in the tree may keep it
            need += count if block in self._place or count < self._refs[block] else count - 1
        self._require(need)
        copies = []
        for sequence, more in zip(sequences, tokens):
            if more and len(sequence.tokens) % self.block_size:
                last = sequence.table[-1]
                if self._refs[last] > 1 or last in self._place:
                    sequence.table[-1] = self._take(pin=True)
                    copies.append((last, sequence.table[-1]))
                    self._release(last)
            sequence.tokens.extend(more)
            while len(sequence.table) < self._blocks(len(sequence.tokens)):
                sequence.table.append(self._take(pin=True))
        return copies

    def truncate(self, handle: int, length: int) -> None:
        sequence = self._sequences[handle]
        del sequence.tokens[length:]
        while len(sequence.table) > self._blocks(length):
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
        """Puts the full blocks into the tree. A block that is there already replaces the sequence's own."""
        sequence = self._sequences[handle]
        sequence.computed = len(sequence.tokens)
        if sequence.version != self.version:
            return
        size = self.block_size
        parent = sequence.table[sequence.committed - 1] if sequence.committed else -1 - self.version
        for i in range(sequence.committed, len(sequence.tokens) // size):
            key = (parent, tuple(sequence.tokens[i * size : (i + 1) * size]))
            own, there = sequence.table[i], self._tree.get(key)
            if there is None:
                self._tree[key], self._place[own] = own, (key, self.version)
                if parent >= 0:  # own is in use
                    self._pin(parent)
            elif there != own:
                self._pin(there)
                self._release(own)
                sequence.table[i] = there
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

    def slots(self, handles: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
        """Return the slots of the tokens of each sequence from its start on, one after the other, int64 [T]."""
        parts = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for handle, start in zip(handles, starts):
            position = torch.arange(start, self.length(handle), device="cpu")
            table = torch.tensor(self._sequences[handle].table, dtype=torch.int64, device="cpu")
            parts.append(table[position // self.block_size] * self.block_size + position % self.block_size)
        return torch.cat(parts)

    def counts(self) -> tuple[int, int, int]:
        """Count the blocks (free, cached, pinned)."""
        free = len(self._free) + sum(map(len, self._stale))
        return free, len(self._cached), self.num_blocks - free - len(self._cached)

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def _add(self, sequence: _Sequence) -> int:
        self._next_handle += 1
        self._sequences[self._next_handle] = sequence
        return self._next_handle

    def _require(self, need: int, reserved: int = 0) -> None:
        free, cached, _ = self.counts()
        if need > free + cached - reserved:
            raise OutOfBlocks(
                f"{need} blocks are needed, {free + cached - reserved} of {self.num_blocks} are free or evictable: "
                f"close what has ended of the {len(self._sequences)} open sequences, or make a larger cache"
            )

    def _take(self, pin: bool = False) -> int:
        if not self._free:
            stale = next(filter(None, self._stale), None)
            self.evictions += stale is None
            block, _ = (self._cached if stale is None else stale).popitem(last=False)
            del self._tree[self._place.pop(block)[0]]
        else:
            block = self._free.pop()
        self._refs[block] += pin
        return block

    def _pin(self, block: int) -> None:
        """Counts one more user of a block that is in the tree."""
        self._refs[block] += 1
        if self._refs[block] == 1:
            del self._cached[block]
            parent = self._place[block][0][0]
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
        (self._cached if version == self.version else self._stale[-1])[block] = None
        if parent >= 0:
            self._release(parent)
