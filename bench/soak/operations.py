"""Random operations on the block pool and the rollout history, compared with their models in plain Python."""

import argparse
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlkernels.history.reference import History
from rlkernels.prefix_cache.block_pool import BlockPool, OutOfBlocks, compiled_pool

Draw = Callable[[int], int]  # a number below its argument
PER_ROUND = 100_000  # operations on one pair, of sizes of its own
MOST_OPEN = 60  # sequences at a time; empty ones cost no block, so their number would grow for ever
FIRST, EVERY = 200, 10  # compare after each of the first 200 operations, then after every tenth


class PoolPair:
    """The compiled block pool and its model; every operation runs on both."""

    def __init__(self, num_blocks: int, block_size: int):
        self.pools: tuple[Any, Any] = BlockPool(num_blocks, block_size), compiled_pool(num_blocks, block_size)
        self.open: list[tuple[int, int]] = []
        self.refused = 0

    def both(self, *calls: Callable[[Any], Any]) -> list[Any] | None:
        results = []
        for pool, call in zip(self.pools, calls, strict=True):
            try:
                results.append(call(pool))
            except OutOfBlocks as error:
                results.append(str(error))
        assert isinstance(results[0], str) == isinstance(results[1], str), results
        if isinstance(results[0], str):
            assert results[0] == results[1]
            self.refused += 1
            return None
        return results

    def step(self, draw: Draw) -> None:
        """Run one random operation."""
        size = self.pools[0].block_size

        def tokens(most: int) -> list[int]:  # of few kinds, so that sequences share prefixes
            return [1 if draw(6) else draw(3) for _ in range(draw(most + 1))]

        kind = draw(16) if len(self.open) < MOST_OPEN else 12
        if kind < 4 or not self.open:
            prompts = [tokens(7 * size) for _ in range(1 + draw(3))]
            found = self.both(*2 * [lambda pool: pool.open_many(prompts)])
            self.open += zip(*found, strict=True) if found else []
            return
        pick = draw(len(self.open))
        handles = self.open[pick]
        if kind < 8:
            several = list(dict.fromkeys([handles, self.open[draw(len(self.open))]]))
            more = [tokens(2 * size) for _ in several]
            copies = self.both(*(lambda pool, i=i: pool.append([h[i] for h in several], more) for i in (0, 1)))
            assert copies is None or copies[0] == copies[1]
        elif kind < 9:
            length = draw(self.pools[0].length(handles[0]) + 1)
            self.both(*(lambda pool, i=i: pool.truncate(handles[i], length) for i in (0, 1)))
        elif kind < 10:
            n = draw(3)
            forked = self.both(*(lambda pool, i=i: pool.fork(handles[i], n) for i in (0, 1)))
            self.open += zip(*forked, strict=True) if forked else []
        elif kind < 12:
            self.both(*(lambda pool, i=i: pool.commit(handles[i]) for i in (0, 1)))
        elif kind < 15:
            self.both(*(lambda pool, i=i: pool.close(handles[i]) for i in (0, 1)))
            del self.open[pick]
        elif draw(3) == 0:
            self.both(*2 * [lambda pool: pool.advance_version()])

    def compare(self) -> None:
        model, ours = self.pools
        ours.check()
        for name in ("version", "hits", "misses", "evictions"):
            assert getattr(model, name) == getattr(ours, name), name
        assert model.counts() == ours.counts()
        mine, theirs = ([h[i] for h in self.open] for i in (0, 1))
        for a, b in zip(model.tables(mine), ours.tables(theirs), strict=True):
            assert a.tolist() == b.tolist()
        for a, b in self.open:
            assert model.token_ids(a) == ours.token_ids(b)
            assert (model.num_cached(a), model.computed(a)) == (ours.num_cached(b), ours.computed(b))
        starts = [model.computed(h) for h in mine]
        assert torch.equal(model.slots(mine, starts), torch.as_tensor(ours.slots(theirs, starts)))

    def counts(self) -> dict[str, int]:
        model = self.pools[0]
        return {"refusals": self.refused, "hits": model.hits, "evictions": model.evictions}


class HistoryPair:
    """The compiled rollout history and its model; every operation runs on both."""

    def __init__(self, max_tokens: int | None):
        from rlkernels import _C

        arguments = max_tokens, 0.02, 24
        self.histories: tuple[Any, Any] = History(*arguments), _C.RolloutHistory(*arguments)
        self.handles: list[int] = []  # both count them alike
        self.epoch = self.drafted = self.evicted = 0

    def both(self, name: str, *arguments: Any) -> Any:
        mine, theirs = (getattr(history, name)(*arguments) for history in self.histories)
        if isinstance(mine, tuple):
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True)), (name, mine, theirs)
        else:
            assert mine == theirs, (name, mine, theirs)
        return mine

    def step(self, draw: Draw) -> None:
        """Run one random operation."""

        def ids(most: int, different: int = 4) -> np.ndarray:
            return np.array([draw(different) for _ in range(draw(most + 1))], np.int32)

        prompt, kind = np.arange(draw(4) + 1, dtype=np.int32), draw(16)
        if kind < 3:
            self.epoch += draw(8) == 0
            self.both("add", prompt, ids(40), draw(3) / 2, self.epoch - draw(2))
        elif kind < 6:
            self.drafted += len(self.both("draft", prompt, ids(30), draw(17)))
        elif kind < 7 or not self.handles:
            self.handles.append(self.both("track", prompt))
        elif kind < 9:
            self.both("extend", self.handles[draw(len(self.handles))], ids(12))
        elif kind < 10:
            some = self.some(draw)
            parts = [ids(5) for _ in some]
            lengths = np.array([len(part) for part in parts], np.int64)
            self.both("extend_tracked", some, np.concatenate(parts), lengths)
        elif kind < 13:
            some = self.some(draw)
            _, offered = self.both("draft_tracked", some, draw(17), draw(3) / 10 if draw(2) else None)
            accepted = np.array([draw(int(n) + 1) for n in offered], np.int64)
            self.both("observe", some, offered, accepted)
        elif kind < 14:
            self.both("longest_prompt", ids(6))
        elif len(self.handles) > 3:
            self.both("release", self.handles.pop(draw(len(self.handles))))

    def some(self, draw: Draw) -> np.ndarray:
        """Pick one or two handles."""
        return np.array(list({self.handles[draw(len(self.handles))] for _ in range(1 + draw(2))}), np.int64)

    def compare(self) -> None:
        model, ours = (history.stats() for history in self.histories)
        assert {**model, "bytes": 0} == {**ours, "bytes": 0}, (model, ours)
        self.evicted = model["evicted"]

    def counts(self) -> dict[str, int]:
        return {"draft tokens": self.drafted, "evictions": self.evicted}


def run_pool(args: argparse.Namespace) -> dict[str, Any]:
    return soak("block pool", lambda rng: PoolPair(rng.randint(4, 80), rng.randint(1, 5)), args)


def run_history(args: argparse.Namespace) -> dict[str, Any]:
    return soak("rollout history", lambda rng: HistoryPair(rng.choice([100, 200, 400, 1500])), args)


def soak(what: str, make: Callable[[random.Random], Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run operations on pairs of several sizes; a problem names the seed of its pair."""
    totals, problems, done = dict[str, int](), list[str](), 0
    while done < args.operations and not problems:
        seed = f"{what}/{args.seed}/{done}"
        try:
            done += one_pair(make, seed, min(PER_ROUND, args.operations - done), totals)
        except Exception as error:
            problems.append(f"{seed}: {type(error).__name__}: {error!s:.300}")
    found = ", ".join([f"{done:,} operations", *(f"{count:,} {name}" for name, count in totals.items())])
    return {"what": f"{what} against its model", "found": found, "problems": problems, "operations": done}


def one_pair(make: Callable[[random.Random], Any], seed: str, operations: int, totals: dict[str, int]) -> int:
    """Run operations on one pair, add its counts to the totals, and return their number."""
    rng = random.Random(seed)
    pair = make(rng)
    for number in range(operations):
        pair.step(lambda n: int(rng.random() * n))
        if number < FIRST or number % EVERY == 0:
            pair.compare()
    for name, count in pair.counts().items():
        totals[name] = totals.get(name, 0) + count
    return operations
