from functools import partial

import pytest
import torch
from accuracy import check_blocks, check_linear_logprobs, check_logprobs, draw_logits, with_gradients

import rlkernels
from rlkernels import _check
from rlkernels.logprobs import triton_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 1023, 4099])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_error_is_that_of_plain_torch(vocab, dtype, scale):
    check_logprobs("triton", *draw_logits(4, vocab, scale, dtype), 0.7, floor=1e-6 * (1 + scale))


def test_log_probabilities_alone_and_rows_without_a_distribution():
    logits = torch.randn(4, 50)
    logits[1] = -torch.inf
    logits[2, 3] = torch.nan
    logits.requires_grad_()
    logprobs = rlkernels.token_logprobs(logits, torch.zeros(4).long(), backend="triton")
    logprobs.sum().backward()
    assert logprobs.isnan().tolist() == [False, True, True, False]
    assert logits.grad.isnan().all(1).tolist() == [False, True, True, False]


def test_an_id_outside_the_vocabulary_is_nan_as_in_plain_torch(monkeypatch):
    """A GPU does not check ids: otherwise -100 of padding would end the process."""
    monkeypatch.setattr(_check, "indices", lambda *_: None)
    values = torch.randn(4, 5)
    ids = torch.tensor([1, -100, 5, 4])
    score = partial(rlkernels.token_logprobs, ids=ids, return_entropy=True)
    grads = torch.tensor([1, 0, 0, 1]), torch.ones(4)
    results, expected = (with_gradients(partial(score, backend=b), [values], *grads) for b in ("triton", "torch"))
    assert expected[0].isnan().tolist() == [False, True, True, False]
    torch.testing.assert_close(results, expected, equal_nan=True)


def test_blocks_that_are_ruled_out_and_nan():
    check_blocks("triton")


def test_opcheck():
    logits = torch.randn(3, 33)
    ids = torch.randint(33, (3,))
    rlkernels.token_logprobs(logits, ids, backend="triton")
    torch.library.opcheck(torch.ops.rlkernels.token_logprobs_triton.default, (logits, ids, 0.8, True))


def test_gradient_of_the_gradient_raises():
    logits = torch.randn(3, 33, requires_grad=True)
    logprobs = rlkernels.token_logprobs(logits, torch.zeros(3).long(), backend="triton")
    (grad,) = torch.autograd.grad(logprobs.exp().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="the gradient of token_logprobs has no gradient"):
        grad.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "chunk"), [(17, 5), (1023, 400)])
def test_from_hidden_states(vocab, chunk, dtype, monkeypatch):
    blocks = []
    score_block = triton_kernels.score_block
    monkeypatch.setattr(triton_kernels, "score_block", lambda *args: blocks.append(args[2]) or score_block(*args))
    tensors = [torch.randn(shape).to(dtype) for shape in ((9, 16), (vocab, 16), (vocab,))]
    tensors[2][: chunk + 3] = -torch.inf
    ids = torch.randint(chunk + 3, vocab, (9,))
    check_linear_logprobs("triton", tensors, ids, 0.7, chunk, floor=1e-5)
    assert blocks == [*range(0, vocab, chunk)]


def test_float64_is_refused():
    x = torch.randn(2, 3).double()
    for score in (rlkernels.token_logprobs, partial(rlkernels.linear_token_logprobs, weight=x)):
        with pytest.raises(ValueError, match="backend='triton' runs .* on 16 and 32 bit floats, got torch.float64"):
            score(x, ids=torch.zeros(2).long(), backend="triton")
