"""The compiled attention ops against their references, per instruction set; shared prefixes against sequences that
share nothing, in float64."""

from itertools import product
from unittest.mock import patch

import paged_problems
import pytest
import torch
from accuracy import assert_as_plain
from paged_problems import DTYPES, Problem, attend_in_their_dtype, check_attention, check_merge, check_write_kv, paged
from support import assert_equal

import rlkernels
from rlkernels.prefix_cache import reference

SHAPES = {  # keys and queries per sequence, then the rest
    "decode": ([1, 16, 17, 63, 64, 65, 300], [1] * 7, {"block_size": 16}),
    "ragged": ([9, 40, 70, 129, 5, 33], [9, 3, 70, 1, 0, 8], {"block_size": 16}),
    "gqa": ([75, 130, 20], [1, 6, 20], {"heads": 12, "kv_heads": 2, "block_size": 8}),
    "many heads": ([40, 41], [2, 3], {"heads": 14, "kv_heads": 1, "block_size": 1}),
    "long": ([1024, 1025, 2053], [1, 5, 1], {"dim": 16, "block_size": 32}),
    "long prefill": ([1100], [70], {"dim": 16, "block_size": 32}),
    "wide": ([70, 3], [40, 3], {"heads": 16, "kv_heads": 4, "dim": 128}),
    # blocks of 16: with bfloat16 these take the matrix unit where there is one
    "tall 64": ([1, 64, 65], [1, 17, 2], {"heads": 4, "kv_heads": 1, "dim": 64, "block_size": 16}),
    "tall 96": ([70, 33, 128], [5, 1, 0], {"heads": 6, "kv_heads": 1, "dim": 96, "block_size": 16}),
    "tall 128": ([1, 16, 65, 1100], [1, 2, 7, 1], {"heads": 12, "kv_heads": 2, "dim": 128, "block_size": 16}),
    "tall 256": ([40, 130], [3, 1], {"heads": 4, "kv_heads": 2, "dim": 256, "block_size": 32}),
    **{f"heads of {dim}": ([1, 70, 33], [1, 1, 5], {"dim": dim})
       for dim in (1, 8, 16, 20, 24, 64, 80, 96, 128, 256, 512)},
}  # fmt: skip


def check(problem: Problem, floor: float = 1e-6):
    with patch.object(reference, "attend", attend_in_their_dtype):
        return check_attention("paged_attention", problem.args(), problem.scale, "cpu", floor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_paged_attention(cpu_isa, shape, dtype):
    lens, q_lens, options = SHAPES[shape]
    check(paged(lens, q_lens, dtype=dtype, **options))


def test_large_scores_and_small_blocks(cpu_isa):
    problem = paged([50, 129], [2, 1], block_size=3)
    problem.query *= 60
    check(problem, floor=2e-5)  # float32 rounds scores of 128 to 256 by up to 8e-6


@pytest.mark.parametrize("scale", [0.125, -0.125])
def test_scores_that_rise_and_fall(cpu_isa, scale):
    """The running maximum moves by large and by small steps."""
    problem = paged([500, 130], [1, 9], heads=6, kv_heads=1, dim=64, block_size=16, dtype=torch.bfloat16)
    problem.scale = scale
    for step, block in enumerate(problem.block_tables[0, :32].tolist()):
        problem.key_cache[block] *= 1 + step % 7
    check(problem)


def test_non_contiguous_query_and_cache(cpu_isa):
    problem = paged([30, 5], [3, 5], heads=4, kv_heads=2, dim=32)
    expected = check(problem)
    wide = torch.full((8, 3, 4, 40), torch.nan)
    wide[:, 1, :, :32] = problem.query
    problem.query = wide[:, 1, :, :32]
    caches = torch.stack([problem.key_cache, problem.value_cache], 3)
    problem.key_cache, problem.value_cache = caches.unbind(3)
    assert_equal(check(problem), expected)
    problem.query = problem.query.transpose(0, 2).contiguous().transpose(0, 2)
    assert_equal(check(problem), expected)


def test_query_and_cache_of_different_dtypes(cpu_isa):
    problem = paged([30, 70], [3, 1], dtype=torch.bfloat16)
    problem.query = problem.query.float()
    check_attention("paged_attention", problem.args(), problem.scale, "cpu")


@pytest.mark.parametrize("bits", [0x7FC00001, -1])  # -1: memory full of ones
def test_every_nan_is_one_and_stays_in_its_sequence(cpu_isa, bits):
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    problem = paged([30, 70], [1, 1])
    problem.key_cache[problem.block_tables[1, 2], 1] = nan
    out, lse = rlkernels.paged_attention(*problem.args(), scale=1.0, return_lse=True, backend="cpu")
    assert out[1].isnan().all() and lse[1].isnan().all() and out[0].isfinite().all()
    ones = torch.ones(2, 4, 32)
    lses = (nan.expand(2, 4).contiguous(), torch.zeros(2, 4))
    infinite = torch.full((2, 4), torch.inf)  # no softmax has such a denominator
    for (a, b), backend in product((lses, lses[::-1], (infinite, lses[1])), ("cpu", "torch")):
        assert all(t.isnan().all() for t in rlkernels.merge_attention(ones, a, ones, b, backend=backend))


def test_empty(cpu_isa):
    problem = paged([], [])
    out, lse = rlkernels.paged_attention(*problem.args(), scale=1.0, return_lse=True, backend="cpu")
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4)
    problem = paged([5, 0], [0, 0])
    assert rlkernels.paged_attention(*problem.args(), scale=1.0, backend="cpu").shape == (0, 4, 32)


def test_a_sequence_gets_the_same_bits_in_any_batch(cpu_isa, set_threads):
    problem = paged([300, 2053, 40, 1100], [1, 1, 1, 1], dim=16, block_size=16)
    batched = rlkernels.paged_attention(*problem.args(), scale=problem.scale, backend="cpu")
    for i in range(4):
        set_threads(1 + i % 2)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        single = rlkernels.paged_attention(
            problem.query[i : i + 1], problem.key_cache, problem.value_cache, problem.block_tables[i : i + 1],
            problem.seq_lens[i : i + 1], starts, scale=problem.scale, backend="cpu",
        )  # fmt: skip
        assert torch.equal(single[0], batched[i])


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_kv(cpu_isa, dtype, cache_dtype):
    check_write_kv("cpu", 300, dtype, cache_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_attention(cpu_isa, dtype):
    check_merge("cpu", 1023, 3, 20, dtype, floor=1e-6)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_shared_equals_unshared(cpu_isa, name, dtype):
    for heads, kv_heads, dim in ((2, 2, 80), (6, 1, 64)):
        shared, unshared, scale = paged_problems.shared_prefix(GROUPS[name], dtype, heads, kv_heads, dim)
        result = rlkernels.shared_prefix_attention(*shared, scale=scale, return_lse=True, backend="cpu")
        plain = rlkernels.paged_attention(*unshared, scale=scale, return_lse=True, backend="cpu")
        floats = [t.double() for t in unshared[:3]]
        exact = reference.paged_attention(*floats, *unshared[3:], scale)
        floor = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps * 0.5
        assert_as_plain(result, plain, exact, floor)


@pytest.mark.parametrize("name", GROUPS)
def test_the_reference_equals_sequences_that_share_nothing(name):
    shared, unshared, scale = paged_problems.shared_prefix(GROUPS[name], torch.float64, 4, 2, 8)
    result = reference.shared_prefix_attention(*shared, scale)
    torch.testing.assert_close(result, reference.paged_attention(*unshared, scale))


def test_wrong_groups():
    shared, _, scale = paged_problems.shared_prefix(GROUPS["decode"], torch.float32, 2, 2, 64)
    faults = (5, -1, 5, "group_starts must rise from 0 to 6"), (3, (0, 1), 10_000, "group_tables must hold blocks")
    for backend, (number, place, value, message) in product(("cpu", "torch"), faults):
        wrong = [t.clone() for t in shared]
        wrong[number][place] = value
        with pytest.raises(ValueError, match=message):
            rlkernels.shared_prefix_attention(*wrong, scale=scale, backend=backend)
