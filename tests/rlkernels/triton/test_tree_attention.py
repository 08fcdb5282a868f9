"""Attention on tries for training in Triton: through the interpreter here, compiled where there is a GPU."""

from functools import partial

import pytest
import torch
from accuracy import assert_as_plain, with_gradients
from paged_problems import check_grouped, check_grouped_without_tokens_or_gradients, check_tree, visible_pairs
from support import assert_equal

import rlkernels
from rlkernels import GroupedLayout, TreeLayout
from rlkernels.prefix_cache import reference

triton_tree = pytest.importorskip("rlkernels.prefix_cache.triton_tree", reason="this machine lacks triton")
BACKENDS = ("triton", "triton/crossing")
LAYOUTS = {
    "odd": ([5, 0, 3, 40], [2, 4, 1, 0, 6, 3, 37, 1], [0, 3, 5, 6, 8]),
    "no suffixes": ([35, 1], [], [0, 0, 0]),
    "no prefixes": ([0], [32, 31, 33], [0, 3]),
    "several tiles": ([66], [35, 3], [0, 2]),
    "short answers": ([32], [15] * 8, [0, 8]),
}
SYSTEM = [*range(50)]
TREES = {
    "nodes of one token": [[*SYSTEM, -1, *[-2] * 9], [*SYSTEM, -1, -3], [*SYSTEM, -4], [*SYSTEM[:20], -5, 6], [7]],
    "a comb": [[*SYSTEM[:i], *range(100, 100 + i % 3)] for i in range(0, 50, 7)],
    "turns": [[*SYSTEM, *range(200, 230)], [*SYSTEM, *range(200, 220), *range(300, 340)], [*SYSTEM, *range(400, 417)]],
}


def layout_of(name):
    return GroupedLayout(*LAYOUTS[name]) if name in LAYOUTS else TreeLayout.from_sequences(TREES[name])


def check(layout, heads, kv_heads, dim, dtype, backend="triton"):
    """Judge a layout; return a function that computes output and gradients, and its results."""
    op = rlkernels.grouped_attention if isinstance(layout, GroupedLayout) else rlkernels.tree_attention
    return check_grouped(partial(op, backend=backend), layout, heads, kv_heads, dim, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("layout", "heads", "dim", "dtype"), [
    *((name, (2, 1), 40, torch.float32) for name in (*LAYOUTS, *TREES)),
    *(("odd", (2, 1), 20, dtype) for dtype in (torch.bfloat16, torch.float16)),
    pytest.param("nodes of one token", (4, 2), 20, torch.bfloat16, marks=pytest.mark.slow),
])  # fmt: skip
def test_equals_the_reference(layout, heads, dim, dtype, backend):
    check(layout_of(layout), *heads, dim, dtype, backend)


@pytest.mark.parametrize("dim", [1, 80, 256])
def test_head_dims(dim):
    check(GroupedLayout([17], [9, 20], [0, 2]), 2, 2, dim, torch.float32)
    check(TreeLayout.from_sequences(TREES["nodes of one token"][1:]), 1, 1, dim, torch.float32, "triton/crossing")


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_narrower_than_keys_are_padded(backend):
    """As rlkernels.integrations.transformers_attention pads them; the reference takes them as they are."""
    layout = layout_of("nodes of one token")
    tensors = [torch.randn(layout.num_tokens, heads, dim) for heads, dim in ((4, 24), (2, 24), (2, 8))]
    grad = torch.randn(layout.num_tokens, 4, 8)

    def attend(query, key, value):
        wide = torch.nn.functional.pad(value, (0, 16))
        return rlkernels.tree_attention(query, key, wide, layout, scale=0.2, backend=backend)[..., :8]

    def refer(*qkv):
        return reference.tree_attention(*qkv, layout, 0.2)[0]

    plain, exact = (with_gradients(refer, inputs, grad) for inputs in (tensors, [t.double() for t in tensors]))
    assert_as_plain(with_gradients(attend, tensors, grad), plain, exact, floor=0, relative=3e-6)


@pytest.mark.parametrize(("name", "heads", "backend"), [
    ("several tiles", (2, 1), "triton"), ("short answers", (2, 1), "triton/crossing"),
    pytest.param("odd", (6, 2), "triton", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_long_beginning_is_cut_into_pieces(monkeypatch, name, heads, backend):
    """The gradients of its keys are sums of those of its pieces, the same bits in every run."""
    monkeypatch.setattr(triton_tree, "MAX_UNCUT", 1)
    layout = layout_of(name)
    group = heads[0] // heads[1]
    assert len(triton_tree.key_tiles(layout, 32, group, heads[1], backend == "triton/crossing")[1])
    run_again, first = check(layout, *heads, 40, torch.float32, backend)
    assert_equal(run_again(), first)


@pytest.mark.parametrize(("generation", "dim", "ahead", "ahead_crossing", "back_crossing"), [
    (8, 64, 32, 32, 32), (9, 64, 64, 32, 32), (10, 64, 64, 32, 32), (12, 64, 32, 32, 32),
    (8, 128, 64, 64, 64), (9, 128, 32, 32, 32), (9, 256, 32, 32, 32), (9, 512, 16, 16, 16),
])  # fmt: skip
def test_keys_in_a_block(monkeypatch, generation, dim, ahead, ahead_crossing, back_crossing):
    """By the compiled kernels' registers: tests/ptx/test_resources.py."""
    monkeypatch.setattr(triton_tree, "generation", lambda device: generation)
    monkeypatch.setattr(triton_tree, "triton_interpreted", lambda: False)
    query = torch.empty(1, 4, dim, dtype=torch.bfloat16)
    keys = [[sizes["BLOCK_N"] for sizes in triton_tree._all_blocks(query, crosses)] for crosses in (False, True)]
    most = min(64, 8192 // dim)
    assert keys == [[most, ahead, most], [most, ahead_crossing, back_crossing]]


@pytest.mark.parametrize(("dim", "most"), [(16, 64), (32, 64), (64, 32), (256, 16)])
def test_keys_in_a_block_of_float32(dim, most):
    query = torch.empty(1, 4, dim)
    keys = [[sizes["BLOCK_N"] for sizes in triton_tree._all_blocks(query, crosses)] for crosses in (False, True)]
    assert keys == [[most] * 3, [most, most, min(32, most)]]


def assert_longest_first(lengths):
    assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)


@pytest.mark.parametrize("rows", [64, 16])
@pytest.mark.parametrize("name", [*LAYOUTS, *TREES, "two levels"])
def test_tiles_of_two_levels_meet_every_key_once(name, rows):
    """A deeper tree has none."""
    two_levels = name not in TREES
    layout = TreeLayout.from_sequences(TREES["turns"][::2]) if name == "two levels" else layout_of(name)
    tiles = triton_tree.two_level_tiles(layout, rows)
    assert (tiles is not None) == two_levels
    if two_levels:
        seen = visible_pairs(layout)
        met = torch.zeros_like(seen)
        for first, stop, part, prefix, prefix_end in tiles.tolist():
            keys = torch.cat([torch.arange(prefix, prefix_end), torch.arange(part, stop)])
            assert not met[first:stop].any() and stop - first <= rows
            met[first:stop, keys] = seen[first:stop, keys]
        assert torch.equal(met, seen)
        assert_longest_first(tiles[:, 0] - tiles[:, 2] + tiles[:, 4] - tiles[:, 3])


def test_a_trie_of_two_levels_runs_as_groups():
    """The same kernels read the same keys in the same order."""
    rows = [[*range(40), *tail] for tail in ([50], range(60, 95), range(100, 117))]
    trie, groups = TreeLayout.from_sequences(rows), GroupedLayout([40], [1, 35, 17], [0, 3])
    assert torch.equal(trie.end, groups.end)
    query, key, value = torch.randn(3, trie.num_tokens, 2, 16)
    outs = [
        rlkernels.tree_attention(query, key, value, layout, scale=0.3, backend="triton") for layout in (trie, groups)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize(("rows", "block"), [(64, 64), (64, 32), (16, 16)])
@pytest.mark.parametrize("name", [*LAYOUTS, *TREES])
def test_tiles_of_queries_meet_every_key_once(name, rows, block, crosses):
    """A block without a mask is seen as a whole, one with a mask in part."""
    layout = layout_of(name)
    seen = visible_pairs(layout)
    met = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int32, device="cpu")
    tiles, blocks = triton_tree.query_tiles(layout, rows, block, crosses)
    for first, stop, begin, masked, end in tiles.tolist():
        for at, (start, last) in enumerate(blocks[begin:end].tolist(), begin):
            pairs = seen[first:stop, start : last + 1]
            assert pairs.any() and (at >= masked or (pairs.all() and last + 1 - start == block))
            met[first:stop, start : last + 1] += pairs
    assert torch.equal(met, seen.int())
    assert_longest_first(tiles[:, 4] - tiles[:, 2])


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("name", [*LAYOUTS, *TREES, "long"])
@pytest.mark.parametrize(("group", "short"), [(1, 1), (1, 4096), (7, 4096)])
def test_pieces_meet_every_query_once_and_none_is_much_longer(monkeypatch, name, group, short, crosses):
    monkeypatch.setattr(triton_tree, "MAX_UNCUT", short)
    layout = GroupedLayout([256] * 8, [256] * 64, [*range(0, 65, 8)]) if name == "long" else layout_of(name)
    programs, tiles = triton_tree.key_tiles(layout, 64, group, 1, crosses)
    num_cut = len(tiles)
    queries = {}
    keys = {}
    longest = 0
    for first, stop, start, end, piece in programs.tolist():
        queries.setdefault(first, []).extend(range(start, end))
        keys[first] = range(first, stop)
        if piece >= 0:
            assert tiles[piece // triton_tree.PIECES].tolist() == [first, stop]
        longest = max(longest, end - start)
    assert sorted(key for tile in keys.values() for key in tile) == [*range(layout.num_tokens)]
    for first, tokens in queries.items():
        assert sorted(tokens) == [*range(first, layout.end[keys[first]].max())]
    assert not num_cut or 2 * num_cut < len(programs) - (triton_tree.PIECES - 1) * num_cut  # of all tiles
    assert_longest_first(programs[:, 3] - programs[:, 2])
    if name == "long":  # of 288 tiles 32 are gone through for 2,304 queries and less, the others for 256
        expected = (2304, 0) if group == 1 and short > 1 else (288, 32)
        assert (longest, num_cut) == expected


@pytest.mark.parametrize("kv_heads", [2, 8, 32])
@pytest.mark.parametrize("groups", [1, 8, 64])
def test_what_pieces_take_is_bounded(groups, kv_heads):
    """Where many programs run, a long one hides behind the others and is not cut."""
    layout = GroupedLayout([4096] * groups, [512] * 8 * groups, [*range(0, 8 * groups + 1, 8)])
    programs, tiles = triton_tree.key_tiles(layout, 64, 7, kv_heads, False)
    num_cut = len(tiles)
    assert num_cut * kv_heads < triton_tree.CONCURRENT_PROGRAMS
    assert bool(num_cut) == (groups == 1 and kv_heads == 2)
    lengths = programs[:, 3] - programs[:, 2]
    work = int(lengths.sum())
    tiles = len(programs) - (triton_tree.PIECES - 1) * num_cut
    share = work * kv_heads / triton_tree.CONCURRENT_PROGRAMS
    assert lengths.max() <= max(share, 2 * work / tiles, triton_tree.MAX_UNCUT / 7)


@pytest.mark.parametrize("crosses", [False, True])
def test_tables_are_made_once_and_grow_with_the_pairs_of_blocks(crosses):
    """A path of 64 blocks: 64 * 65 / 2 pairs, of which 64 are masked; a second layer makes none."""
    layout = TreeLayout.from_sequences([range(4096)])
    tiles, blocks = triton_tree.query_tiles(layout, 64, 64, crosses)
    assert len(blocks) == 64 * 65 // 2 and int((tiles[:, 4] - tiles[:, 3]).sum()) == 64
    query = torch.randn(4096, 4, 64)
    blocks = triton_tree._all_blocks(query, crosses)
    made = triton_tree._tiles(layout, query, 2, crosses, blocks)
    assert triton_tree._tiles(layout, query.clone(), 2, crosses, blocks) is made and len(layout.kernel_tables) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["odd", "nodes of one token"])
def test_log_sum_exp_and_its_gradient(name, backend):
    attend = partial(rlkernels.tree_attention, return_lse=True, backend=backend)
    check_tree(attend, layout_of(name), 2, 1, 40, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_and_no_gradient(backend):
    check_grouped_without_tokens_or_gradients(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [{"window": 2}, {"softcap": 5.0}], ids=str)
def test_windows_and_soft_caps_are_refused(backend, mask):
    layout = TreeLayout.from_sequences([[1, 2, 3], [1, 4]])
    query = torch.randn(layout.num_tokens, 2, 16)
    with pytest.raises(ValueError, match=f"backend='{backend}' runs tree_attention without window and softcap"):
        rlkernels.tree_attention(query, query, query, layout, scale=0.3, backend=backend, **mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_heads_in_float32_are_left_to_torch(monkeypatch, backend):
    layout = GroupedLayout([2], [1], [0, 1])
    query = torch.randn(layout.num_tokens, 1, 257)
    with pytest.raises(ValueError, match=rf"backend='{backend}' runs .* in float32 with heads of 1 to 256, got 257"):
        rlkernels.grouped_attention(query, query, query, layout, scale=0.3, backend=backend)
    monkeypatch.setenv("RLKERNELS_BACKEND", "triton")
    monkeypatch.setattr(triton_tree, "forward", None)
    actual, expected = (
        rlkernels.grouped_attention(query, query, query, layout, scale=0.3, backend=b) for b in ("auto", "torch")
    )
    assert torch.equal(actual, expected)
