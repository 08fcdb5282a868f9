import pytest
import torch
from sampling_cases import check_no_gradient, rows_of_every_kind
from support import assert_equal

import rlkernels


def assert_as_the_reference(logits, temperature, top_p, top_k):
    uniforms = rlkernels.keyed_uniform(7, torch.arange(len(logits)), torch.arange(len(logits)))
    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    result, expected = (rlkernels.sample_tokens(logits, uniforms, **settings, backend=b) for b in ("triton", "torch"))
    assert torch.equal(result[0], expected[0])
    torch.testing.assert_close(result[1], expected[1], atol=2e-7, rtol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 37, 4097, 16_411])
def test_every_kind_of_row_with_every_filter(vocab, dtype):
    """Peaked, flat, tied across blocks, ruled out: candidates that are few, and a whole row where they are not."""
    rows = torch.cat([rows_of_every_kind(vocab)[::3], torch.randn(4, vocab).round() * 1e-30]).to(dtype)
    order = torch.randperm(len(rows))
    temperature = torch.tensor([1.0, 0.7, 1e-3, 30.0, 0.0, 1e-6, 5e-40])[order % 7]
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.999, 1e-6])[order.flip(0) % 5]
    top_k = torch.tensor([0, 50, 0, 4096, 0, 4097, 1])[order % 7]
    assert_as_the_reference(rows, temperature, top_p, top_k)
    assert_as_the_reference(rows, temperature, 1.0, 0)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_a_list_that_is_full_and_one_that_would_run_over(top_p):
    """1,024 groups of four tokens are listed; ties beyond them are cut off in order of their ids."""
    logits = torch.randn(6, 12_304)
    for row, groups in zip(logits, (1023, 1024, 1025, 1024, 1025, 3076)):
        row[: 4 * groups : 4] = 9
    assert_as_the_reference(logits, 1.0, top_p, torch.tensor([1000, 1000, 1000, 1024, 1025, 3000]))


def test_rows_without_a_distribution():
    logits = torch.randn(5, 9)
    logits[1], logits[2, 3], logits[3, 0] = -torch.inf, torch.nan, torch.inf
    uniforms = torch.full((5,), 0.5)
    uniforms[4] = 1.0
    ids, logprobs = rlkernels.sample_tokens(logits, uniforms, validate=False, backend="triton")
    assert (ids >= 0).tolist() == (~logprobs.isnan()).tolist() == [True, False, False, False, False]


def test_verification_equals_the_reference():
    starts = torch.tensor([0, 1, 4, 9])
    settings = {"temperature": torch.tensor([1.0, 0.0, 0.6]), "top_p": 0.9}
    logits = torch.randn(9, 20)
    uniforms = rlkernels.keyed_uniform(0, torch.arange(9), torch.arange(9))
    drafts = torch.tensor([3, 4, 5, 6, 7, 8])
    verified = rlkernels.verify_drafts(logits, drafts, starts, uniforms, backend="torch", **settings)
    drafts[0] = verified[1][1]  # the first draft token of the second sequence is right
    result, expected = (
        rlkernels.verify_drafts(logits, drafts, starts, uniforms, backend=b, **settings) for b in ("triton", "torch")
    )
    torch.testing.assert_close(result, expected, atol=2e-7, rtol=2e-7)
    assert result[0][1] >= 1


def test_no_gradient_is_recorded():
    check_no_gradient("triton")


def test_it_is_one_op_to_the_compiler_which_would_fuse_its_rounding():
    logits = torch.randn(3, 37)
    uniforms = torch.full((3,), 0.5)
    ops = set()

    def draw(logits, uniforms):
        return rlkernels.sample_tokens(logits, uniforms, top_p=0.9, validate=False, backend="triton")

    def graph(module, _):
        ops.update(str(node.target) for node in module.graph.nodes)
        return module

    torch.compiler.reset()
    drawn = torch.compile(draw, fullgraph=True, backend=graph)(logits, uniforms)
    assert "rlkernels.sample_tokens_triton.default" in ops and not any("triton_kernel_wrapper" in op for op in ops)
    assert_equal(drawn, draw(logits, uniforms))
    settings = torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.int64)
    torch.library.opcheck(torch.ops.rlkernels.sample_tokens_triton.default, (logits, uniforms, *settings))
