"""Paged attention and its neighbours on a CPU, against torch's attention on contiguous copies of the same keys.

The inputs are those of the proof: block tables are shuffled, so a sequence's blocks are anywhere in the cache. Peers
get keys that were gathered untimed: their time is that without paging.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import rlkernels
from bench import Case, copy_bandwidth, read_bandwidth
from bench._case import Provider
from bench._runner import match
from bench.gpu.rivals import gather, packed
from bench.tree_attention import ON_HEADS, make_case, make_samples, padded, two_levels
from rlkernels.prefix_cache import TreeLayout, reference
from rlkernels.proof.cases import attention
from rlkernels.proof.problem import Problem, leaves

BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def match_first(out: Any, expected: Any) -> str:
    """Compare the attention; log-sum-exps are not among the outputs of peers."""
    return match(next(leaves(out)), next(leaves(expected)))


def make_paged_case(
    op: str,
    shape: str,
    problem: Problem,
    heads: attention.Heads,
    peers: Mapping[str, Provider] | None = None,
    **options: Any,
) -> Case:
    """Make the case of an op on a paged cache, beside torch's attention on contiguous copies."""
    return Case(
        op,
        f"{shape}, {heads[0]} on {heads[1]} heads of {heads[2]}",
        {"rlkernels": partial(problem.call, "cpu"), **(peers or {}), "torch SDPA, contiguous": sdpa(problem)},
        dtype=str(problem.dtype).removeprefix("torch."),
        reference=partial(problem.call, "torch"),
        compare=match_first,
        **options,
    )


def sdpa(problem: Problem) -> Callable[[], torch.Tensor]:
    """Make torch's attention on [B, H, L, d]; queries are the last ones of each sequence."""
    given = problem.inputs
    key, value = gather(given["caches"], given["tables"], given["lens"][0])
    query = given["query"].unflatten(0, (len(key), -1)).transpose(1, 2)
    queries, keys = query.shape[2], key.shape[2]
    mask = reference.causal(queries, keys, CPU) if queries > 1 else None
    is_grouped = query.shape[1] > key.shape[1]
    return lambda: packed(functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=is_grouped))


def reading(nbytes: float) -> tuple[str, float]:
    return "read bandwidth", nbytes / read_bandwidth(int(nbytes))


def decode(count: int, length: int, heads: attention.Heads, dtype: torch.dtype) -> Case:
    problem = attention.paged([length] * count, [1] * count, heads, attention.BLOCK_SIZE, dtype, CPU)
    nbytes = problem.nbytes
    return make_paged_case(
        "paged_attention", f"decode {count} x {length}", problem, heads,
        limit=reading(nbytes), work=("B", nbytes),
    )  # fmt: skip


def prefill(count: int, length: int, queries: int, heads: attention.Heads, dtype: torch.dtype) -> Case:
    problem = attention.paged([length] * count, [queries] * count, heads, attention.BLOCK_SIZE, dtype, CPU)
    shape = f"suffix prefill {count} x {queries} of {length}"
    return make_paged_case("paged_attention", shape, problem, heads, work=("FLOP", problem.flops))


def shared(groups: int, members: int, prefix: int, suffix: int, heads: attention.Heads, dtype: torch.dtype) -> Case:
    """Make the case of decoding with one read of each group's prefix, against one read by every member."""
    problem = attention.shared([prefix] * groups, members, [suffix], 1, heads, attention.BLOCK_SIZE, dtype, CPU)
    given = problem.inputs
    lens, starts = torch.tensor(given["lens"]).int(), torch.arange(len(given["lens"]) + 1).int()
    arguments: Any = (given["query"], *given["caches"], given["tables"], lens, starts)
    unshared = partial(rlkernels.paged_attention, *arguments, scale=heads[2] ** -0.5)
    return make_paged_case(
        "shared_prefix_attention", f"{groups} groups of {members}, P {prefix}, S {suffix}", problem, heads,
        peers={"rlkernels, unshared": unshared}, limit=reading(problem.nbytes),
    )  # fmt: skip


def of_tokens(op: str, shape: str, tokens: int, make: Callable[[], Problem]) -> Case:
    """Make the case of an op on each token, beside the reference on tensors of its own."""
    providers: dict[str, Provider] = {}
    for name, backend in (("rlkernels", "cpu"), ("torch reference", "torch")):
        torch.manual_seed(0)
        problem = make()
        if problem.reset:
            problem.reset()
        providers[name] = partial(problem.call, backend)
    return Case(
        op, shape, providers, str(problem.dtype).removeprefix("torch."),
        limit=("read and write", problem.nbytes / copy_bandwidth(int(problem.nbytes) // 2)), work=("tokens", tokens),
    )  # fmt: skip


def write(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Case:
    make = partial(attention.write, tokens, (heads, dim), attention.BLOCK_SIZE, dtype, CPU)
    return of_tokens("write_kv", f"{tokens} tokens, {heads} heads of {dim}", tokens, make)


def merge(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Case:
    make = partial(attention.merge, tokens, heads, dim, dtype, CPU)
    return of_tokens("merge_attention", f"{tokens} x {heads} x {dim}", tokens, make)


def grouped(groups: int, members: int, prefix: int, suffix: int) -> Case:
    """Make the case of forward and backward; the peer attends to each [prefix | suffix] separately."""
    samples = make_samples(itertools.count(), 0, groups, prefix, members, suffix)
    layout = TreeLayout.from_sequences([prompt + answer for prompt, answer in samples])
    arms = {"rlkernels": two_levels(samples, layout), "torch SDPA, repeated": padded(layout)}
    shape = f"{groups} groups of {members}, P {prefix}, S {suffix}, {ON_HEADS}, trained"
    return make_case("grouped_attention", shape, layout, arms, "torch SDPA, repeated")


def cases(quick: bool) -> Iterator[Case]:
    torch.manual_seed(0)
    size = 1 if quick else 16  # sixteen times 64 MiB of keys and values
    for dtype in (BF16, F32):
        for per_kv in (1, 6):
            yield decode(4 * size * 4 // dtype.itemsize, 2048, (8 * per_kv, 8, 128), dtype)
    for heads in ((3, 1, 32), (6, 2, 32)):
        for dtype in (BF16, F32):
            yield decode(256, 40, heads, dtype)
    for dtype in (BF16, F32):
        yield prefill(size, 1024, 128, (48, 8, 128), dtype)
    for per_kv in (1, 6):
        yield shared(1 if quick else 8, 16, 2048, 128, (8 * per_kv, 8, 128), BF16)
    yield write(256 * size, 8, 128, BF16)
    yield merge(256 * size, 48, 128, BF16)
    yield grouped(1 if quick else 4, 8, 512, 64)
