"""Attention by FlashAttention of torch, with a stand-in on a CPU."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from paged_problems import check_tree, paged
from pretend_gpu import flash_backward, flash_forward

import rlkernels
from rlkernels.prefix_cache import GroupedLayout, reference, torch_flash
from rlkernels.proof.cases import attention

CPU, F32 = torch.device("cpu"), torch.float32


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """List the calls of FlashAttention; arguments 5, 6 and 8 are the longest query, the longest key and ``causal``."""
    forward = Mock(side_effect=flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    monkeypatch.setattr(torch_flash, "accepts_cache", lambda query, cache: True)
    monkeypatch.setattr(torch_flash, "supports", lambda *tensors: True)
    monkeypatch.setattr(torch_flash, "_last_rows", {})
    return forward.call_args_list


@pytest.mark.parametrize("case", [
    (attention.paged, attention.ODD[0], attention.ODD[1], (4, 2, 32), 8),
    (attention.paged, [1, 5], [1, 1], (7, 1, 16), 16),
    (attention.shared, [0, 33, 257], 3, [1, 18, 64], 1, (8, 2, 16), 16),
    (attention.shared, [5, 103], 2, [7, 20], 4, (4, 2, 32), 8),
])  # fmt: skip
def test_paged_attention(case, launches):
    make, *args = case
    problem = make(*args, F32, CPU)
    torch.testing.assert_close(problem.call("torch"), problem.exact(), rtol=1e-4, atol=1e-5, check_dtype=False)
    assert launches and all(args[8] == (args[5] > 1) for args, _ in launches if make is attention.paged)


@pytest.mark.parametrize("piece", [1 << 26, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_without_flash_attention_decodes_all_sequences_at_once(monkeypatch, piece, dtype):
    """One sequence has no keys, one has NaN keys, which change no other sequence."""
    monkeypatch.setattr(torch_flash, "supports", lambda *tensors: False)
    monkeypatch.setattr(torch_flash, "MAX_KEY_ELEMENTS", piece)
    single_calls = []
    exact = reference.paged_attention
    monkeypatch.setattr(reference, "paged_attention", lambda *args: single_calls.append(args) or (None, None))
    monkeypatch.setattr(rlkernels.prefix_cache, "_check_lengths", lambda *_: None)
    pages = attention.Pages(20, 4, 2, 16, dtype, CPU)
    lens = [5, 12, 0, 1, 7]
    tables = pages.table(lens)
    (keys, values) = pages.finished()
    values[int(tables[1, 0]), 0] = torch.nan
    query = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    args = query, keys, values, tables, pages.ints(lens), pages.ints(range(6))
    out, lse = rlkernels.paged_attention(*args, scale=0.25, backend="torch", return_lse=True)
    assert not single_calls and out.dtype == dtype and out[1].isnan().any() and not out[2].any()
    expected, expected_lse = exact(query.double(), keys.double(), values.double(), *args[3:], 0.25)
    finite_rows = [0, 3, 4]
    torch.testing.assert_close(
        out[finite_rows].double(), expected[finite_rows], atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0
    )
    torch.testing.assert_close(lse[finite_rows], expected_lse[finite_rows], atol=1e-5, rtol=1e-5, check_dtype=False)
    rlkernels.paged_attention(*args[:-1], pages.ints([0, 2, 3, 3, 4, 5]), scale=0.25, backend="torch")
    assert len(single_calls) == 1, "prompts are computed one by one"


def test_prefixes_are_gathered_once_per_group(launches):
    problem = attention.shared([40, 40], 8, [4], 1, (4, 2, 16), 8, F32, CPU)
    problem.call("torch")
    assert sorted((args[5], args[6], args[8]) for args, _ in launches) == [(1, 4, False), (8, 40, False)]


def test_the_host_waits_in_the_first_layer_only(monkeypatch):
    problem = attention.shared([40, 40], 8, [4], 1, (4, 2, 16), 8, F32, CPU)
    problem.call("torch")
    monkeypatch.setattr(rlkernels.prefix_cache, "_check_lengths", lambda *_: None)  # a CPU looks at all numbers
    monkeypatch.setattr(rlkernels.prefix_cache, "_check_values", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "tolist", read := Mock())
    problem.call("torch")
    read.assert_not_called()


def test_each_stream_computes_its_own_rows(monkeypatch):
    """No stream waits for the kernels of another one that compute them."""
    tables = attention.Pages(9, 4, 1, 16, F32, CPU).table([12, 12])
    arguments = 4, tables, torch.tensor([5, 12]), torch.tensor([0, 1, 2])
    monkeypatch.setattr(torch_flash, "_stream", lambda device: 0)
    rows = torch_flash._rows(*arguments)
    assert torch_flash._rows(*arguments) is rows
    monkeypatch.setattr(torch_flash, "_stream", lambda device: 7)
    assert torch_flash._rows(*arguments) is not rows


@pytest.mark.parametrize("inference", [False, True])
def test_lengths_that_change_in_place_are_noticed(inference):
    with torch.inference_mode(inference):
        pages = attention.Pages(9, 4, 1, 16, F32, CPU)
        tables = pages.table([12, 12])
        lens = pages.ints([5, 12])
        starts = pages.ints([0, 1, 2])
        caches = pages.finished()
        query = torch.randn(2, 1, 16)
        for length in (5, 9):
            lens[0] = length
            args = (query, *caches, tables, lens, starts)
            result = rlkernels.paged_attention(*args, scale=0.25, backend="torch")
            torch.testing.assert_close(result, reference.paged_attention(*args, 0.25)[0])


GROUPS = [
    ([5, 33], [1, 18, 64, 0, 5], [0, 2, 5]), ([0, 3], [2, 4], [0, 1, 2]), ([4], [], [0, 0]),
    ([3, 0, 2, 7], [0, 0, 4, 6], [0, 2, 3, 3, 4]),
]  # fmt: skip


@pytest.mark.parametrize("numbers", [1, 20 * 64, 1 << 25])
@pytest.mark.parametrize("layout", GROUPS)
def test_grouped_attention_and_its_gradients(layout, numbers, launches, monkeypatch):
    """Compute all groups at once, some at a time, or each alone; a prefix is gathered once for its group."""
    monkeypatch.setattr(torch_flash, "MAX_QUERY_ELEMENTS", numbers)
    problem = attention.grouped(layout, (4, 2, 16), F32, CPU)
    torch.testing.assert_close(problem.call("torch"), problem.exact(), rtol=1e-4, atol=1e-5, check_dtype=False)
    on_prefixes = [args for args, _ in launches if not args[8]]
    assert len(on_prefixes) <= len(launches) / 2 and (numbers < 1 << 25 or len(launches) <= 2)
    groups = zip(layout[0], layout[2], layout[2][1:])
    assert sum(len(args[1]) for args in on_prefixes) == sum(n for n, a, b in groups if any(layout[1][a:b]))


@pytest.mark.parametrize("layout", GROUPS)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_a_tree_of_two_levels_and_the_gradient_of_its_log_sum_exp(layout, dtype):
    check_tree(
        partial(rlkernels.tree_attention, return_lse=True, backend="torch"), GroupedLayout(*layout), 4, 2, 16, dtype
    )


TREE = [[*range(5)], [*range(4), 9, 8], [*range(4), 9, 7, 6], [5, 6]]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("layout", [GroupedLayout([5, 4, 3], [3, 2, 6, 2], [0, 1, 3, 4]),
                                    rlkernels.TreeLayout.from_sequences(TREE)])  # fmt: skip
def test_a_token_of_nan_stays_in_its_subtree(tensor, layout):
    """All that sees its key or value is NaN, the log-sum-exp too, also where the kernels say inf; nothing else is."""
    tensors = [torch.randn(layout.num_tokens, h, 16) for h in (4, 2, 2)]
    tensors[tensor][layout.num_tokens // 3] = torch.nan
    outputs = []
    for attend in (reference.tree_attention, torch_flash.tree_attention):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out, lse = attend(*leaves, layout, 0.25)
        outputs.append([out, lse, *torch.autograd.grad(out.sum(), leaves)])
    torch.testing.assert_close(outputs[1], outputs[0], equal_nan=True)


def test_a_cuda_graph_does_not_repeat_rows_of_earlier_tables(monkeypatch):
    """It would, since the rows of the call before are known without a wait."""
    problem = paged([5, 40, 9], [1, 1, 1], dim=16)
    call = partial(rlkernels.paged_attention, *problem.args(), scale=0.25, backend="torch")
    call()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="no CUDA graph can record"):
        call()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tensor", [0, 1, 2])
@pytest.mark.parametrize(("make", "args"), [
    (attention.paged, ([5, 9], [2, 3], (4, 2, 16), 8)), (attention.shared, ([16, 16], 2, [4], 2, (4, 2, 16), 8)),
])  # fmt: skip
def test_what_is_not_finite_among_pages_shows_in_output_and_log_sum_exp(make, args, tensor, bad):
    """NaN where a query sees it; -inf as log-sum-exp where all its weights are 0, as where it sees no key."""
    torch.manual_seed(0)
    problem = make(*args, F32, CPU)
    query = problem.inputs["query"]
    caches = problem.inputs["caches"]
    if tensor:
        caches[tensor - 1][:, 1, :, 0] = bad
    else:
        query[1, :, 0] = bad
    torch.testing.assert_close(problem.call("torch"), problem.exact(), equal_nan=True, check_dtype=False)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_tree_attention_and_the_gradient_of_its_log_sum_exp(dtype, launches):
    layout = rlkernels.TreeLayout.from_sequences(
        [[*range(9)], [*range(9), 1], [*range(5), 2, 2], [*range(5), 2, 3], [7]]
    )
    check_tree(partial(rlkernels.tree_attention, return_lse=True, backend="torch"), layout, 4, 2, 16, dtype)
    assert len(launches) == 1, "one launch for all nodes"


def test_a_window_is_an_argument_of_the_kernels_and_cuts_the_keys(launches):
    """Check two levels as well, whose prefix is then gathered for each suffix."""
    attend = partial(rlkernels.tree_attention, return_lse=True, backend="torch")
    sequences = [[*range(9)], [*range(9), 1], [*range(5), 2, 2], [*range(5), 2, 3], [7]]
    for layout in (rlkernels.TreeLayout.from_sequences(sequences), GroupedLayout(*GROUPS[0])):
        for window in (1, 3, 6):
            check_tree(attend, layout, 4, 2, 16, F32, window=window)
            assert launches[-1].kwargs["window_size_left"] == window - 1
            spans = (layout.nodes[:, 1] - layout.nodes[:, 0]).tolist()
            assert len(launches[-1].args[1]) <= sum(spans) + len(spans) * (window - 1)
    for queries in ([1, 7, 9], [1, 1, 1]):
        problem = paged([5, 40, 9], queries, dim=16)
        result = rlkernels.paged_attention(*problem.args(), scale=0.25, window=6, backend="torch")
        torch.testing.assert_close(result, reference.paged_attention(*problem.args(), 0.25, 6)[0], rtol=1e-4, atol=1e-5)
        assert launches[-1].kwargs["window_size_left"] == 5


@pytest.mark.parametrize("layout", [GroupedLayout([5], [3, 2], [0, 2]), rlkernels.TreeLayout.from_sequences(TREE)])
def test_transforms_and_gradients_of_gradients(layout):
    """FlashAttention has no rule for the first two: plain torch, which a CPU takes too, computes them."""
    query, key, value = (torch.randn(2, layout.num_tokens, h, 8) for h in (4, 2, 2))

    def attend(q):
        return rlkernels.tree_attention(q, key[0], value[0], layout, scale=0.3, backend="torch")

    def exact(q):
        return reference.tree_attention(q, key[0], value[0], layout, 0.3)[0]

    torch.testing.assert_close(torch.vmap(attend)(query), torch.stack([*map(exact, query)]))
    result, expected = (torch.func.jvp(f, (query[0],), (query[1],)) for f in (attend, exact))
    torch.testing.assert_close(result, expected)
    leaf = query[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(attend(leaf).square().sum(), leaf, create_graph=True)
    message = "the gradient of tree_attention has no gradient; backend='torch' on a CPU has one"
    with pytest.raises(RuntimeError, match=message):
        grad.sum().backward()


def test_between_the_passes_no_gathered_key_is_held():
    layout = GroupedLayout([50], [1] * 20, [0, 20])
    leaves = [torch.randn(layout.num_tokens, h, 16, requires_grad=True) for h in (4, 2, 2)]
    saved_sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_sizes.append(t.numel()) or t, lambda t: t):
        rlkernels.grouped_attention(*leaves, layout, scale=0.25, backend="torch")
    tokens = layout.num_tokens
    assert sum(saved_sizes) == tokens * 16 * (4 + 2 + 2 + 4) + tokens * 4 + 3  # the output, its log-sum-exp, two seeds


def test_what_suits_the_kernels(monkeypatch):
    monkeypatch.undo()
    capability = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])

    def fits(dtype=torch.bfloat16, dim=64, on_gpu=True):
        return torch_flash.supports(SimpleNamespace(dtype=dtype, shape=(3, 2, dim), is_cuda=on_gpu, device="cuda"))

    assert fits() and fits(torch.float16, 256)
    assert not fits(torch.float32) and not fits(dim=260) and not fits(dim=36) and not fits(dim=0)
    assert not fits(on_gpu=False)
    wide = SimpleNamespace(dtype=torch.bfloat16, shape=(3, 2, 256), is_cuda=True, device="cuda")
    assert torch_flash.supports_training(wide, with_lse=False)
    assert not torch_flash.supports_training(wide, with_lse=True)
    capability[0] = (7, 5)
    assert not fits()
