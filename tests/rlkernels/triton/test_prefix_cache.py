"""Paged attention in Triton: through the interpreter here, compiled where there is a GPU."""

import pytest
import torch

import rlkernels
from rlkernels.prefix_cache import reference

triton_kernels = pytest.importorskip("rlkernels.prefix_cache.triton_kernels", reason="this machine lacks triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def splits(request, monkeypatch):
    """Keys in one piece, or cut as for a small batch on a large GPU."""
    monkeypatch.setattr(triton_kernels, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr(triton_kernels, "processors", lambda _: 0 if request.param == 1 else 64)
    return request.param


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def starts_of(counts):
    return ints([0, *counts]).cumsum(0, dtype=torch.int32)


def pages(lens, kv_heads, dim, block_size, dtype):
    """Block tables of sequences of these lengths and their caches; -1 and NaN wherever nothing may be read."""
    counts = [-(-n // block_size) for n in lens]
    pool = torch.randperm(sum(counts) + 2).int()
    caches = torch.full((2, len(pool), block_size, kv_heads, dim), torch.nan)
    tables = torch.full((len(lens), max(counts, default=0) + 1), -1, dtype=torch.int32)
    for row, n, count, blocks in zip(tables, lens, counts, pool[: sum(counts)].split(counts)):
        row[:count] = blocks
        at = torch.arange(n)
        caches[:, blocks[at // block_size].long(), at % block_size] = torch.randn(2, n, kv_heads, dim)
    return (*caches.to(dtype), tables)


def assert_as_plain(function, floats, rest, scale):
    """Error at most twice that of the reference in the same dtype, both against float64."""
    ours = getattr(rlkernels, function)(*floats, *rest, scale=scale, return_lse=True, backend="triton")
    plain = getattr(reference, function)(*floats, *rest, scale)
    exact = getattr(reference, function)(*(t.double() for t in floats), *rest, scale)
    assert_close(ours, plain, exact)


def assert_close(ours, plain, exact):
    for a, b, gold in zip(ours, plain, exact):
        assert a.dtype == b.dtype and a.shape == gold.shape and not a.isnan().any()
        seen = gold > -torch.inf
        assert torch.equal(a > -torch.inf, seen)
        if seen.any():
            error, allowed = ((x.double() - gold)[seen].abs().max() for x in (a, b))
            assert error <= 2 * allowed + 2e-6, f"error {error:.3g}, of plain torch {allowed:.3g}"


def check_paged(lens, q_lens, heads, kv_heads, dim, block_size, dtype, view=lambda t: t):
    key_cache, value_cache, tables = pages(lens, kv_heads, dim, block_size, dtype)
    query = view(torch.randn(sum(q_lens), heads, dim).to(dtype))
    assert_as_plain(
        "paged_attention", (query, key_cache, value_cache), (tables, ints(lens), starts_of(q_lens)), dim**-0.5
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged(splits, dtype):
    check_paged([1, 17, 64, 130, 3], [1, 0, 5, 1, 3], 6, 2, 24, 4, dtype)


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 4, 4), (80, 2, 1), (96, 5, 1), (128, 2, 2), (256, 1, 1)])
def test_head_dims(splits, dim, heads, kv_heads):
    check_paged([70, 9], [1, 4], heads, kv_heads, dim, 16, torch.bfloat16)


def test_prefill_of_several_tiles_and_blocks_of_one():
    check_paged([150, 40], [150, 33], 3, 1, 16, 1, torch.float32)


def test_non_contiguous(splits):
    check_paged([33, 20], [3, 2], 4, 2, 16, 8, torch.float32, lambda t: t.transpose(0, 2).contiguous().transpose(0, 2))
    key, value, tables = pages([33, 20], 2, 16, 8, torch.float32)
    caches = [c.transpose(1, 3).contiguous().transpose(1, 3) for c in (key, value)]
    query = torch.randn(2, 4, 16)
    assert_as_plain("paged_attention", (query, *caches), (tables, ints([33, 20]), ints([0, 1, 2])), 0.2)


def test_query_and_cache_of_different_dtypes():
    key, value, tables = pages([33, 20], 2, 16, 8, torch.bfloat16)
    query = torch.randn(2, 4, 16)
    assert_as_plain("paged_attention", (query, key, value), (tables, ints([33, 20]), ints([0, 1, 2])), 0.2)


SHARED = {  # prefix tokens; keys and queries of each sequence of its group
    "decode": [(32, [1, 16, 17], [1] * 3), (80, [50, 1], [1, 1])],
    "nothing shared": [(0, [20, 3], [1, 3])],
    "one key": [(1, [3, 9], [1, 2])],
    "ragged": [(20, [9, 24, 6], [9, 20, 0]), (0, [33], [2]), (45, [3, 3], [3, 1])],
    "empty group": [(16, [], []), (16, [4], [1])],
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_shared_prefix(splits, name, dtype):
    groups = SHARED[name]
    prefixes, own = [g[0] for g in groups], [n for g in groups for n in g[1]]
    q_lens = [q for g in groups for q in g[2]]
    key, value, tables = pages(prefixes + own, 2, 24, 8, dtype)
    query = torch.randn(sum(q_lens), 6, 24).to(dtype)
    shared = (tables[: len(groups)], ints(prefixes), starts_of([len(g[1]) for g in groups]))
    rest = (*shared, tables[len(groups) :], ints(own), starts_of(q_lens))
    assert_as_plain("shared_prefix_attention", (query, key, value), rest, 0.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 1), (7, 3, 80), (0, 2, 16)])
def test_merge(tokens, heads, dim, dtype):
    a, b = torch.randn(2, tokens, heads, dim).to(dtype)
    lse_a, lse_b = torch.randn(2, tokens, heads) * 10
    if tokens > 3:
        lse_a[:2], lse_b[1:3] = -torch.inf, -torch.inf  # row 1: neither side saw a key
        a[:2], b[1:3] = torch.nan, torch.nan
    ours = rlkernels.merge_attention(a, lse_a, b, lse_b, backend="triton")
    plain = reference.merge_attention(a, lse_a, b, lse_b)
    exact = reference.merge_attention(a.double(), lse_a.double(), b.double(), lse_b.double())
    assert_close(ours, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_only_the_slots(dtype):
    caches = torch.full((2, 5, 4, 3, 20), torch.nan, dtype=dtype)
    key, value = torch.randn(2, 6, 3, 40)[..., ::2]
    slots = torch.tensor([19, 0, 5, 6, 12, 2])
    rlkernels.write_kv(key, value, *caches, slots, backend="triton")
    flat = caches.flatten(1, 2)
    assert torch.equal(flat[0, slots], key.to(dtype)) and torch.equal(flat[1, slots], value.to(dtype))
    assert flat.isnan().sum() == 2 * 14 * 60
    rlkernels.write_kv(key[:0], value[:0], *caches, slots[:0], backend="triton")


def test_writing_counts_as_a_change():
    caches, new = torch.zeros(2, 5, 4, 3, 20), torch.randn(2, 1, 3, 20)
    version = caches._version
    rlkernels.write_kv(*new, *caches, torch.tensor([7]), backend="triton")
    assert caches._version > version
    with pytest.raises(ValueError, match="key must not require grad, because write_kv has no gradient"):
        rlkernels.write_kv(new[0].requires_grad_(), new[1], *caches, torch.tensor([7]), backend="triton")


def test_no_queries():
    key, value, tables = pages([5], 2, 16, 4, torch.float32)
    args = (torch.randn(0, 4, 16), key, value, tables, ints([5]), ints([0, 0]))
    out, lse = rlkernels.paged_attention(*args, scale=1.0, return_lse=True, backend="triton")
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


def test_opcheck():
    ops = torch.ops.rlkernels
    key, value, tables = pages([9, 12], 1, 16, 4, torch.float32)
    paged = (torch.randn(2, 2, 16), key, value, tables, ints([9, 12]), ints([0, 1, 2]))
    torch.library.opcheck(ops.paged_attention_triton.default, (*paged, 0.5))
    groups = (ints([[0]]), ints([4]), ints([0, 2]))
    torch.library.opcheck(ops.shared_prefix_attention_triton.default, (*paged[:3], *groups, *paged[3:], 0.5))
    out, lse = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2)
    torch.library.opcheck(ops.merge_attention_triton.default, (out[0], lse[0], out[1], lse[1]))
    new = torch.randn(2, 1, 16)
    torch.library.opcheck(ops.write_kv_triton.default, (new, new, key, value, torch.tensor([3, 8])))
