"""Paged attention and its neighbours."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import rlkernels
from bench.gpu.cases import rivals
from bench.gpu.problem import GpuCase, Problem, Rival
from rlkernels.prefix_cache import GroupedLayout, reference

Device = torch.device


class Paged:
    """Random caches with NaN wherever nothing may be read, and block tables filled from a shuffled pool."""

    def __init__(self, blocks: int, size: int, kv_heads: int, dim: int, dtype: torch.dtype, device: Device):
        self.size, self.device = size, device
        self.pool = iter(torch.randperm(blocks).tolist())
        shape = (blocks, size, kv_heads, dim)
        self.caches = [torch.randn(shape, device=device).to(dtype) for _ in range(2)]
        self.used = torch.zeros(blocks, size, dtype=torch.bool)

    def table(self, lens: Sequence[int]) -> torch.Tensor:
        """int32 [len(lens), widest + 1], -1 beyond each end."""
        counts = [-(-n // self.size) for n in lens]
        out = torch.full((len(lens), max(counts, default=0) + 1), -1, dtype=torch.int32)
        for row, length, count in zip(out, lens, counts):
            row[:count] = torch.tensor(list(itertools.islice(self.pool, count)), dtype=torch.int32)
            for i, block in enumerate(row[:count].tolist()):
                self.used[block, : length - i * self.size] = True
        return out.to(self.device)

    def finished(self) -> list[torch.Tensor]:
        for cache in self.caches:
            cache[~self.used.to(self.device)] = torch.nan
        return self.caches

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)


def doubled(tensors: Sequence[torch.Tensor], rest: Sequence[Any]) -> Any:
    """The first in float64, the rest as they are."""
    return [*(t.double() for t in tensors), *rest]


def everybody(query: torch.Tensor, caches: Sequence[torch.Tensor], tables: torch.Tensor, lens: Sequence[int],
              scale: float) -> rivals.Rivals:  # fmt: skip
    """query [B * q, Hq, d] of sequences of the same length, B = len(tables) of them."""
    rows = query.unflatten(0, (len(tables), -1))
    key, value = (torch.stack([rivals.dense(cache, table, lens[0]) for table in tables]) for cache in caches)
    return {**rivals.attention(rows, key, value, scale), **rivals.pages(rows, caches, tables, lens, scale)}


def _blocks(lens: Sequence[int], size: int) -> int:
    return sum(-(-n // size) for n in lens)


def paged(
    lens: Sequence[int], queries: Sequence[int], heads: tuple[int, int, int], size: int, dtype: torch.dtype, on: Device
) -> Problem:
    """heads: query heads, key heads, dimension."""
    q_heads, kv_heads, dim = heads
    pages = Paged(_blocks(lens, size) + 3, size, kv_heads, dim, dtype, on)
    tables = pages.table(lens)
    query = torch.randn(sum(queries), q_heads, dim, device=on).to(dtype)
    rest: Any = (tables, pages.ints(lens), pages.ints([0, *itertools.accumulate(queries)]))
    scale = dim**-0.5
    args: Any = (query, *pages.finished(), *rest)
    same = len(set(zip(lens, queries))) == 1
    others = everybody(query, args[1:3], tables, lens, scale) if same else {}
    pairs = sum(q * n - q * (q - 1) / 2 for n, q in zip(lens, queries))
    return Problem(
        lambda backend: rlkernels.paged_attention(*args, scale=scale, return_lse=True, backend=backend),
        lambda: reference.paged_attention(*doubled(args[:3], [*rest, scale])),
        nbytes=(sum(lens) * kv_heads + sum(queries) * q_heads) * dim * 2 * query.element_size(),
        flops=4 * pairs * q_heads * dim,
        dtype=dtype,
        rivals=others,
    )


def shared(
    prefixes: Sequence[int], members: int, suffix: Sequence[int], q_len: int, heads: tuple[int, int, int], size: int,
    dtype: torch.dtype, on: Device,
) -> Problem:  # fmt: skip
    """Every prefix has ``members`` sequences whose suffixes take the lengths of ``suffix`` in turn."""
    q_heads, kv_heads, dim = heads
    count = len(prefixes) * members
    own = [suffix[i % len(suffix)] for i in range(count)]
    pages = Paged(_blocks(prefixes, size) + _blocks(own, size) + 3, size, kv_heads, dim, dtype, on)
    groups = (pages.table(prefixes), pages.ints(prefixes), pages.ints(range(0, count + 1, members)))
    rest: Any = (*groups, pages.table(own), pages.ints(own), pages.ints(range(0, count * q_len + 1, q_len)))
    query = torch.randn(count * q_len, q_heads, dim, device=on).to(dtype)
    scale = dim**-0.5
    args: Any = (query, *pages.finished(), *rest)
    keys = sum(prefixes) * members + sum(own)
    others: rivals.Rivals = {}
    if len(set(prefixes)) == len(set(own)) == 1 and prefixes[0] % size == 0:
        # the same blocks, not grouped: what sharing is worth
        whole = torch.cat([groups[0][:, : prefixes[0] // size].repeat_interleave(members, 0), rest[3]], 1)
        lens = [prefixes[0] + own[0]] * count
        unshared: Any = (*args[:3], whole, pages.ints(lens), rest[5])
        alone = partial(rlkernels.paged_attention, *unshared, scale=scale, return_lse=True, backend="triton")
        others = {"triton, not shared": Rival(lambda: alone), **everybody(query, args[1:3], whole, lens, scale)}
    return Problem(
        lambda backend: rlkernels.shared_prefix_attention(*args, scale=scale, return_lse=True, backend=backend),
        lambda: reference.shared_prefix_attention(*doubled(args[:3], [*rest, scale])),
        nbytes=((sum(prefixes) + sum(own)) * kv_heads + len(query) * q_heads) * dim * 2 * query.element_size(),
        flops=4 * keys * q_len * q_heads * dim,
        dtype=dtype,
        rivals=others,
    )


def write(tokens: int, heads: tuple[int, int], size: int, dtype: torch.dtype, on: Device) -> Problem:
    blocks = tokens // size + 2
    caches = [torch.empty(blocks, size, *heads, dtype=dtype, device=on) for _ in range(2)]
    key, value = (torch.randn(tokens, *heads, device=on).to(dtype) for _ in range(2))
    slots = torch.randperm(blocks * size)[:tokens].to(on)

    def call(backend: str) -> list[torch.Tensor]:
        rlkernels.write_kv(key, value, caches[0], caches[1], slots, backend=backend)
        return caches

    def reset() -> None:
        for cache in caches:
            cache.fill_(torch.nan)

    return Problem(call, reset=reset, nbytes=4 * key.nbytes + slots.nbytes, dtype=dtype, floor=0.0)


def merge(tokens: int, heads: int, dim: int, dtype: torch.dtype, on: Device) -> Problem:
    a, b = (torch.randn(tokens, heads, dim, device=on).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(tokens, heads, device=on) * 10 for _ in range(2))
    for lse, out, rows in ((lse_a, a, slice(0, 2)), (lse_b, b, slice(1, 3))):  # sides that saw no key
        lse[rows], out[rows] = -torch.inf, torch.nan
    return Problem(
        lambda backend: rlkernels.merge_attention(a, lse_a, b, lse_b, backend=backend),
        lambda: reference.merge_attention(a.double(), lse_a.double(), b.double(), lse_b.double()),
        nbytes=3 * (a.nbytes + lse_a.nbytes),
        dtype=dtype,
    )


@dataclass
class Group:
    """One group of a layout, and which packed tokens are its own."""

    layout: GroupedLayout
    start: int
    stop: int


def one_group_each(layout: tuple[list[int], list[int], list[int]]) -> Iterator[Group]:
    prefixes, suffixes, starts = layout
    at = 0
    for prefix, (a, b) in zip(prefixes, itertools.pairwise(starts)):
        own = suffixes[a:b]
        yield Group(GroupedLayout([prefix], own, [0, len(own)]), at, at := at + prefix + sum(own))


def grouped(
    layout: tuple[list[int], list[int], list[int]], heads: tuple[int, int, int], dtype: torch.dtype, on: Device
) -> Problem:
    """Forward and the gradients of query, key and value."""
    q_heads, kv_heads, dim = heads
    packed = GroupedLayout(*layout)
    shapes = [(packed.num_tokens, h, dim) for h in (q_heads, kv_heads, kv_heads, q_heads)]
    *qkv, grad = [torch.randn(shape, device=on).to(dtype) for shape in shapes]

    def run(tensors: list[torch.Tensor], backend: str) -> list[torch.Tensor]:
        q, k, v = leaves = [t.detach().requires_grad_() for t in tensors]
        out = rlkernels.grouped_attention(q, k, v, packed, scale=dim**-0.5, backend=backend)
        return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    def exact() -> list[torch.Tensor]:
        """Group by group, since what autograd keeps of all of them in float64 would not fit."""
        found = []
        for part in one_group_each(layout):
            rows = slice(part.start, part.stop)
            q, k, v = leaves = [t[rows].double().requires_grad_() for t in qkv]
            out = reference.grouped_attention(q, k, v, part.layout, dim**-0.5)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, grad[rows].double())])
        return [torch.cat(tensors) for tensors in zip(*found)]

    same = len(set(layout[0])) == len(set(layout[1])) == 1
    return Problem(
        lambda backend: run(qkv, backend),
        exact,
        nbytes=3 * sum(t.nbytes for t in qkv),
        dtype=dtype,
        # in 16 bits the gradients start from the rounded output, where plain torch keeps its weights
        floor=3e-6 if dtype == torch.float32 else torch.finfo(dtype).eps,
        rivals=rivals.grouped(qkv[0], qkv[1], qkv[2], grad, packed, dim**-0.5) if same else {},
    )


BF16, F32 = torch.bfloat16, torch.float32
ODD = ([1, 17, 64, 1023, 130], [1, 0, 5, 1, 130])  # lengths, queries
LLAMA = (32, 8, 128)  # heads of Llama-3-8B: query, key, dimension
SMALL = (14, 2, 64)  # of Qwen2.5-0.5B
TRAIN = ([512] * 8, [512] * 64, list(range(0, 65, 8)))
SHORT = ([256] * 8, [256] * 64, list(range(0, 65, 8)))

CASES = [
    GpuCase("paged_attention", "odd lengths", partial(paged, *ODD, (8, 2, 64), 16, BF16)),
    GpuCase("paged_attention", "odd lengths float32", partial(paged, *ODD, (4, 4, 32), 8, F32)),
    GpuCase("paged_attention", "one key", partial(paged, [1], [1], (7, 1, 128), 16, BF16)),
    GpuCase("shared_prefix_attention", "odd lengths",
            partial(shared, [0, 33, 257], 3, [1, 18, 64], 1, (8, 2, 64), 16, BF16)),
    GpuCase("shared_prefix_attention", "odd lengths float32",
            partial(shared, [5, 1023], 2, [7, 20], 4, (4, 2, 32), 8, F32)),
    GpuCase("write_kv", "2053 tokens", partial(write, 2053, (3, 64), 16, BF16)),
    GpuCase("merge_attention", "1023 x 7 x 64", partial(merge, 1023, 7, 64, BF16)),
    GpuCase("merge_attention", "5 x 1 x 128 float32", partial(merge, 5, 1, 128, F32)),
    GpuCase("grouped_attention", "odd lengths float32",
            partial(grouped, ([0, 33], [1, 18, 64, 0, 5], [0, 2, 5]), (4, 2, 32), F32)),
    GpuCase("grouped_attention", "odd lengths, heads of 128",
            partial(grouped, ([0, 33], [1, 18, 64, 0, 5], [0, 2, 5]), (4, 2, 128), BF16)),
    GpuCase("paged_attention", "decode: 256 sequences of 1024, Qwen2.5-0.5B heads",
            partial(paged, [1024] * 256, [1] * 256, SMALL, 16, BF16), timed=True),
    GpuCase("paged_attention", "decode: 64 sequences of 4096, Llama-3-8B heads",
            partial(paged, [4096] * 64, [1] * 64, LLAMA, 16, BF16), timed=True),
    GpuCase("paged_attention", "suffix prefill: 8 x 512 queries on 2048 keys",
            partial(paged, [2048] * 8, [512] * 8, LLAMA, 16, BF16), timed=True),
    GpuCase("shared_prefix_attention", "decode: 16 prefixes of 2048 x 8 suffixes of 256",
            partial(shared, [2048] * 16, 8, [256], 1, LLAMA, 16, BF16), timed=True),
    GpuCase("shared_prefix_attention", "decode: 32 prefixes of 512 x 8 suffixes of 512, Qwen2.5-0.5B heads",
            partial(shared, [512] * 32, 8, [512], 1, SMALL, 16, BF16), timed=True),
    GpuCase("write_kv", "65536 tokens, 8 x 128", partial(write, 65536, (8, 128), 16, BF16), timed=True),
    GpuCase("merge_attention", "16384 x 32 x 128", partial(merge, 16384, 32, 128, BF16), timed=True),
    GpuCase("grouped_attention", "8 prefixes of 512, 8 suffixes of 512 each, forward and backward",
            partial(grouped, TRAIN, LLAMA, BF16), timed=True),
    GpuCase("grouped_attention", "8 prefixes of 256, 8 suffixes of 256 each, Qwen2.5-0.5B heads, forward and backward",
            partial(grouped, SHORT, SMALL, BF16), timed=True),
]  # fmt: skip
