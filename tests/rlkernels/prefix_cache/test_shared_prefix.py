"""Shared-prefix attention, compiled, against the same sequences unshared in float64."""

import pytest
import torch
from paged_problems import DTYPES, assert_close_as_plain, paged

import rlkernels
from rlkernels.prefix_cache import reference

GROUPS = {  # prefix tokens, then own keys and queries of each member
    "decode": [(32, [1, 16, 17, 40], [1] * 4), (256, [130, 1], [1, 1])],
    "one member": [(16, [5], [1])],
    "nothing shared": [(0, [20, 3], [1, 3])],
    "length 1": [(1, [3, 9], [1, 2])],  # in a block of its own
    "empty suffix": [(32, [0, 5], [0, 1]), (16, [0], [0])],
    "ragged": [(48, [9, 70, 6], [9, 70, 0]), (0, [33], [2]), (1040, [3, 3], [3, 1])],
    "tall": [(80, [7] * 20, [2] * 20)],
    "empty group": [(16, [], []), (16, [4], [1])],
}


def build(groups, dtype, heads, kv_heads, dim, block_size=16):
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_shared_equals_unshared(cpu_isa, name, dtype):
    for heads, kv_heads, dim in ((2, 2, 80), (6, 1, 64)):
        shared, unshared, scale = build(GROUPS[name], dtype, heads, kv_heads, dim)
        ours = rlkernels.shared_prefix_attention(*shared, scale=scale, return_lse=True, backend="cpu")
        plain = rlkernels.paged_attention(*unshared, scale=scale, return_lse=True, backend="cpu")
        floats = [t.double() for t in unshared[:3]]
        exact = reference.paged_attention(*floats, *unshared[3:], scale)
        floor = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps * 0.5
        for one, other, gold in zip(ours, plain, exact):
            if gold.numel():
                assert_close_as_plain(one, other, gold, floor)


def test_wrong_groups():
    shared, _, scale = build(GROUPS["decode"], torch.float32, 2, 2, 64)
    for backend in ("cpu", "torch"):
        wrong = [t.clone() for t in shared]
        wrong[5][-1] -= 1
        with pytest.raises(ValueError, match="group_starts must rise from 0 to 6"):
            rlkernels.shared_prefix_attention(*wrong, scale=scale, backend=backend)
        wrong = [t.clone() for t in shared]
        wrong[3][0, 1] = 10_000
        with pytest.raises(ValueError, match="group_tables must hold blocks"):
            rlkernels.shared_prefix_attention(*wrong, scale=scale, backend=backend)
