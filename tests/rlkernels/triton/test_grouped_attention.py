"""Grouped attention for training in Triton: through the interpreter here, compiled where there is a GPU."""

from functools import partial

import pytest
import torch
from paged_problems import check_grouped, check_grouped_without_tokens_or_gradients, check_tree

import rlkernels

triton_grouped = pytest.importorskip("rlkernels.prefix_cache.triton_grouped", reason="this machine lacks triton")
LAYOUTS = {
    "odd": ([5, 0, 3, 40], [2, 4, 1, 0, 6, 3, 37, 1], [0, 3, 5, 6, 8]),
    "no suffixes": ([35, 1], [], [0, 0, 0]),
    "no prefixes": ([0], [32, 31, 33], [0, 3]),
    "several tiles": ([66], [35, 3], [0, 2]),
}


def check(layout, heads, kv_heads, dim, dtype):
    """Judge a layout; return a function that computes output and gradients, and its results."""
    attend = partial(rlkernels.grouped_attention, backend="triton")
    return check_grouped(attend, rlkernels.GroupedLayout(*layout), heads, kv_heads, dim, dtype)


@pytest.mark.parametrize(("layout", "heads", "dim", "dtype"), [
    *((layout, (2, 1), 40, torch.float32) for layout in LAYOUTS.values()),
    *((LAYOUTS["odd"], (2, 1), 20, dtype) for dtype in (torch.bfloat16, torch.float16)),
    *((([17], [9, 20], [0, 2]), (2, 2), dim, torch.float32) for dim in (1, 80, 256)),
])  # fmt: skip
def test_equals_the_reference(layout, heads, dim, dtype):
    check(layout, *heads, dim, dtype)


@pytest.mark.parametrize(
    ("name", "heads"), [("several tiles", (2, 1)), pytest.param("odd", (6, 2), marks=pytest.mark.slow)]
)
def test_a_long_prefix_is_cut_into_pieces(monkeypatch, name, heads):
    """The gradients of its keys are sums of those of its pieces, the same bits in every run."""
    monkeypatch.setattr(triton_grouped, "SHORT", 1)
    layout = rlkernels.GroupedLayout(*LAYOUTS[name])
    assert len(triton_grouped.key_tiles(layout, 32, heads[0] // heads[1], heads[1])[1])
    run_again, first = check(LAYOUTS[name], *heads, 40, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, run_again(), strict=True))


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), ([256] * 8, [256] * 64, [*range(0, 65, 8)])])
@pytest.mark.parametrize(("group", "short"), [(1, 1), (1, 4096), (7, 4096)])
def test_pieces_meet_every_query_once_and_none_is_much_longer(monkeypatch, layout, group, short):
    monkeypatch.setattr(triton_grouped, "SHORT", short)
    layout = rlkernels.GroupedLayout(*layout)
    programs, tiles = triton_grouped.key_tiles(layout, 64, group, 1)
    num_cut = len(tiles)
    queries = {}
    longest = 0
    for first, stop, start, end, piece in programs.tolist():
        queries.setdefault(first, []).extend(range(start, end))
        if piece >= 0:
            assert tiles[piece // triton_grouped.PIECES].tolist() == [first, stop]
        longest = max(longest, end - start)
    for prefix, suffixes in layout.spans():
        for node in [prefix, *suffixes]:
            end = [prefix, *suffixes][-1].stop if node is prefix else node.stop
            for first in range(node.start, node.stop, 64):
                assert sorted(queries.pop(first)) == [*range(first, end)]
    assert not queries
    assert not num_cut or 2 * num_cut < len(programs) - (triton_grouped.PIECES - 1) * num_cut  # of all tiles
    lengths = (programs[:, 3] - programs[:, 2]).tolist()
    assert lengths == sorted(lengths, reverse=True)
    if len(layout.prefix_lens) == 8:  # of 288 tiles 32 are gone through for 2,304 queries and less, the others for 256
        expected = (2304, 0) if group == 1 and short > 1 else (288, 32)
        assert (longest, num_cut) == expected


@pytest.mark.parametrize("kv_heads", [2, 8, 32])
@pytest.mark.parametrize("groups", [1, 8, 64])
def test_what_pieces_take_is_bounded(groups, kv_heads):
    """Where many programs run, a long one hides behind the others and is not cut."""
    layout = rlkernels.GroupedLayout([4096] * groups, [512] * 8 * groups, [*range(0, 8 * groups + 1, 8)])
    programs, tiles = triton_grouped.key_tiles(layout, 64, 7, kv_heads)
    num_cut = len(tiles)
    assert num_cut * kv_heads < triton_grouped.AT_ONCE
    assert bool(num_cut) == (groups == 1 and kv_heads == 2)
    lengths = programs[:, 3] - programs[:, 2]
    work = int(lengths.sum())
    tiles = len(programs) - (triton_grouped.PIECES - 1) * num_cut
    share = work * kv_heads / triton_grouped.AT_ONCE
    assert lengths.max() <= max(share, 2 * work / tiles, triton_grouped.SHORT / 7)


def test_log_sum_exp_and_its_gradient():
    attend = partial(rlkernels.tree_attention, return_lse=True, backend="triton")
    check_tree(attend, rlkernels.GroupedLayout(*LAYOUTS["odd"]), 2, 1, 40, torch.float32)


def test_nothing_and_no_gradient():
    check_grouped_without_tokens_or_gradients("triton")
