"""Random operations on the block pool and the rollout history, compared with their models in Python."""

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlkernels.history.reference import History
from rlkernels.prefix_cache.block_pool import BlockPool, OutOfBlocks, compiled_pool

Draw = Callable[[int], int]  # a number below its argument
OPERATIONS_PER_PAIR = 100_000
MAX_OPEN_SEQUENCES = 60  # empty ones take no block, so nothing else bounds their number
COMPARE_EACH = 200  # first operations, with a comparison after each of them
COMPARE_EVERY = 10  # later operations


class PoolPair:
    """The compiled block pool and its model; every operation runs on both."""

    def __init__(self, num_blocks: int, block_size: int):
        self.pools: tuple[Any, Any] = BlockPool(num_blocks, block_size), compiled_pool(num_blocks, block_size)
        self.open: list[tuple[int, int]] = []
        self.refused = 0

    def run_on_both(self, name: str, *arguments: Any, of: Sequence[Any] | None = None) -> list[Any]:
        """Return the results of both; none if both refuse. ``of``: a pair of handles, or of lists of handles."""
        results = []
        refusals = []
        for number, pool in enumerate(self.pools):
            handles = () if of is None else (of[number],)
            try:
                results.append(getattr(pool, name)(*handles, *arguments))
            except OutOfBlocks as error:
                refusals.append(str(error))
        assert not refusals or refusals[1:] == refusals[:1], (results, refusals)
        self.refused += bool(refusals)
        return results

    def step(self, draw: Draw) -> None:
        """Run one random operation."""
        size = self.pools[0].block_size

        def tokens(max_tokens: int) -> list[int]:  # of few values, so that sequences share prefixes
            return [1 if draw(6) else draw(3) for _ in range(draw(max_tokens + 1))]

        kind = draw(16) if len(self.open) < MAX_OPEN_SEQUENCES else 12
        if kind < 4 or not self.open:
            prompts = [tokens(7 * size) for _ in range(1 + draw(3))]
            self.open += zip(*self.run_on_both("open_many", prompts), strict=True)
            return
        pick = draw(len(self.open))
        handles = self.open[pick]
        if kind < 8:
            picked = list(dict.fromkeys([handles, self.open[draw(len(self.open))]]))
            extensions = [tokens(2 * size) for _ in picked]
            ids = [token for extension in extensions for token in extension]
            counts = [*map(len, extensions)]
            copies = self.run_on_both("append", ids, counts, of=[*map(list, zip(*picked))])
            assert copies[1:] == copies[:1]
        elif kind < 9:
            length = draw(self.pools[0].length(handles[0]) + 1)
            self.run_on_both("truncate", length, of=handles)
        elif kind < 10:
            self.open += zip(*self.run_on_both("fork", draw(3), of=handles), strict=True)
        elif kind < 12:
            self.run_on_both("commit", of=handles)
        elif kind < 15:
            self.run_on_both("close", of=handles)
            del self.open[pick]
        elif draw(3) == 0:
            self.run_on_both("advance_version")

    def compare(self) -> None:
        model, compiled = self.pools
        compiled.check()
        for name in ("version", "hits", "misses", "evictions"):
            assert getattr(model, name) == getattr(compiled, name), name
        assert model.counts() == compiled.counts()
        model_handles, compiled_handles = ([h[i] for h in self.open] for i in (0, 1))
        for a, b in zip(model.tables(model_handles), compiled.tables(compiled_handles), strict=True):
            assert a.tolist() == b.tolist()
        for a, b in self.open:
            assert model.token_ids(a) == compiled.token_ids(b)
            assert (model.num_cached(a), model.computed(a)) == (compiled.num_cached(b), compiled.computed(b))
        counts = [model.length(h) - model.computed(h) for h in model_handles]
        assert torch.equal(
            model.slots(model_handles, counts), torch.as_tensor(compiled.slots(compiled_handles, counts))
        )

    def counts(self) -> dict[str, int]:
        model = self.pools[0]
        return {"refusals": self.refused, "hits": model.hits, "evictions": model.evictions}


class HistoryPair:
    """The compiled rollout history and its model; every operation runs on both."""

    def __init__(self, max_tokens: int | None):
        from rlkernels import _C

        arguments = max_tokens, 0.02, 24
        self.histories: tuple[Any, Any] = History(*arguments), _C.RolloutHistory(*arguments)
        self.handles: list[int] = []  # both number them alike
        self.epoch = self.drafted = self.evicted = 0

    def run_on_both(self, name: str, *arguments: Any) -> Any:
        expected, result = (getattr(history, name)(*arguments) for history in self.histories)
        if isinstance(expected, tuple):
            assert all(np.array_equal(a, b) for a, b in zip(expected, result, strict=True)), (name, expected, result)
        else:
            assert expected == result, (name, expected, result)
        return expected

    def step(self, draw: Draw) -> None:
        """Run one random operation."""

        def ids(max_ids: int, num_values: int = 4) -> np.ndarray:
            return np.array([draw(num_values) for _ in range(draw(max_ids + 1))], np.int32)

        prompt = np.arange(draw(4) + 1, dtype=np.int32)
        kind = draw(16)
        if kind < 3:
            self.epoch += draw(8) == 0
            self.run_on_both("add", prompt, ids(40), draw(3) / 2, self.epoch - draw(2))
        elif kind < 6:
            self.drafted += len(self.run_on_both("draft", prompt, ids(30), draw(17)))
        elif kind < 7 or not self.handles:
            self.handles.append(self.run_on_both("track", prompt))
        elif kind < 9:
            self.run_on_both("extend", self.handles[draw(len(self.handles))], ids(12))
        elif kind < 10:
            handles = self.pick_handles(draw)
            chunks = [ids(5) for _ in handles]
            lengths = np.array([len(part) for part in chunks], np.int64)
            self.run_on_both("extend_tracked", handles, np.concatenate(chunks), lengths)
        elif kind < 13:
            handles = self.pick_handles(draw)
            _, offered = self.run_on_both("draft_tracked", handles, draw(17), draw(3) / 10 if draw(2) else None)
            accepted = np.array([draw(int(n) + 1) for n in offered], np.int64)
            self.run_on_both("observe", handles, offered, accepted)
        elif kind < 14:
            self.run_on_both("longest_prompt", ids(6))
        elif len(self.handles) > 3:
            self.run_on_both("release", self.handles.pop(draw(len(self.handles))))

    def pick_handles(self, draw: Draw) -> np.ndarray:
        """Pick one or two random handles."""
        return np.array(list({self.handles[draw(len(self.handles))] for _ in range(1 + draw(2))}), np.int64)

    def compare(self) -> None:
        model, compiled = (history.stats() for history in self.histories)
        assert {**model, "bytes": 0} == {**compiled, "bytes": 0}, (model, compiled)
        self.evicted = model["evicted"]

    def counts(self) -> dict[str, int]:
        return {"draft tokens": self.drafted, "evictions": self.evicted}


def run_pool(args: argparse.Namespace) -> dict[str, Any]:
    return soak("block pool", lambda rng: PoolPair(rng.randint(4, 80), rng.randint(1, 5)), args)


def run_history(args: argparse.Namespace) -> dict[str, Any]:
    return soak("rollout history", lambda rng: HistoryPair(rng.choice([100, 200, 400, 1500])), args)


def soak(label: str, make: Callable[[random.Random], Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run operations on pairs of several sizes; a problem names the seed of its pair."""
    totals = dict[str, int]()
    problems = list[str]()
    num_operations = 0
    while num_operations < args.operations and not problems:
        seed = f"{label}/{args.seed}/{num_operations}"
        try:
            num_operations += run_pair(make, seed, min(OPERATIONS_PER_PAIR, args.operations - num_operations), totals)
        except Exception as error:
            problems.append(f"{seed}: {type(error).__name__}: {error!s:.300}")
    figures = ", ".join([f"{num_operations:,} operations", *(f"{count:,} {name}" for name, count in totals.items())])
    return {"what": f"{label} against its model", "found": figures, "problems": problems, "operations": num_operations}


def run_pair(make: Callable[[random.Random], Any], seed: str, operations: int, totals: dict[str, int]) -> int:
    """Run operations on one pair, add its counts to the totals, and return their number."""
    rng = random.Random(seed)
    pair = make(rng)
    for number in range(operations):
        pair.step(lambda n: int(rng.random() * n))
        if number < COMPARE_EACH or number % COMPARE_EVERY == 0:
            pair.compare()
    for name, count in pair.counts().items():
        totals[name] = totals.get(name, 0) + count
    return operations
