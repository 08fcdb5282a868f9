"""Shared-prefix attention, compiled and its reference, against the same sequences unshared in float64."""

import pytest
import torch
from accuracy import assert_as_plain
from paged_problems import DTYPES, shared_prefix

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_shared_equals_unshared(cpu_isa, name, dtype):
    for heads, kv_heads, dim in ((2, 2, 80), (6, 1, 64)):
        shared, unshared, scale = shared_prefix(GROUPS[name], dtype, heads, kv_heads, dim)
        ours = rlkernels.shared_prefix_attention(*shared, scale=scale, return_lse=True, backend="cpu")
        plain = rlkernels.paged_attention(*unshared, scale=scale, return_lse=True, backend="cpu")
        floats = [t.double() for t in unshared[:3]]
        exact = reference.paged_attention(*floats, *unshared[3:], scale)
        floor = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps * 0.5
        assert_as_plain(ours, plain, exact, floor)


@pytest.mark.parametrize("name", GROUPS)
def test_the_reference_equals_sequences_that_share_nothing(name):
    shared, unshared, scale = shared_prefix(GROUPS[name], torch.float64, 4, 2, 8)
    found = reference.shared_prefix_attention(*shared, scale)
    torch.testing.assert_close(found, reference.paged_attention(*unshared, scale))


def test_wrong_groups():
    shared, _, scale = shared_prefix(GROUPS["decode"], torch.float32, 2, 2, 64)
    for backend in ("cpu", "torch"):
        wrong = [t.clone() for t in shared]
        wrong[5][-1] -= 1
        with pytest.raises(ValueError, match="group_starts must rise from 0 to 6"):
            rlkernels.shared_prefix_attention(*wrong, scale=scale, backend=backend)
        wrong = [t.clone() for t in shared]
        wrong[3][0, 1] = 10_000
        with pytest.raises(ValueError, match="group_tables must hold blocks"):
            rlkernels.shared_prefix_attention(*wrong, scale=scale, backend=backend)
