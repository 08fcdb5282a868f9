"""Paged attention and its neighbours on a CPU, against torch's attention on contiguous copies of the same keys.

Block tables are shuffled, so a sequence's blocks are anywhere in the cache. Peers get keys that were gathered untimed:
their time is that without paging.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import rlkernels
from bench import Case, Missing, read_bandwidth
from bench._runner import match
from rlkernels.prefix_cache import GroupedLayout, PagedKVCache, reference

BLOCK_SIZE = 16
Heads = tuple[int, int, int]  # query heads, KV heads, elements per head
BF16, F32 = torch.bfloat16, torch.float32


def blocks_of(length: int) -> int:
    return -(-length // BLOCK_SIZE)


def ints(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).int()


class Batch:
    """Sequences of one length in shuffled blocks: the arguments of ``paged_attention``."""

    def __init__(self, count: int, length: int, queries: int, heads: Heads, dtype: torch.dtype):
        q_heads, kv_heads, dim = heads
        self.scale = dim**-0.5
        self.group = q_heads // kv_heads  # query heads for each KV head
        blocks = count * blocks_of(length)
        self.cache = PagedKVCache(1, kv_heads, dim, num_blocks=blocks, block_size=BLOCK_SIZE, dtype=dtype)
        self.key = self.cache.key_cache[0]
        self.value = self.cache.value_cache[0]
        for cache in (self.key, self.value):  # repeats a million numbers, because drawing a gigabyte takes long
            flat = cache.flatten()
            numbers = torch.randn(min(len(flat), 1_000_003)).to(dtype)
            for chunk in flat.split(len(numbers)):
                chunk.copy_(numbers[: len(chunk)])
        self.tables = ints(torch.randperm(count * blocks_of(length))).view(count, -1)
        self.lens = ints([length] * count)
        self.starts = ints(range(0, count * queries + 1, queries))
        self.query = torch.randn(count * queries, q_heads, dim).to(dtype)
        self.args = (self.query, self.key, self.value, self.tables, self.lens, self.starts)
        self.nbytes = 2 * count * length * kv_heads * dim * dtype.itemsize

    def expected(self) -> torch.Tensor:
        """Return the result of the reference for the first sequences."""
        count = min(len(self.lens), 8)
        query = self.query[: int(self.starts[count])]
        args = (query, self.key, self.value, self.tables[:count], self.lens[:count], self.starts[: count + 1])
        return reference.paged_attention(*args, self.scale)[0]

    def contiguous(self, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values of sequences, [B, Hk, length, d]."""

        def gather(cache: torch.Tensor) -> torch.Tensor:
            return cache[table.long()].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()

        return gather(self.key), gather(self.value)


def match_first_rows(out: torch.Tensor, expected: torch.Tensor) -> str:
    return match(out[: len(expected)], expected) if out.shape[1:] == expected.shape[1:] else "a part"


def sdpa(batch: Batch, causal: bool) -> Callable[[], torch.Tensor]:
    """Make torch's attention on [B, H, L, d] -> [T, Hq, d]; queries are the last ones of each sequence."""
    count = len(batch.lens)
    length = int(batch.lens[0])
    key, value = batch.contiguous(batch.tables, length)
    query = batch.query.unflatten(0, (count, -1)).transpose(1, 2)
    mask = None
    if causal:
        mask = reference.causal(query.shape[2], length, query.device)

    def run() -> torch.Tensor:
        out = functional.scaled_dot_product_attention(
            query, key, value, mask, scale=batch.scale, enable_gqa=batch.group > 1
        )
        return out.transpose(1, 2).flatten(0, 1)

    return run


def flex(batch: Batch) -> Callable[[], torch.Tensor] | Missing:
    """Make compiled FlexAttention on the contiguous copy; every query sees all keys."""
    from torch.nn.attention.flex_attention import flex_attention

    count = len(batch.lens)
    length = int(batch.lens[0])
    key, value = batch.contiguous(batch.tables, length)
    query = batch.query.unflatten(0, (count, -1)).transpose(1, 2).contiguous()
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    @torch.no_grad()
    def run() -> torch.Tensor:
        out = compiled(query, key, value, scale=batch.scale, enable_gqa=batch.group > 1)
        return out.transpose(1, 2).flatten(0, 1)

    try:
        run()
    except Exception as error:  # any exception of the compiler is the reason
        return Missing(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return run


def decode(count: int, length: int, heads: Heads, dtype: torch.dtype) -> Case:
    batch = Batch(count, length, 1, heads, dtype)
    providers: dict[str, Any] = {
        "rlkernels": partial(rlkernels.paged_attention, *batch.args, scale=batch.scale),
        "torch SDPA, contiguous": sdpa(batch, causal=False),
    }
    if dtype == BF16 and length > 1000:  # it takes long to compile
        providers["FlexAttention, contiguous"] = flex(batch)
    return Case(
        op="paged_attention",
        shape=f"decode {count} x {length}, {heads[0]} on {heads[1]} heads of {heads[2]}",
        dtype=str(dtype).removeprefix("torch."),
        providers=providers,
        reference=batch.expected,
        compare=match_first_rows,
        limit=("read bandwidth", batch.nbytes / read_bandwidth(batch.nbytes)),
        work=("B", batch.nbytes),
    )


def prefill(count: int, length: int, queries: int, heads: Heads, dtype: torch.dtype) -> Case:
    batch = Batch(count, length, queries, heads, dtype)
    pairs = count * (queries * length - queries * (queries - 1) // 2)
    return Case(
        op="paged_attention",
        shape=f"suffix prefill {count} x {queries} of {length}, {heads[0]} on {heads[1]} heads of {heads[2]}",
        dtype=str(dtype).removeprefix("torch."),
        providers={
            "rlkernels": partial(rlkernels.paged_attention, *batch.args, scale=batch.scale),
            "torch SDPA, contiguous": sdpa(batch, causal=True),
        },
        reference=batch.expected,
        compare=match_first_rows,
        work=("FLOP", 4 * pairs * heads[0] * heads[2]),
    )


def shared(groups: int, members: int, prefix: int, suffix: int, heads: Heads, dtype: torch.dtype) -> Case:
    """Make the case of decoding with one read of each group's prefix, against one read by every member."""
    count = groups * members
    batch = Batch(groups, prefix + members * suffix, 1, heads, dtype)  # for the blocks of a whole group
    q_heads, kv_heads, dim = heads
    query = torch.randn(count, q_heads, dim).to(dtype)
    suffix_tables = batch.tables[:, blocks_of(prefix) :].reshape(count, -1).contiguous()
    group_tables = batch.tables[:, : blocks_of(prefix)].contiguous()
    starts = ints(range(count + 1))
    group_starts = ints(range(0, count + 1, members))
    prefix_lens = ints([prefix] * groups)
    suffix_lens = ints([suffix] * count)
    full_lens = ints([prefix + suffix] * count)
    split_args = (
        query,
        batch.key,
        batch.value,
        group_tables,
        prefix_lens,
        group_starts,
        suffix_tables,
        suffix_lens,
        starts,
    )
    tables = torch.cat([group_tables.repeat_interleave(members, 0), suffix_tables], 1)
    unshared_args = (query, batch.key, batch.value, tables, full_lens, starts)
    key, value = batch.contiguous(group_tables, prefix)
    stacked_query = (
        query.view(groups, members, kv_heads, -1, dim).transpose(1, 2).flatten(2, 3).flatten(0, 1).contiguous()
    )

    def attend_to_prefixes() -> torch.Tensor:  # without the suffixes and the merge
        score = torch.bmm(stacked_query, key.flatten(0, 1).mT) * batch.scale
        return torch.bmm(score.softmax(-1), value.flatten(0, 1))

    tokens = groups * prefix + count * suffix
    nbytes = 2 * tokens * kv_heads * dim * dtype.itemsize
    return Case(
        op="shared_prefix_attention",
        shape=f"{groups} groups of {members}, P {prefix}, S {suffix}, {q_heads} on {kv_heads} heads of {dim}",
        dtype=str(dtype).removeprefix("torch."),
        providers={
            "rlkernels": partial(rlkernels.shared_prefix_attention, *split_args, scale=batch.scale),
            "rlkernels, unshared": partial(rlkernels.paged_attention, *unshared_args, scale=batch.scale),
            "torch.bmm, prefix only": attend_to_prefixes,
        },
        reference=lambda: reference.paged_attention(
            query[:8], batch.key, batch.value, tables[:8], full_lens[:8], starts[:9], batch.scale
        )[0],
        compare=match_first_rows,
        limit=("read bandwidth", nbytes / read_bandwidth(nbytes)),
    )


def write(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Case:
    caches = torch.zeros(2, 2, blocks_of(tokens), BLOCK_SIZE, heads, dim, dtype=dtype)
    key, value = torch.randn(2, tokens, heads, dim).to(dtype)
    slots = torch.randperm(blocks_of(tokens))[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    slots = slots.flatten()[:tokens].contiguous()

    def run(backend: str, target: torch.Tensor) -> torch.Tensor:
        rlkernels.write_kv(key, value, target[0], target[1], slots, backend=backend)
        return target

    return Case(
        op="write_kv",
        shape=f"{tokens} tokens, {heads} heads of {dim}",
        dtype=str(dtype).removeprefix("torch."),
        providers={"rlkernels": partial(run, "cpu", caches[0]), "torch reference": partial(run, "torch", caches[1])},
        limit=("read and write", 4 * key.nbytes / read_bandwidth(4 * key.nbytes)),
        work=("tokens", tokens),
    )


def merge(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Case:
    outs = torch.randn(2, tokens, heads, dim).to(dtype)
    lses = torch.randn(2, tokens, heads)
    args = (outs[0], lses[0], outs[1], lses[1])
    nbytes = 3 * (args[0].nbytes + args[1].nbytes)
    return Case(
        op="merge_attention",
        shape=f"{tokens} x {heads} x {dim}",
        dtype=str(dtype).removeprefix("torch."),
        providers={
            "rlkernels": partial(rlkernels.merge_attention, *args),
            "torch reference": partial(reference.merge_attention, *args),
        },
        limit=("read and write", nbytes / read_bandwidth(nbytes)),
        work=("tokens", tokens),
    )


def grouped(groups: int, members: int, prefix: int, suffix: int, heads: Heads) -> Case:
    """Make the case of forward and backward; the peer attends to each [prefix | suffix] separately with torch."""
    q_heads, kv_heads, dim = heads
    layout = GroupedLayout([prefix] * groups, [suffix] * groups * members, range(0, groups * members + 1, members))
    shapes = [(layout.num_tokens, h, dim) for h in (q_heads, kv_heads, kv_heads)]
    query, key, value = inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0])
    sequences = [(prefix, suffix) for prefix, suffixes in layout.spans() for suffix in suffixes]
    rows = torch.stack([torch.cat([torch.arange(s.start, s.stop) for s in spans]) for spans in sequences])  # [B, P + S]

    def gradients(out: torch.Tensor) -> list[torch.Tensor]:
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]

    def plain() -> list[torch.Tensor]:
        q, k, v = (t[rows].transpose(1, 2) for t in inputs)  # [B, H, P + S, d]
        padded_out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=dim**-0.5, enable_gqa=q_heads > kv_heads
        ).transpose(1, 2)
        index = torch.cat([rows[::members, :prefix].flatten(), rows[:, prefix:].flatten()])
        packed_out = torch.cat([padded_out[::members, :prefix].flatten(0, 1), padded_out[:, prefix:].flatten(0, 1)])
        return gradients(torch.zeros_like(weight).index_put((index,), packed_out))

    def ours() -> list[torch.Tensor]:
        return gradients(rlkernels.grouped_attention(query, key, value, layout, scale=dim**-0.5))

    return Case(
        op="grouped_attention",
        shape=f"{groups} groups of {members}, P {prefix}, S {suffix}, {q_heads} on {kv_heads} heads of {dim}, trained",
        providers={"rlkernels": ours, "torch SDPA, repeated": plain},
        reference="torch SDPA, repeated",
    )  # fmt: skip


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
    yield grouped(1 if quick else 4, 8, 512, 64, (6, 2, 64))
