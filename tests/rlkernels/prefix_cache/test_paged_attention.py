"""The attention ops against plain attention, written without pages, groups or merging."""

from functools import partial

import pytest
import torch
from accuracy import with_gradients
from paged_problems import Problem, check_attention, check_change, check_write_kv, paged
from support import Launches

import rlkernels
from rlkernels.prefix_cache import reference

F = torch.nn.functional


def plain(problem: Problem, i: int, window: int | None) -> torch.Tensor:
    """Compute torch's attention of the queries of sequence i, [q, Hq, d]."""
    length = int(problem.seq_lens[i])
    rows = slice(*problem.query_starts[i : i + 2].tolist())
    size = problem.key_cache.shape[1]
    cells = torch.tensor([int(problem.block_tables[i, t // size]) * size + t % size for t in range(length)])
    key, value = (c.flatten(0, 1)[cells.long()] for c in (problem.key_cache, problem.value_cache))
    queries = rows.stop - rows.start
    mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    mask = mask if window is None else mask.triu(length - queries - window + 1)
    heads = (t.transpose(0, 1) for t in (problem.query[rows], key, value))
    return F.scaled_dot_product_attention(*heads, mask, scale=problem.scale, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_window_beyond_all_integers_of_kernels_is_none(backend):
    problem = paged([3, 6], [1, 6])
    whole, windowed = (
        rlkernels.paged_attention(*problem.args(), scale=problem.scale, window=window, backend=backend)
        for window in (None, 2**70)
    )
    torch.testing.assert_close(windowed, whole)


@pytest.mark.parametrize("window", [None, 1, 4, 6])
def test_paged_attention_is_attention(window):
    """A window is a mask."""
    problem = paged([1, 4, 5, 9, 3, 7], [1, 4, 1, 3, 0, 7], dtype=torch.float64)
    out, lse = rlkernels.paged_attention(*problem.args(), scale=problem.scale, window=window, return_lse=True)
    for i in range(6):
        rows = slice(*problem.query_starts[i : i + 2].tolist())
        torch.testing.assert_close(out[rows], plain(problem, i, window))
    assert lse.shape == problem.query.shape[:2] and lse.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("window", "softcap"), [(1, None), (63, None), (64, 2.0), (65, None), (1100, None), (None, 50.0)]
)
def test_windows_and_soft_caps(cpu_isa, window, softcap, dtype):
    """Decoding, drafts and prefills, of heads that fill vectors and others; keys that are cut into stretches, too."""
    lens = [5, 2500, 130, 64, 65, 200, 1]
    queries = [1, 1, 3, 1, 65, 130, 0]
    for heads, kv_heads, dim in ((4, 2, 32), (6, 1, 20)):
        problem = paged(lens, queries, heads=heads, kv_heads=kv_heads, dim=dim, block_size=16, dtype=dtype)
        scale = 4 * problem.scale
        check_attention("paged_attention", problem.args(), scale, "cpu", 3e-6, 2e-6, window=window, softcap=softcap)


def test_plain_torch_holds_a_piece_of_the_scores_at_a_time(monkeypatch):
    """A GPU uses plain torch where nothing is proven."""
    problem = paged([90, 40], [80, 33], heads=4, kv_heads=2, dim=2)
    attend = partial(rlkernels.paged_attention, *problem.args(), scale=0.3, return_lse=True, backend="torch")
    expected = attend()
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 90 * 7)  # of 4 * 90 * 80
    with Launches() as launches:
        torch.testing.assert_close(attend(), expected)
    assert (
        max(shape.numel() for _, shape in launches.results if len(shape) == 3) == reference.MAX_SCORES
    )  # scores [Hq, q, k]


@pytest.mark.parametrize("first", [0, 3, 10])
def test_merge_is_attention_over_the_union(first):
    """A part without keys may hold anything."""
    score = torch.randn(2, 6, 10, dtype=torch.float64)
    value = torch.randn(10, 6, 8, dtype=torch.float64)

    def part(keys):
        s = score[..., keys]
        out = torch.einsum("thk,khd->thd", s.softmax(-1), value[keys])
        return out if s.numel() else torch.full_like(out, torch.nan), s.logsumexp(-1)

    merged = rlkernels.merge_attention(*part(slice(first)), *part(slice(first, 10)))
    torch.testing.assert_close(merged, part(slice(10)))
    out, lse = rlkernels.merge_attention(*part(slice(0)), *part(slice(0)))
    assert (out == 0).all() and (lse == -torch.inf).all()


LAYOUT = ([5, 0, 3], [2, 4, 1, 0, 6, 3], [0, 3, 5, 6])


def repeated(query, key, value, layout, scale):
    """Attend to every sequence [prefix | suffix] separately; one extra sequence gives the prefix's outputs."""
    out = torch.zeros_like(query)
    for prefix, suffixes in layout.spans():
        for rows in [slice(0, 0), *suffixes]:
            tokens = torch.cat([torch.arange(prefix.start, prefix.stop), torch.arange(rows.start, rows.stop)])
            heads = (t[tokens].transpose(0, 1) for t in (query, key, value))
            sequence_out = F.scaled_dot_product_attention(
                *heads, is_causal=True, scale=scale, enable_gqa=True
            ).transpose(0, 1)
            used = tokens if rows.stop == 0 else tokens[prefix.stop - prefix.start :]
            out = out.index_put((used,), sequence_out[len(sequence_out) - len(used) :])
    return out


def test_grouped_equals_repeated_with_gradients():
    layout = rlkernels.GroupedLayout(*LAYOUT)
    *inputs, grad = (torch.randn(layout.num_tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    functions = (partial(f, layout=layout, scale=0.3) for f in (rlkernels.grouped_attention, repeated))
    results, expected = (with_gradients(function, inputs, grad) for function in functions)
    torch.testing.assert_close(results, expected)


def test_layout():
    layout = rlkernels.GroupedLayout(*LAYOUT)
    assert layout.num_tokens == 24
    assert layout.prefix_starts.tolist() == [0, 12, 18] and layout.suffix_starts.tolist() == [5, 7, 11, 12, 12, 21]
    assert layout.position_ids.tolist() == [*range(5), 5, 6, 5, 6, 7, 8, 5, *range(6), *range(3), 3, 4, 5]
    for wrong in ([0, 3, 6], [1, 3, 5, 6], [0, 3, 2, 6], [0, 3, 5, 5]):
        with pytest.raises(ValueError, match="group_starts must rise from 0 to 6"):
            rlkernels.GroupedLayout(LAYOUT[0], LAYOUT[1], wrong)
    with pytest.raises(ValueError, match="prefix_lens must be between 0 and"):
        rlkernels.GroupedLayout([-1], [], [0, 0])
    assert rlkernels.GroupedLayout([], [], [0]).num_tokens == 0


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_write_kv_writes_only_its_slots_and_autograd_knows(backend):
    check_write_kv(backend, 5, torch.float32, torch.bfloat16)
    check_change(backend)


@pytest.mark.parametrize(("change", "message"), [
    ({"seq_lens": [9, 2]}, "seq_lens must count the queries too, got 2 keys for 3 queries of sequence 1"),
    ({"seq_lens": [17, 5]}, "seq_lens must be between 0 and 16"),
    ({"seq_lens": [-1, 5]}, "seq_lens must be between 0 and 16"),
    ({"query_starts": [0, 1, 3]}, "query_starts must rise from 0 to 4"),
    ({"query_starts": [0, 5, 4]}, "query_starts must rise from 0 to 4"),
    ({"block_tables": [[0, 1, 99, -1], [3, 4, -1, -1]]}, r"block_tables must hold .* got 99 at \[0, 2\]"),
    ({"block_tables": [[0, 1, -1, -1], [3, 4, -1, -1]]}, r"block_tables must hold .* got -1 at \[0, 2\]"),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_wrong_values_are_named(change, message, backend):
    problem = paged([9, 5], [1, 3])
    for name, value in change.items():
        setattr(problem, name, torch.tensor(value, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        rlkernels.paged_attention(*problem.args(), scale=1.0, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_queries_of_no_sequence_and_sequences_of_no_group_raise_by_their_shapes(backend):
    """A GPU does not look at values, and meta tensors have none."""
    problem = paged([9, 5], [1, 3])
    *inputs, tables, lens, starts = (t.to("meta") for t in problem.args())
    nothing = tables[:0], lens[:0], starts[:1]
    settings = {"scale": 1.0, "backend": backend}
    with pytest.raises(ValueError, match="query_starts must rise from 0 to 4, got a single entry, with seq_lens empty"):
        rlkernels.paged_attention(*inputs, *nothing, **settings)
    attend = rlkernels.shared_prefix_attention
    with pytest.raises(ValueError, match="group_starts must rise from 0 to 2, got a single entry, with group_lens"):
        attend(*inputs, *nothing, tables, lens, starts, **settings)
    query, *caches, tables, lens, starts = problem.args()
    nothing = tables[:0], lens[:0], starts[:1]
    assert attend(query[:0], *caches, *nothing, *nothing, **settings).shape == (0, *query.shape[1:])


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_cache_whose_entries_share_memory_is_not_written(name, backend):
    rows = torch.ones(2, 3, 4)
    slots = torch.tensor([1, 6])
    cache = torch.zeros(5, 2, 3, 8)
    caches = {"key_cache": cache[..., :4], "value_cache": cache[..., 4:]}
    rlkernels.write_kv(rows, rows, **caches, slots=slots, backend=backend)
    assert int(cache.sum()) == 2 * rows.numel() and (cache.flatten(0, 1)[slots] == 1).all()
    for overlapping in (
        torch.zeros(5, 1, 3, 4).expand(5, 2, 3, 4),
        torch.zeros(99).as_strided((5, 2, 3, 4), (9, 8, 4, 1)),
    ):
        caches[name] = overlapping
        with pytest.raises(ValueError, match=f"{name} must have a place in memory for every entry, got strides"):
            rlkernels.write_kv(rows, rows, **caches, slots=slots, backend=backend)
        assert not overlapping.any()


def test_wrong_types_and_shapes_are_named():
    problem = paged([9, 5], [1, 3])
    small_layout = rlkernels.GroupedLayout([1], [2], [0, 1])
    narrow = problem.key_cache.repeat_interleave(2, -1)[..., ::2]
    settings = {"scale": 1.0}
    lse = problem.query[..., 0]
    keys = problem.query[:1, :2]
    outside = torch.tensor([-1])
    expected = rlkernels.paged_attention(*problem.args(), **settings)
    torch.testing.assert_close(
        rlkernels.paged_attention(problem.query, narrow, *problem.args()[2:], **settings), expected
    )
    if rlkernels.backend.extension_error() is None:
        with pytest.raises(ValueError, match="key_cache must be contiguous in its last dimension with backend='cpu'"):
            rlkernels.paged_attention(problem.query, narrow, *problem.args()[2:], **settings, backend="cpu")
    attend = rlkernels.paged_attention
    write = rlkernels.write_kv
    merge = rlkernels.merge_attention
    grouped = partial(rlkernels.grouped_attention, problem.query, problem.query, problem.query)
    for call, arguments, options, error, message in (
        (attend, (problem.query[:, :3], *problem.tables()), settings, ValueError, "query must have a multiple of 2"),
        (attend, (problem.query[..., :16], *problem.tables()), settings, ValueError,
         r"query must have shape \[any, any, 32\]"),
        (attend, (*problem.args()[:3], problem.block_tables.long(), *problem.args()[4:]), settings, TypeError,
         "block_tables must have dtype torch.int32"),
        (attend, problem.args(), {"scale": "1"}, TypeError, "scale must be a number, got '1'"),
        (attend, problem.args(), {"scale": float("nan")}, ValueError, "scale must be finite"),
        (write, (keys, keys, *problem.args()[1:3], outside), {}, ValueError, "slots must be between 0 and 31, got -1"),
        (merge, (problem.query, lse.double(), problem.query, lse), {}, TypeError,
         "lse_a must have dtype torch.float32"),
        (grouped, (4,), settings, TypeError, "layout must be a GroupedLayout, got int"),
        (grouped, (small_layout,), settings, ValueError, "layout must be for the 4 tokens of query"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call(*arguments, **options)
