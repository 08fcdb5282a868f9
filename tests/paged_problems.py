"""Random paged problems, and the plain attention they must equal."""

from dataclasses import dataclass

import torch
from accuracy import assert_as_plain

import rlkernels
from rlkernels.prefix_cache import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Problem:
    """Arguments of paged_attention, with NaN wherever nothing may be read."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    scale: float

    def args(self) -> tuple[torch.Tensor, ...]:
        return (self.query, *self.tables())

    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.key_cache, self.value_cache, self.block_tables, self.seq_lens, self.query_starts

    def to(self, dtype: torch.dtype) -> "Problem":
        floats = (t.to(dtype) for t in (self.query, self.key_cache, self.value_cache))
        return Problem(*floats, self.block_tables, self.seq_lens, self.query_starts, self.scale)


def tables_for(lens, block_size, pool, width=None):
    """Block tables of sequences of these lengths, taking blocks from the front of ``pool``; -1 beyond their ends."""
    counts = [-(-n // block_size) for n in lens]
    out = torch.full((len(lens), width if width is not None else max(counts, default=0) + 1), -1, dtype=torch.int32)
    for row, count in zip(out, counts):
        row[:count] = torch.tensor([pool.pop() for _ in range(count)], dtype=torch.int32)
    return out


def paged(lens, q_lens, *, heads=4, kv_heads=2, dim=32, block_size=4, dtype=torch.float32, spare=3) -> Problem:
    blocks = sum(-(-n // block_size) for n in lens) + spare
    pool = torch.randperm(blocks).tolist()
    caches = torch.full((2, blocks, block_size, kv_heads, dim), torch.nan)
    tables = tables_for(lens, block_size, pool)
    for table, length in zip(tables, lens):
        position = torch.arange(length)
        blocks_of = table[position // block_size].long()
        caches[:, blocks_of, position % block_size] = torch.randn(2, length, kv_heads, dim)
    starts = torch.tensor([0, *torch.tensor(q_lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    query = torch.randn(int(starts[-1]), heads, dim)
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    return Problem(query.to(dtype), *caches.to(dtype), tables, seq_lens, starts, dim**-0.5)


def shared_prefix(groups, dtype, heads, kv_heads, dim, block_size=16):
    """(arguments of shared_prefix_attention, the same sequences as a float64 paged problem)."""
    prefix_lens = [p for p, _, _ in groups]
    own_lens = [n for _, lens, _ in groups for n in lens]
    queries = [q for _, _, qs in groups for q in qs]
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size, "dtype": dtype}
    problem = paged(prefix_lens + own_lens, [0] * len(prefix_lens) + queries, **sizes)
    count = len(groups)
    group_tables, own = problem.block_tables[:count], problem.block_tables[count:]
    starts = torch.tensor([0, *(len(lens) for _, lens, _ in groups)]).cumsum(0).int()
    group_lens, lens = problem.seq_lens[:count].clone(), problem.seq_lens[count:].clone()
    query_starts = problem.query_starts[count:].clone()
    caches = problem.key_cache, problem.value_cache
    shared = (problem.query, *caches, group_tables, group_lens, starts, own, lens, query_starts)

    # unshared, token by token in blocks of one, so that a prefix may end anywhere
    group_of = torch.arange(count).repeat_interleave(starts.diff().long())
    rows = []
    for b, g in enumerate(group_of.tolist()):
        parts = ((group_tables[g], int(group_lens[g])), (own[b], int(lens[b])))
        rows.append([int(t[i // block_size]) * block_size + i % block_size for t, n in parts for i in range(n)])
    tables = torch.full((len(rows), max(map(len, rows), default=0)), -1, dtype=torch.int32)
    for table, row in zip(tables, rows):
        table[: len(row)] = torch.tensor(row, dtype=torch.int32)
    total = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    single = [c.flatten(0, 1)[:, None] for c in caches]
    return shared, (problem.query, *single, tables, total, query_starts), problem.scale


def check_attention(op: str, arguments, scale: float, backend: str, relative: float = 0.0):
    """Judges "paged_attention" or "shared_prefix_attention" by its reference -> output and log-sum-exp."""
    ours = getattr(rlkernels, op)(*arguments, scale=scale, return_lse=True, backend=backend)
    plain = getattr(reference, op)(*arguments, scale)
    exact = getattr(reference, op)(*(t.double() for t in arguments[:3]), *arguments[3:], scale)
    assert_as_plain(ours, plain, exact, relative=relative)
    return ours
