"""Packed groups as rows of queries and gathered keys, against the reference of grouped attention."""

import inspect

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

import python_trainer.model.attention as varlen
from python_trainer.model.attention import PackedLayout
from rlkernels.prefix_cache import reference

LAYOUTS = [
    ([3], [4, 5], [0, 2]),
    ([7, 1, 0, 5], [2, 0, 9, 1, 1, 6, 3], [0, 3, 4, 6, 7]),  # suffixes and prefixes of no tokens
    ([33], [], [0, 0]),
    ([0], [17], [0, 1]),
    ([2, 3], [0, 0, 0], [0, 1, 3]),
    ([], [], [0]),
]


def tensors(tokens, heads, kv_heads, dtype=torch.float64, dim=8, device="cpu"):
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads, dim), *[(tokens, kv_heads, dim)] * 2]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_rows_give_outputs_and_gradients_of_grouped_attention(monkeypatch, layout, heads, kv_heads):
    monkeypatch.setenv("RLKERNELS_BACKEND", "torch")
    layout = PackedLayout(*layout)
    inputs = tensors(layout.num_tokens, heads, kv_heads)
    ours = layout.attend(0, *inputs, 0.3, None)
    wanted = reference.grouped_attention(*inputs, layout, 0.3)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)
    weight = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view_as(ours)
    found, expected = (
        torch.autograd.grad((out * weight).sum(), inputs, materialize_grads=True) for out in (ours, wanted)
    )
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_keys_of_a_prefix_stand_before_those_of_each_answer():
    rows = varlen.varlen_rows(PackedLayout([2, 1], [3, 0, 1], [0, 2, 3]), torch.device("cpu"))
    # [0 1 | 2 3 4 | ] and [5 | 6]
    assert rows.key_index.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 5, 6]
    assert rows.cu_seq_q.tolist() == [0, 2, 5, 6, 7] and rows.cu_seq_k.tolist() == [0, 2, 7, 8, 10]
    assert (rows.max_q, rows.max_k) == (3, 5) and rows.cu_seq_q.dtype == rows.cu_seq_k.dtype == torch.int32


@pytest.mark.parametrize("shares_heads", [True, False])
def test_varlen_attn_gets_arguments_that_it_takes(monkeypatch, shares_heads):
    """Its kernels need a GPU: here its own shape function runs, on tensors without data."""
    calls = []

    def recorded(*args, **kwargs):
        inspect.signature(varlen_attn).bind(*args, **kwargs)
        calls.append((args, kwargs))
        return varlen_attn(*args, **kwargs)

    options = varlen.varlen_options() - (set() if shares_heads else {"enable_gqa"})
    monkeypatch.setattr(varlen, "varlen_options", lambda: options)
    monkeypatch.setattr(varlen, "varlen_attn", recorded)
    monkeypatch.setattr(varlen, "kernel_for", lambda query: varlen.flash_rows)
    layout = PackedLayout([3, 2], [4, 5, 6], [0, 2, 3])
    inputs = tensors(layout.num_tokens, 6, 2, torch.bfloat16, device="meta")
    rows = varlen.varlen_rows(layout, torch.device("meta"))
    out = rows.attend(*inputs, 0.3)
    assert out.shape == inputs[0].shape
    (query, key, value, cu_q, cu_k, max_q, max_k), named = calls[0]
    heads = 2 if "enable_gqa" in options else 6  # torch 2.11 cannot
    assert query.shape == (20, 6, 8) and key.shape == value.shape == (20 + 3 * 2 + 2, heads, 8)
    assert cu_q.dtype == cu_k.dtype == torch.int32 and (max_q, max_k) == (6, 8)
    assert named["scale"] == 0.3 and named["window_size"] == (-1, 0)


def windowed(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, **_):
    """What varlen_attn computes, by its window alone."""
    key, value = varlen.repeat_heads(query, key, value)
    rows = [x.split(starts.diff().tolist()) for x, starts in ((query, cu_q), (key, cu_k), (value, cu_k))]
    out = []
    for q, k, v in zip(*rows):
        last = torch.arange(len(q))[:, None] + len(k) - len(q) if window_size == (-1, 0) else len(k)
        score = torch.einsum("qhd,khd->hqk", q, k) * scale
        seen = torch.arange(len(k)) <= last
        out.append(torch.einsum("hqk,khd->qhd", score.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("queries", "learns", "window"),
    [
        ([1, 1, 1], False, (-1, -1)),
        ([1, 1, 1], True, (-1, 0)),
        ([1, 0, 1], False, (-1, 0)),  # which those kernels would refuse
        ([1, 3, 1], False, (-1, 0)),
    ],
)
def test_a_single_query_of_a_row_needs_no_window(monkeypatch, queries, learns, window):
    """Without one FlashAttention has quicker kernels for it: the results are those of a causal window."""
    used = []
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *a, **options: used.append(options["window_size"]) or windowed(*a, **options)
    )
    query, *_ = tensors(sum(queries), 6, 2)
    _, key, value = tensors(19, 6, 2)
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (queries, [5, 3, 11])]
    rows = query, key, value, *starts, max(queries), 11
    with torch.set_grad_enabled(learns):
        out = varlen.flash_rows(*rows, scale=0.3)
    assert used == [window]
    torch.testing.assert_close(out, varlen.attend_rows(*rows, scale=0.3), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "dim", "capability", "flash"),
    [
        (torch.bfloat16, 64, (9, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 512, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
        (torch.bfloat16, 100, (9, 0), False),
        (torch.bfloat16, 104, (9, 0), True),
    ],
)
def test_flash_attention_is_for_what_it_can_do(monkeypatch, dtype, dim, capability, flash):
    class Query:
        is_cuda, device, shape = True, torch.device("cuda", 0), (5, 4, dim)

    query = Query()
    query.dtype = dtype
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert varlen.kernel_for(query) is (varlen.flash_rows if flash else varlen.attend_rows)
    assert varlen.kernel_for(torch.zeros(5, 4, 64, dtype=torch.bfloat16)) is varlen.attend_rows


def test_what_is_kept_for_the_backward_pass_grows_linearly_with_length(monkeypatch):
    monkeypatch.setenv("RLKERNELS_BACKEND", "torch")

    def kept(tokens):
        found = {}

        def note(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        layout = PackedLayout([tokens // 4], [tokens // 2, tokens // 4], [0, 2])
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = layout.attend(0, *tensors(tokens, 2, 1, torch.float32), 0.3, None)
        assert out.requires_grad
        return sum(found.values())

    sizes = {tokens: kept(tokens) for tokens in (1024, 4096, 16384)}
    assert sizes[4096] <= 4.1 * sizes[1024] and sizes[16384] <= 4.1 * sizes[4096]
    assert sizes[16384] < 16384 * 2 * 8 * 4 * 20  # twenty tensors like the queries; scores would be 2 GiB
