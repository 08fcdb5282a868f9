"""Block pool and prefix tree: nanoseconds per block of 16 tokens, compared with vLLM's block pool.

vLLM runs in a separate process: set RLKERNELS_VLLM_PYTHON to a Python that has it (default: this one).
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import rlkernels
from bench import Measurement, Row

BLOCK_SIZE = 16  # tokens
BLOCKS_PER_PROMPT = 64
TOKENS = BLOCK_SIZE * BLOCKS_PER_PROMPT
# of prompts in the pool, of new ones, and of new ones that stay
KINDS = ("lookup of a known prefix", "allocate + free", "allocate + keep + free, evicting")


def prompt(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    # one token beyond the blocks: the last one of a prompt is never taken from the cache
    return torch.randint(150_000, (TOKENS + 1,), generator=generator).tolist()


class Ours:
    """The pool behind ``PagedKVCache``, tokens given as Python lists."""

    def __init__(self, num_blocks: int):
        self.cache = rlkernels.PagedKVCache(1, 1, 1, num_blocks=num_blocks, block_size=BLOCK_SIZE)

    def fill(self, tokens: list[int]) -> None:
        seq = self.cache.open(tokens)
        self.cache.commit(seq)
        self.cache.close(seq)

    def allocate(self, tokens: list[int]) -> None:
        self.cache.close(self.cache.open(tokens))

    def lookup(self, tokens: list[int]) -> None:
        seq = self.cache.open(tokens)
        assert seq.num_cached == TOKENS
        self.cache.close(seq)


class Vllm:
    """vLLM's pool: hashing of the prompt's blocks and BlockPool, without the scheduler around them."""

    def __init__(self, num_blocks: int):
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.block_pool import BlockPool

        kv_cache_utils.init_none_hash(sha256)
        self.utils = kv_cache_utils
        self.sha256 = sha256
        self.pool = BlockPool(num_blocks, True, BLOCK_SIZE)

    def hashes(self, tokens: list[int]) -> list[Any]:
        block_hashes: list[Any] = []
        for start in range(0, TOKENS, BLOCK_SIZE):
            parent = block_hashes[-1] if block_hashes else None
            block_hashes.append(self.utils.hash_block_tokens(self.sha256, parent, tokens[start : start + BLOCK_SIZE]))
        return block_hashes

    def fill(self, tokens: list[int]) -> None:
        request = type("Request", (), {"block_hashes": self.hashes(tokens)})
        blocks = self.pool.get_new_blocks(BLOCKS_PER_PROMPT)
        self.pool.cache_full_blocks(request, blocks, 0, BLOCKS_PER_PROMPT, BLOCK_SIZE, 0)
        self.pool.free_blocks(reversed(blocks))

    def allocate(self, tokens: list[int]) -> None:
        self.pool.free_blocks(reversed(self.pool.get_new_blocks(BLOCKS_PER_PROMPT)))

    def lookup(self, tokens: list[int]) -> None:
        blocks = [self.pool.get_cached_block(h, [0])[0] for h in self.hashes(tokens)]
        self.pool.touch(blocks)
        self.pool.free_blocks(reversed(blocks))


def samples(call: Callable[[list[int]], None], numbers: list[int], count: int) -> list[float]:
    """Return seconds per block; every sample takes fresh prompts, made outside the time."""
    seconds = []
    for start in range(0, len(numbers) - count + 1, count):
        prompts = [prompt(n) for n in numbers[start : start + count]]
        sample_start = time.perf_counter()
        for tokens in prompts:
            call(tokens)
        seconds.append((time.perf_counter() - sample_start) / count / BLOCKS_PER_PROMPT)
    return seconds


def measure(make: type[Ours | Vllm], num_blocks: int, rounds: int) -> list[list[float]]:
    """Fill nine tenths of the pool with prompts, then take samples of each of ``KINDS``."""
    pool = make(num_blocks)
    num_known = num_blocks * 9 // 10 // BLOCKS_PER_PROMPT
    for number in range(num_known):
        pool.fill(prompt(number))
    sample_prompts = 10
    total = rounds * sample_prompts
    order = torch.randperm(num_known, generator=torch.Generator().manual_seed(0)).tolist()
    stored = list(range(2 * num_known, 2 * num_known + num_known // 8 + total))
    recent = [order[i % num_known] for i in range(total)]
    return [
        samples(pool.lookup, recent, sample_prompts),
        samples(pool.allocate, list(range(num_known, num_known + total)), sample_prompts),
        samples(pool.fill, stored, sample_prompts)[-rounds:],
    ]


def vllm_measure(num_blocks: int, rounds: int) -> list[list[float]] | str:
    """Return the result of :func:`measure` in vLLM's process, or the reason why it failed."""
    python = os.environ.get("RLKERNELS_VLLM_PYTHON", sys.executable)
    process = subprocess.run(
        [python, "-m", "bench.block_pool", str(num_blocks), str(rounds)], capture_output=True, text=True
    )
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    last = (process.stderr.strip().splitlines() or ["no message"])[-1]
    return f"{last}; set RLKERNELS_VLLM_PYTHON to a Python with vLLM"


def row(provider: str, shape: str, times: list[float]) -> Row:
    extra = f"{statistics.median(times) * 1e9:.0f} ns/block"
    return Row("block_pool", provider, shape, extra=extra).timed(times)


def rows(shapes: Sequence[str], num_blocks: int, rounds: int) -> Iterator[Row]:
    """Give a row of either pool for each shape."""
    ours = measure(Ours, num_blocks, rounds)
    vllm = vllm_measure(num_blocks, rounds)
    for number, shape in enumerate(shapes):
        yield row("rlkernels", shape, ours[number])
        if isinstance(vllm, str):
            yield Row("block_pool", "vLLM BlockPool", shape, missing=vllm)
        else:
            yield row("vLLM BlockPool", shape, vllm[number])


def cases(quick: bool) -> Iterator[Measurement]:
    for num_blocks in [2_000] if quick else [10_000, 1_000_000]:
        shapes = [f"{kind}, {num_blocks} blocks of {BLOCK_SIZE}" for kind in KINDS]
        yield Measurement(shapes, partial(rows, shapes, num_blocks, 5 if quick else 50))


if __name__ == "__main__":
    print(json.dumps(measure(Vllm, int(sys.argv[1]), int(sys.argv[2]))))
