"""Paged attention in Triton: through the interpreter here, compiled where there is a GPU."""

import pytest
import torch
from paged_problems import DTYPES, check_attention, check_change, check_merge, check_write_kv, paged, shared_prefix

triton_kernels = pytest.importorskip("rlkernels.prefix_cache.triton_kernels", reason="this machine lacks triton")


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def splits(request, monkeypatch):
    """Run a test with keys in one piece, and cut as for a small batch on a large GPU."""
    monkeypatch.setattr(triton_kernels, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr(triton_kernels, "processors", lambda _: 0 if request.param == 1 else 64)
    return request.param


def check_paged(problem):
    check_attention("paged_attention", problem.args(), problem.scale, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged(splits, dtype):
    check_paged(paged([1, 17, 64, 130, 3], [1, 0, 5, 1, 3], heads=6, kv_heads=2, dim=24, dtype=dtype))


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 4, 4), (80, 2, 1), (96, 5, 1), (128, 2, 2), (256, 1, 1)])
def test_head_dims(splits, dim, heads, kv_heads):
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": 16}
    check_paged(paged([70, 9], [1, 4], **sizes, dtype=torch.bfloat16))


def test_prefill_of_several_tiles_and_of_nothing_and_blocks_of_one():
    check_paged(paged([5], [0], dim=16))
    check_paged(paged([150, 40], [150, 33], heads=3, kv_heads=1, dim=16, block_size=1))


@pytest.mark.parametrize(("generation", "dim", "keys", "stages"), [
    (8, 64, 64, 2), (9, 64, 64, 2), (10, 64, 64, 3), (12, 64, 64, 2),
    (8, 128, 32, 2), (9, 128, 64, 2), (10, 128, 64, 3), (12, 128, 32, 2),
])  # fmt: skip
def test_keys_in_a_block_of_a_prefill(generation, dim, keys, stages):
    """By the compiled kernels' registers: tests/ptx/test_resources.py."""
    plan = triton_kernels._plan(1024, 8, dim, 2, 16, 2, 32, False, False, torch.device("cpu"), generation)
    assert [plan.options[name] for name in ("BLOCK_M", "BLOCK_N", "num_stages")] == [128, keys, stages]


def test_non_contiguous(splits):
    problem = paged([33, 20], [3, 2], dim=16, block_size=8)
    problem.query = problem.query.transpose(0, 2).contiguous().transpose(0, 2)
    check_paged(problem)
    for name in ("key_cache", "value_cache"):
        setattr(problem, name, getattr(problem, name).transpose(1, 3).contiguous().transpose(1, 3))
    check_paged(problem)


def test_query_and_cache_of_different_dtypes():
    problem = paged([33, 20], [1, 1], dim=16, block_size=8, dtype=torch.bfloat16)
    problem.query = problem.query.float()
    check_paged(problem)


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
    shared, _, scale = shared_prefix(SHARED[name], dtype, heads=6, kv_heads=2, dim=24, block_size=8)
    check_attention("shared_prefix_attention", shared, scale, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 1), (9, 3, 80), (0, 2, 16)])
def test_merge(tokens, heads, dim, dtype):
    check_merge("triton", tokens, heads, dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_only_the_slots_which_counts_as_a_change(dtype):
    check_write_kv("triton", 6, torch.float32, dtype)
    check_change("triton")


def test_opcheck():
    ops = torch.ops.rlkernels
    problem = paged([9, 12], [1, 1], heads=2, kv_heads=1, dim=16)
    torch.library.opcheck(ops.paged_attention_triton.default, (*problem.args(), 0.5))
    shared, _, _ = shared_prefix(SHARED["one key"], torch.float32, heads=2, kv_heads=1, dim=16)
    torch.library.opcheck(ops.shared_prefix_attention_triton.default, (*shared, 0.5))
    out = torch.randn(2, 3, 2, 16)
    lse = torch.randn(2, 3, 2)
    torch.library.opcheck(ops.merge_attention_triton.default, (out[0], lse[0], out[1], lse[1]))
    rows = torch.randn(2, 1, 16)
    torch.library.opcheck(ops.write_kv_triton.default, (rows, rows, *problem.tables()[:2], torch.tensor([3, 8])))
