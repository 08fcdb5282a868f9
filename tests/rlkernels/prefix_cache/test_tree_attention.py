"""Attention on the trie of a batch: the layout, output, log-sum-exp and gradients, and that packing changes no bit."""

from collections import Counter
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from accuracy import with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_problems import DTYPES, attend_by_mask, check_tree
from support import assert_equal, every_isa, lacks

import rlkernels
from rlkernels import TreeLayout
from rlkernels.prefix_cache import reference

attend = partial(rlkernels.tree_attention, return_lse=True)
on_cpu = partial(attend, backend="cpu")


@st.composite
def sequence_lists(draw, longest=12):
    """Token sequences that go on from a place in an earlier one: equal, empty, one the beginning of another."""
    tokens = st.lists(st.integers(0, draw(st.sampled_from([0, 1, 60_000]))), max_size=longest)
    sequences = [draw(tokens)]
    for _ in range(draw(st.integers(0, 11))):
        base = draw(st.sampled_from(sequences))
        sequences.append(base[: draw(st.integers(0, len(base)))] + draw(tokens))
    return sequences[draw(st.integers(0, 1)) :]  # without the first, perhaps without any


def numbered(*lengths):
    """Tokens unlike all others."""
    counter = iter(range(10**6, 10**7))
    return [[next(counter) for _ in range(n)] for n in lengths]


def grown(shape):
    """Sequences of tries of one shape, with nodes and paths that cross tiles of 64."""
    system, one, two, *tails = numbered(150, 40, 70, *[50, 57, 1, 64, 4, 130, 3, 3])
    if shape == "turns":  # each the beginning of the next but for its last tokens
        return [system, [*system, *one], [*system, *one[:30], *tails[0]], [*system, *one[:30], *tails[0][:20], *two]]
    if shape == "two prompts":
        return [[*system, *prompt, *tail] for prompt in (one, two) for tail in tails]
    if shape == "many children":
        return [[*system[:61], *tail] for tail in numbered(*[4] * 70)]
    if shape == "comb":  # a fork at every token
        return [[*system[:i], *tail] for i, tail in enumerate(numbered(*[1, 0, 2] * 50))]
    assert shape == "forest"
    return [*numbered(1, 2, 64, 65, 129), *numbered(0), system, system, system[:64]]


SHAPES = ("turns", "two prompts", "many children", "comb", "forest")


def tensors_for(layout, heads=4, kv_heads=2, dim=32, dtype=torch.float32):
    return [torch.randn(layout.num_tokens, h, dim).to(dtype) for h in (heads, kv_heads, kv_heads)]


@given(sequence_lists())
@settings(deadline=None)
def test_the_layout_is_the_trie(sequences):
    layout = TreeLayout.from_sequences(sequences)
    trie = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    children = Counter(tokens[:-1] for tokens in trie)
    assert layout.num_tokens == len(trie) == len(layout.ids)
    assert len(layout.nodes) == sum(len(tokens) == 1 or children[tokens[:-1]] > 1 for tokens in trie)
    place = torch.arange(layout.num_tokens)
    for tokens, places in zip(sequences, layout.places, strict=True):
        assert layout.ids[places].tolist() == tokens
        assert layout.position_ids[places].tolist() == [*range(len(tokens))]
        if tokens:  # its last token sees it and nothing else
            last = places[-1]
            assert torch.equal(((place <= last) & (last < layout.end)).nonzero().flatten(), places)
    assert [i for start, stop, _ in layout.nodes.tolist() for i in range(start, stop)] == place.tolist()
    for (start, stop, end), path in zip(layout.nodes.tolist(), layout.paths(), strict=True):
        assert (layout.end[start:stop] == end).all()
        above = [i for s in path for i in range(s.start, s.stop)]
        assert above == ((place < start) & (start < layout.end)).nonzero().flatten().tolist()
        assert all(a.stop < b.start for a, b in pairwise(path)), "neighbouring stretches are one"
    assert TreeLayout.from_sequences(reversed(sequences)).nodes.equal(layout.nodes), "the order given does not matter"


def test_tokens_as_lists_arrays_and_tensors():
    given = [[3, 1, 4], np.array([3, 1, 5], dtype=np.int32), torch.tensor([3, 2], dtype=torch.int16), (3,), []]
    layout = TreeLayout.from_sequences(iter(given))
    assert layout.ids.tolist() == [3, 1, 4, 5, 2] and layout.end.tolist() == [5, 4, 3, 4, 5]
    assert [p.tolist() for p in layout.places] == [[0, 1, 2], [0, 1, 3], [0, 4], [0], []]
    assert repr(layout) == "TreeLayout(nodes=5, tokens=5)"
    assert TreeLayout.from_sequences(torch.tensor([[1, 2], [1, 3]])).num_tokens == 3
    assert TreeLayout.from_sequences([]).num_tokens == TreeLayout.from_sequences([[], []]).num_tokens == 0
    assert TreeLayout.from_sequences([[-(2**40)], [2**40]]).ids.tolist() == [2**40, -(2**40)]


@pytest.mark.parametrize(("bad", "error", "message"), [
    ([1.5], TypeError, r"sequences\[1\] must hold integers, got \[1.5\]"),
    ([True], TypeError, r"sequences\[1\] must hold integers"),
    ([None], TypeError, r"sequences\[1\] must hold integers"),
    (torch.zeros(1).bfloat16(), TypeError, r"sequences\[1\] must hold integers, got tensor\(\[0"),
    ("ab", ValueError, r"sequences\[1\] must have 1 dimension, got shape \(\)"),
    ([[1, 2]], ValueError, r"sequences\[1\] must have 1 dimension, got shape \(1, 2\)"),
    ([[1], [2, 3]], TypeError, r"sequences\[1\] must hold integers, got \[\[1\], \[2, 3\]\]"),
])  # fmt: skip
def test_what_is_no_row_of_tokens_is_named(bad, error, message):
    with pytest.raises(error, match=message):
        TreeLayout.from_sequences([[1], bad])


def test_two_levels_are_a_tree():
    prompt, *answers = numbered(5, 2, 4, 1)
    tree = TreeLayout.from_sequences([prompt + answer for answer in answers])
    groups = rlkernels.GroupedLayout([5], [2, 4, 1], [0, 3])
    for name in ("position_ids", "end", "nodes"):
        assert getattr(tree, name).equal(getattr(groups, name))
    assert rlkernels.GroupedLayout([5], [3], [0, 1]).nodes.tolist() == [[0, 8, 8]], "no fork, one node"
    query, key, value = tensors_for(tree)
    for backend in ("auto", "torch"):
        out, lse = attend(query, key, value, groups, scale=0.3, backend=backend)
        assert out.equal(rlkernels.grouped_attention(query, key, value, groups, scale=0.3, backend=backend))
        torch.testing.assert_close((out, lse), attend_by_mask(query, key, value, tree, 0.3))


@given(sequence_lists(), st.none() | st.integers(1, 14), st.sampled_from([None, 0.5]))
@settings(max_examples=60, deadline=None)
def test_the_reference_is_attention_by_a_mask(sequences, window, softcap):
    layout = TreeLayout.from_sequences(sequences)
    *tensors, grad = (torch.randn(layout.num_tokens, h, 3, dtype=torch.float64) for h in (4, 2, 2, 4))
    options = {"layout": layout, "scale": 0.3, "window": window, "softcap": softcap}
    expected = with_gradients(partial(attend_by_mask, **options), tensors, grad, grad[..., 0])
    torch.testing.assert_close(with_gradients(partial(attend, **options), tensors, grad, grad[..., 0]), expected)
    if softcap is None:
        torch.testing.assert_close(reference.tree_attention_by_sdpa(*tensors, layout, 0.3, window), expected[0])
    for seen, whole in zip(layout.seen_by_nodes(window), layout.seen_by_nodes(), strict=True):
        above = [i for s in whole[:-1] for i in range(s.start, s.stop)]
        nearest = above if window is None else above[max(len(above) - window + 1, 0) :]
        assert [i for s in seen[:-1] for i in range(s.start, s.stop)] == nearest


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"softcap": 0.5}])
def test_gradients_of_float64_by_differences(options):
    layout = TreeLayout.from_sequences([[1, 2], [1, 3, 4], [5]])
    leaves = [t.double().requires_grad_() for t in tensors_for(layout, 2, 1, 2)]
    assert torch.autograd.gradcheck(partial(attend, layout=layout, scale=0.7, **options), leaves)


@given(sequence_lists(longest=90), st.sampled_from([(4, 2, 32), (3, 3, 20), (7, 1, 16)]), st.sampled_from(DTYPES),
       st.none() | st.integers(1, 150), st.sampled_from([None, 2.0, 50.0]))  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_equals_attention_by_a_mask(sequences, heads, dtype, window, softcap):
    if rlkernels.backend.extension_error():
        lacks("the compiled extension")
    layout = TreeLayout.from_sequences(sequences)
    if layout.num_tokens:
        check_tree(on_cpu, layout, *heads, dtype, size=2, runs=every_isa(), window=window, softcap=softcap)


@pytest.mark.parametrize(("dtype", "window"), [
    (torch.bfloat16, None), *((torch.float32, window) for window in (None, 1, 2, 63, 64, 65, 128, 150, 10**12)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_attention_by_a_mask_across_tiles(compiled, shape, dtype, window):
    check_tree(on_cpu, TreeLayout.from_sequences(grown(shape)), 3, 1, 32, dtype, runs=every_isa(), window=window)


@pytest.mark.parametrize("dim", [1, 20, 64, 80, 128, 130, 512])
def test_head_dims(compiled, dim):
    check_tree(on_cpu, TreeLayout.from_sequences(grown("turns")), 3, 1, dim, torch.float32, runs=every_isa())


@pytest.mark.parametrize("outs", [(True, False), (False, True)])
def test_a_gradient_from_one_of_the_outputs_alone(compiled, outs):
    layout = TreeLayout.from_sequences(grown("turns"))
    *inputs, value = tensors_for(layout)
    grad, settings = torch.randn(layout.num_tokens, 4, 32), {"layout": layout, "scale": 0.3}

    def used(function, query, key):
        return [x for x, is_used in zip(function(query, key, value, **settings), outs) if is_used]

    grads = [g for g, is_used in zip((grad, grad[..., 0]), outs) if is_used]
    ours, expected = (with_gradients(partial(used, f), inputs, *grads) for f in (on_cpu, attend_by_mask))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "options"), [
    ((4, 2, 32), {}), ((6, 1, 64), {}), ((2, 2, 130), {}), ((4, 2, 32), {"window": 70, "softcap": 2.0}),
])  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_changes_no_bit(cpu_isa, shape, heads, options, dtype):
    """Also not that of what is NaN or infinite."""
    sequences = grown(shape)
    layout = TreeLayout.from_sequences(sequences)
    tensors = tensors_for(layout, *heads, dtype)
    attend = partial(rlkernels.tree_attention, return_lse=True, **options)
    together = attend(*tensors, layout, scale=0.2)
    step = max(len(sequences) // 8, 1)
    for tokens, places in zip(sequences[::step], layout.places[::step]):
        alone = TreeLayout.from_sequences([tokens])
        separate = attend(*(t[places] for t in tensors), alone, scale=0.2)
        assert_equal([t[places] for t in together], list(separate))
        others = torch.ones(layout.num_tokens, dtype=torch.bool)
        others[places] = False
        poisoned = [t.clone() for t in tensors]
        for t, poison in zip(poisoned, (torch.nan, torch.inf, torch.nan)):
            t[others] = poison
        beside_nan = attend(*poisoned, layout, scale=0.2)
        assert_equal([t[places] for t in beside_nan], list(separate))


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_threads_change_no_bit(compiled, set_threads, kv_heads):
    """One tree that is cut into several pieces of work, with sums over them."""
    prompts = [[*range(300), *prompt] for prompt in numbered(*[60] * 4)]
    layout = TreeLayout.from_sequences([p + a for p in prompts for a in numbered(*[70] * 3)])
    *tensors, grad = (torch.randn(layout.num_tokens, h, 32) for h in (6, kv_heads, kv_heads, 6))
    outputs = []
    for threads in (1, 2, 5):
        set_threads(threads)
        both = [partial(attend, layout=layout, scale=0.3, window=window) for window in (None, 90)]
        outputs.append([x for one in both for x in with_gradients(one, tensors, grad, grad[..., 0])])
    for other in outputs[1:]:
        assert_equal(other, outputs[0])


def test_of_nothing_comes_nothing_and_views_are_welcome():
    key = torch.ones(2, 1, 8)
    for tokens, heads in ((0, 2), (2, 0)):
        empty = torch.zeros(tokens, heads, 8, requires_grad=True)
        given = empty, key[:tokens], key[:tokens], TreeLayout.from_sequences([range(tokens)])
        for backend in ("auto", "torch"):
            out, lse = attend(*given, scale=1.0, backend=backend)
            assert out.shape == empty.shape and lse.shape == empty.shape[:2] and lse.dtype == torch.float32
            (out.sum() + lse.sum()).backward()
    layout = TreeLayout.from_sequences(grown("turns"))
    tensors = tensors_for(layout)
    views = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in tensors]
    on_layout = partial(attend, layout=layout, scale=0.3)
    torch.testing.assert_close(*(with_gradients(on_layout, t, t[0], t[0][..., 0]) for t in (views, tensors)))
    assert not attend(*tensors, layout, scale=0.3)[1].requires_grad


def test_what_is_wrong_is_named():
    layout = TreeLayout.from_sequences([[1, 2, 3], [1, 4]])
    query, key, value = tensors_for(layout)
    for change, error, message in (
        ({"layout": [4]}, TypeError, "layout must be a TreeLayout, got list"),
        ({"layout": TreeLayout.from_sequences([[1]])}, ValueError, "layout must be for the 4 tokens of query"),
        ({"scale": torch.nan}, ValueError, "scale must be finite"),
        ({"key": key[:3]}, ValueError, r"key must have shape \[4, 2, 32\]"),
        ({"value": value.double()}, TypeError, "value must have dtype torch.float32"),
        ({"window": 0}, ValueError, "window must be >= 1, got 0"),
        ({"window": 1.5}, TypeError, "window must be an integer, got 1.5"),
        ({"softcap": 0.0}, ValueError, "softcap must be > 0, got 0.0"),
        ({"softcap": float("inf")}, ValueError, "softcap must be finite in float32, got inf"),
        ({"softcap": 1e39}, ValueError, r"softcap must be finite in float32, got 1e\+39"),
        ({"backend": "cuda"}, ValueError, "cannot run tree_attention here: tree_attention has no cuda"),
        ({"backend": "triton/x"}, ValueError, "one of auto, cuda, triton, cpu, torch, triton/crossing, got 'triton/x'"),
    ):  # fmt: skip
        given = {"query": query, "key": key, "value": value, "layout": layout, "scale": 0.3} | change
        with pytest.raises(error, match=message):
            rlkernels.tree_attention(**given)
    with pytest.raises(TypeError, match="layout must be a GroupedLayout, got TreeLayout"):
        rlkernels.grouped_attention(query, key, value, layout, scale=0.3)


def test_on_a_gpu_no_scores_are_held_where_nothing_is_proven(monkeypatch):
    kernels = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(rlkernels.backend, "device_kind", lambda device: "cuda")
    monkeypatch.setattr(rlkernels.backend, "_choices", {})
    layout = TreeLayout.from_sequences([[1, 2, 3], [1, 2, 4, 5], [1, 6]])
    with patch.object(reference, "scaled_dot_product_attention", side_effect=kernels) as called:
        rlkernels.tree_attention(*tensors_for(layout), layout, scale=0.3, backend="torch")
        assert called.call_count == len(layout.nodes) == 5
        rlkernels.tree_attention(*tensors_for(layout), layout, scale=0.3, window=2, backend="torch")
    assert called.call_count == 10 and all(call.kwargs["attn_mask"] is not None for call in called.mock_calls[5:])
    query, key, value = (t.requires_grad_() for t in tensors_for(layout))
    saved_shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_shapes.append(t.shape) or t, lambda t: t):
        out = rlkernels.tree_attention(query, key, value, layout, scale=0.3, softcap=2.0, backend="torch")
    assert saved_shapes and all(len(shape) < 2 or shape[-1] == 32 for shape in saved_shapes), "no score [Hq, q, k]"
    expected = torch.autograd.grad(
        attend_by_mask(query, key, value, layout, 0.3, softcap=2.0)[0].sum(), [query, key, value]
    )
    torch.testing.assert_close(torch.autograd.grad(out.sum(), [query, key, value]), expected)
