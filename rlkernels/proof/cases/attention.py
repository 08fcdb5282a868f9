"""Cases of attention over a paged cache and of attention on tries of packed tokens."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import rlkernels
from rlkernels.prefix_cache import GroupedLayout, TreeLayout, reference
from rlkernels.proof.problem import Case, Problem
from rlkernels.proof.workload import Workload

Device = torch.device
Heads = tuple[int, int, int]  # query heads, key heads, dimension
Layout = tuple[list[int], list[int], list[int]]  # prefix lengths, suffix lengths, group starts
BF16, F32 = torch.bfloat16, torch.float32
BLOCK_SIZE = 16
PREFILL_TOKENS = 8192  # of a pass that computes prompts
ODD_LEVELS = [(1, 33), (2, 1), (3, 70), (2, 18)]  # of a tree: children of each node, and their tokens
ODD = ([1, 17, 64, 1023, 130], [1, 0, 5, 1, 130])  # lengths, queries


class Pages:
    """Random caches with NaN wherever no kernel may read, and block tables filled from a shuffled pool."""

    def __init__(self, blocks: int, size: int, kv_heads: int, dim: int, dtype: torch.dtype, device: Device):
        self.size, self.device = size, device
        self.pool = iter(torch.randperm(blocks, device="cpu").tolist())
        shape = (blocks, size, kv_heads, dim)
        self.caches = [torch.randn(shape, device=device).to(dtype) for _ in range(2)]
        self.used = torch.zeros(blocks, size, dtype=torch.bool, device="cpu")

    def table(self, lens: Sequence[int]) -> torch.Tensor:
        """Return int32 [len(lens), widest + 1], -1 beyond each end."""
        counts = [-(-n // self.size) for n in lens]
        out = torch.full((len(lens), max(counts, default=0) + 1), -1, dtype=torch.int32, device="cpu")
        for row, length, count in zip(out, lens, counts):
            row[:count] = torch.tensor(list(itertools.islice(self.pool, count)), dtype=torch.int32, device="cpu")
            for i, block in enumerate(row[:count].tolist()):
                self.used[block, : length - i * self.size] = True
        return out.to(self.device)

    def finished(self) -> list[torch.Tensor]:
        for cache in self.caches:
            cache[~self.used.to(self.device)] = torch.nan
        return self.caches

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)


untyped_reference: Any = reference  # called with tuples of arguments, which types cannot follow


def doubled(tensors: Sequence[torch.Tensor]) -> Any:
    return [t.double() for t in tensors]


def _blocks(lens: Sequence[int], size: int) -> int:
    return sum(-(-n // size) for n in lens)


def paged(lens: Sequence[int], queries: Sequence[int], heads: Heads, size: int, dtype: torch.dtype, on: Device
          ) -> Problem:  # fmt: skip
    q_heads, kv_heads, dim = heads
    pages = Pages(_blocks(lens, size) + 3, size, kv_heads, dim, dtype, on)
    tables = pages.table(lens)
    query = torch.randn(sum(queries), q_heads, dim, device=on).to(dtype)
    rest: Any = (tables, pages.ints(lens), pages.ints([0, *itertools.accumulate(queries)]))
    args: Any = (query, *pages.finished(), *rest)
    pairs = sum(q * n - q * (q - 1) / 2 for n, q in zip(lens, queries))
    return Problem(
        lambda backend: rlkernels.paged_attention(*args, scale=dim**-0.5, return_lse=True, backend=backend),
        lambda: untyped_reference.paged_attention(*doubled(args[:3]), *rest, dim**-0.5),
        nbytes=(sum(lens) * kv_heads + sum(queries) * q_heads) * dim * 2 * query.element_size(),
        flops=4 * pairs * q_heads * dim,
        dtype=dtype,
        inputs={"query": query, "caches": args[1:3], "tables": tables, "lens": list(lens), "queries": list(queries)},
    )


def shared(prefixes: Sequence[int], members: int, suffix: Sequence[int], q_len: int, heads: Heads, size: int,
           dtype: torch.dtype, on: Device) -> Problem:  # fmt: skip
    """Make a problem where each prefix has ``members`` sequences, with suffix lengths from ``suffix`` in turn."""
    q_heads, kv_heads, dim = heads
    count = len(prefixes) * members
    suffix_lens = [suffix[i % len(suffix)] for i in range(count)]
    pages = Pages(_blocks(prefixes, size) + _blocks(suffix_lens, size) + 3, size, kv_heads, dim, dtype, on)
    groups = (pages.table(prefixes), pages.ints(prefixes), pages.ints(range(0, count + 1, members)))
    rest: Any = (
        *groups,
        pages.table(suffix_lens),
        pages.ints(suffix_lens),
        pages.ints(range(0, count * q_len + 1, q_len)),
    )
    query = torch.randn(count * q_len, q_heads, dim, device=on).to(dtype)
    args: Any = (query, *pages.finished(), *rest)
    inputs: dict[str, Any] = {}
    if len(set(prefixes)) == len(set(suffix_lens)) == 1 and prefixes[0] % size == 0:  # the same blocks, not grouped
        tables = torch.cat([groups[0][:, : prefixes[0] // size].repeat_interleave(members, 0), rest[3]], 1)
        lens, queries = [prefixes[0] + suffix_lens[0]] * count, [q_len] * count
        inputs = {"query": query, "caches": args[1:3], "tables": tables, "lens": lens, "queries": queries}
    return Problem(
        lambda backend: rlkernels.shared_prefix_attention(*args, scale=dim**-0.5, return_lse=True, backend=backend),
        lambda: untyped_reference.shared_prefix_attention(*doubled(args[:3]), *rest, dim**-0.5),
        nbytes=((sum(prefixes) + sum(suffix_lens)) * kv_heads + len(query) * q_heads) * dim * 2 * query.element_size(),
        flops=4 * (sum(prefixes) * members + sum(suffix_lens)) * q_len * q_heads * dim,
        dtype=dtype,
        inputs=inputs,
    )


def write(tokens: int, heads: tuple[int, int], size: int, dtype: torch.dtype, on: Device) -> Problem:
    blocks = tokens // size + 2
    caches = torch.empty(2, blocks, size, *heads, dtype=dtype, device=on)
    key, value = (torch.randn(tokens, *heads, device=on).to(dtype) for _ in range(2))
    slots = torch.randperm(blocks * size, device="cpu")[:tokens].to(on)

    def call(backend: str) -> torch.Tensor:
        rlkernels.write_kv(key, value, caches[0], caches[1], slots, backend=backend)
        return caches

    moved = 4 * key.nbytes + slots.nbytes
    given = {"key": key, "value": value, "caches": caches, "slots": slots}
    return Problem(call, reset=lambda: caches.fill_(torch.nan), nbytes=moved, dtype=dtype, floor=0.0, inputs=given)


def merge(tokens: int, heads: int, dim: int, dtype: torch.dtype, on: Device) -> Problem:
    a, b = (torch.randn(tokens, heads, dim, device=on).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(tokens, heads, device=on) * 10 for _ in range(2))
    for lse, out, rows in ((lse_a, a, slice(0, 2)), (lse_b, b, slice(1, 3))):  # sides that saw no key
        lse[rows], out[rows] = -torch.inf, torch.nan
    return Problem(
        lambda backend: rlkernels.merge_attention(a, lse_a, b, lse_b, backend=backend),
        lambda: reference.merge_attention(*doubled((a, lse_a, b, lse_b))),
        nbytes=3 * (a.nbytes + lse_a.nbytes),
        dtype=dtype,
        inputs={"sides": (a, lse_a, b, lse_b)},
    )


def packed(layout: TreeLayout, heads: Heads, dtype: torch.dtype, on: Device) -> Problem:
    """Make a problem of the output and the gradients of query, key and value."""
    q_heads, kv_heads, dim = heads
    attend: Any = rlkernels.grouped_attention if isinstance(layout, GroupedLayout) else rlkernels.tree_attention
    shapes = [(layout.num_tokens, h, dim) for h in (q_heads, kv_heads, kv_heads, q_heads)]
    *qkv, grad = [torch.randn(shape, device=on).to(dtype) for shape in shapes]

    def run(backend: str) -> list[torch.Tensor]:
        q, k, v = tensors = [t.detach().requires_grad_() for t in qkv]
        out = attend(q, k, v, layout, scale=dim**-0.5, backend=backend)
        return [out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))]

    def exact() -> list[torch.Tensor]:
        """Node by node: what autograd keeps of all nodes in float64 would not fit."""
        out, *sums = [torch.zeros_like(t, dtype=torch.float64) for t in (qkv[0], *qkv)]
        for (start, stop, _), path in zip(layout.nodes.tolist(), layout.paths()):
            queries = torch.arange(start, stop, device=on)
            keys = torch.cat([*(torch.arange(s.start, s.stop, device=on) for s in path), queries])
            q, k, v = tensors = [
                t[rows].double().requires_grad_() for t, rows in zip(qkv, (queries, keys, keys), strict=True)
            ]
            node_out, _ = reference.attend(q, k, v, dim**-0.5, causally=True)
            out[queries] = node_out.detach()
            gradients = torch.autograd.grad(node_out, tensors, grad[queries].double())
            for total, rows, gradient in zip(sums, (queries, keys, keys), gradients, strict=True):
                total.index_add_(0, rows, gradient)
        return [out, *sums]

    return Problem(
        run,
        exact,
        nbytes=3 * sum(t.nbytes for t in qkv),
        dtype=dtype,
        # in 16 bits the gradients start from the rounded output, where plain torch keeps its weights
        floor=3e-6 if dtype == F32 else torch.finfo(dtype).eps,
        inputs={"qkv": qkv, "grad": grad, "layout": layout},
    )


def grouped(layout: Layout, heads: Heads, dtype: torch.dtype, on: Device) -> Problem:
    """Make a problem as :func:`packed` of two levels."""
    return packed(GroupedLayout(*layout), heads, dtype, on)


def tree(levels: Sequence[tuple[int, int]], heads: Heads, dtype: torch.dtype, on: Device) -> Problem:
    """Make a problem as :func:`packed`; each node of a level has so many children, of so many tokens."""
    counter, sequences = itertools.count(), [list[int]()]
    for children, tokens in levels:
        sequences = [[*s, *itertools.islice(counter, tokens)] for s in sequences for _ in range(children)]
    return packed(TreeLayout.from_sequences(sequences), heads, dtype, on)


def groups(prompts: int, samples: int, prefix: int, suffix: int) -> Layout:
    """Return a layout of equal groups."""
    return [prefix] * prompts, [suffix] * (prompts * samples), list(range(0, prompts * samples + 1, samples))


SMALL = [
    Case("paged_attention", "odd lengths", partial(paged, *ODD, (8, 2, 64), BLOCK_SIZE, BF16)),
    Case("paged_attention", "odd lengths float32", partial(paged, *ODD, (4, 4, 32), 8, F32)),
    Case("paged_attention", "one key", partial(paged, [1], [1], (7, 1, 128), BLOCK_SIZE, BF16)),
    Case("shared_prefix_attention", "odd lengths",
         partial(shared, [0, 33, 257], 3, [1, 18, 64], 1, (8, 2, 64), BLOCK_SIZE, BF16)),
    Case("shared_prefix_attention", "odd lengths float32",
         partial(shared, [5, 1023], 2, [7, 20], 4, (4, 2, 32), 8, F32)),
    Case("write_kv", "2053 tokens", partial(write, 2053, (3, 64), BLOCK_SIZE, BF16)),
    Case("merge_attention", "5 x 1 x 128 float32", partial(merge, 5, 1, 128, F32)),
    Case("merge_attention", "1023 x 7 x 64", partial(merge, 1023, 7, 64, BF16)),
    Case("grouped_attention", "odd lengths float32",
         partial(grouped, ([0, 33], [1, 18, 64, 0, 5], [0, 2, 5]), (4, 2, 32), F32)),
    Case("grouped_attention", "odd lengths, heads of 128",
         partial(grouped, ([0, 33], [1, 18, 64, 0, 5], [0, 2, 5]), (4, 2, 128), BF16)),
    *(Case("tree_attention", f"odd lengths, heads of {dim}", partial(tree, ODD_LEVELS, (4, 2, dim), dtype))
      for dim, dtype in ((32, F32), (64, BF16), (128, BF16))),
]  # fmt: skip


def timed(work: Workload) -> Iterator[Case]:
    """Yield cases: decoding of all sequences, prefill of the prompts, a micro-batch of training."""
    heads, dtype = (work.heads, work.kv_heads, work.head_dim), work.torch_dtype
    sequences, whole = work.sequences, work.prompt_tokens + work.completion_tokens // 2
    prefill = min(work.prompts, 8)
    yield Case("paged_attention", f"decode: {sequences} sequences of {whole}",
               partial(paged, [whole] * sequences, [1] * sequences, heads, BLOCK_SIZE, dtype), timed=True,
               in_cuda_graph=True)  # fmt: skip
    yield Case("paged_attention/prefill", f"prefill: {prefill} prompts of {work.prompt_tokens}",
               partial(paged, [work.prompt_tokens] * prefill, [work.prompt_tokens] * prefill, heads, BLOCK_SIZE, dtype),
               timed=True)  # fmt: skip
    yield Case("shared_prefix_attention", f"decode: {work.prompts} prompts x {work.samples}",
               partial(shared, [work.prompt_tokens] * work.prompts, work.samples, [work.completion_tokens // 2], 1,
                       heads, BLOCK_SIZE, dtype), timed=True)  # fmt: skip
    yield Case("write_kv", f"{sequences} tokens", partial(write, sequences, heads[1:], BLOCK_SIZE, dtype), timed=True,
               in_cuda_graph=True)  # fmt: skip
    many = partial(write, PREFILL_TOKENS, heads[1:], BLOCK_SIZE, dtype)
    yield Case("write_kv/many", f"{PREFILL_TOKENS} tokens", many, timed=True)
    yield Case("merge_attention", f"{sequences} tokens", partial(merge, sequences, heads[0], heads[2], dtype),
               timed=True)  # fmt: skip
    layout = groups(min(work.prompts, 4), work.samples, work.prompt_tokens, work.completion_tokens)
    yield Case("grouped_attention", f"{len(layout[0])} prompts x {work.samples}, forward and backward",
               partial(grouped, layout, heads, dtype), timed=True)  # fmt: skip
    levels = [(1, work.prompt_tokens), (len(layout[0]), work.prompt_tokens), (work.samples, work.completion_tokens)]
    yield Case("tree_attention", f"{len(layout[0])} prompts x {work.samples} that begin alike, forward and backward",
               partial(tree, levels, heads, dtype), timed=True)  # fmt: skip
