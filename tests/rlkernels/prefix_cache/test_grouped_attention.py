"""Grouped attention for training: outputs and gradients against the reference, which is tested on its own."""

import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accuracy import with_gradients
from paged_problems import DTYPES, attend_in_their_dtype, check_grouped, check_grouped_without_tokens_or_gradients
from support import assert_equal

import rlkernels
from rlkernels.prefix_cache import reference

LAYOUTS = {
    "odd": ([5, 0, 3, 70], [2, 4, 1, 0, 6, 3, 129, 1], [0, 3, 5, 6, 8]),
    "many small": ([9] * 6, [4, 7, 3] * 4, [0, 2, 4, 6, 8, 10, 12]),
    "no suffixes": ([65, 1], [], [0, 0, 0]),
    "no prefixes": ([0], [64, 63, 65], [0, 3]),
    "long": ([300], [100, 90], [0, 2]),
}


def check(layout, heads, kv_heads, dim, dtype, function=None):
    function = function or partial(rlkernels.grouped_attention, backend="cpu")
    # exp(score - lse) loses a few more bits than a softmax: allow for that relative to the largest element
    slack = {"floor": 1e-6, "relative": 2e-6}
    with patch.object(reference, "attend", attend_in_their_dtype):
        check_grouped(function, layout, heads, kv_heads, dim, dtype, **slack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_stands_in_on_a_gpu_equals_the_reference(name, dtype):
    check(rlkernels.GroupedLayout(*LAYOUTS[name]), 4, 2, 32, dtype, function=reference.tree_attention_by_sdpa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_reference(cpu_isa, name, dtype):
    check(rlkernels.GroupedLayout(*LAYOUTS[name]), 4, 2, 32, dtype)


def test_large_scratch_is_right_and_given_back():
    check(rlkernels.GroupedLayout([500], [100, 90], [0, 2]), 4, 1, 512, torch.float32)  # over two million floats
    tokens = 300
    heads = 64
    dim = 512  # 30 MB of scratch and more for each thread
    query = torch.zeros(tokens, heads, dim)
    key = torch.zeros(tokens, 1, dim)
    lse = torch.zeros(tokens, heads)
    nodes = torch.tensor([[0, tokens, tokens]])

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    resident_bytes = resident()
    results = torch.ops.rlkernels.tree_attention_backward(query, None, query, key, key, query, lse, nodes, 1.0)
    assert resident() - resident_bytes - sum(t.nbytes for t in results) < 50 << 20


def test_nothing_and_no_gradient():
    check_grouped_without_tokens_or_gradients("cpu")
    strided = torch.zeros(4, 2, 17)[:0, :, 1::2]  # counts as contiguous, for it holds nothing
    layout = rlkernels.GroupedLayout([], [], [0])
    assert rlkernels.grouped_attention(strided, strided, strided, layout, scale=1.0).shape == (0, 2, 8)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("bad", [None, "a", [[1], [2, 3]], {1: 2}, [2**70], [1.5]])
def test_lengths_that_are_none_are_named(number, bad):
    lengths = [[4], [3, 2], [0, 2]]
    lengths[number] = bad
    with pytest.raises(TypeError, match=f"{('prefix_lens', 'suffix_lens', 'group_starts')[number]} must "):
        rlkernels.GroupedLayout(*lengths)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_lengths_of_any_integer_dtype(dtype):
    layout = rlkernels.GroupedLayout(*(torch.tensor(lens, dtype=dtype) for lens in ([4], [3, 2], [0, 2])))
    assert torch.equal(layout.nodes, rlkernels.GroupedLayout([4], [3, 2], [0, 2]).nodes)


def test_a_layout_keeps_its_lengths():
    lengths_tensors = [torch.tensor(lengths) for lengths in ([4], [3, 2], [0, 2])]
    layouts = rlkernels.GroupedLayout(*lengths_tensors), rlkernels.GroupedLayout([4], [3, 2], [0, 2])
    for lengths in lengths_tensors:
        lengths += 1000
    assert layouts[0].spans() == layouts[1].spans()
    tensors = torch.randn(3, 9, 2, 8)
    results = (
        with_gradients(partial(rlkernels.grouped_attention, layout=x, scale=0.5), tensors, tensors[0]) for x in layouts
    )
    assert_equal(*results)
