import math

import pytest
import torch

import rlkernels
from rlkernels.logprobs import reference


def test_known_values():
    # softmax([0, ln 3]) = [1/4, 3/4]; entropy = 1/4 ln 4 + 3/4 ln 4/3
    logits = torch.tensor([[0.0, math.log(3.0)]])
    logprobs, entropy = rlkernels.token_logprobs(logits, torch.tensor([1]), return_entropy=True)
    assert logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert entropy.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-6)
    # at temperature 1/2 the logits double: softmax([0, ln 9]) = [1/10, 9/10]
    assert rlkernels.token_logprobs(logits, torch.tensor([0]), temperature=0.5).item() == pytest.approx(
        math.log(0.1), abs=1e-6
    )


def test_equals_the_logprobs_of_sampling():
    logits = torch.randn(64, 500) * 4
    u = rlkernels.keyed_uniform(0, torch.arange(64), torch.arange(64))
    ids, sampled = rlkernels.sample_tokens(logits, u, temperature=0.7)
    torch.testing.assert_close(rlkernels.token_logprobs(logits, ids, temperature=0.7), sampled, atol=1e-5, rtol=0)


def test_tokens_ruled_out():
    logits = torch.randn(3, 8)
    logits[:, 4:] = -torch.inf
    logits.requires_grad_()
    logprobs, entropy = rlkernels.token_logprobs(logits, torch.tensor([0, 1, 2]), return_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    expected = reference.token_logprobs(logits[:, :4].detach(), torch.tensor([0, 1, 2]))
    torch.testing.assert_close((logprobs, entropy), expected)
    assert logits.grad.isfinite().all() and (logits.grad[:, 4:] == 0).all()
    assert rlkernels.token_logprobs(logits, torch.tensor([0, 7, 0]))[1] == -torch.inf


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients(temperature):
    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(7, (3, 5))
    assert torch.autograd.gradcheck(
        lambda x: rlkernels.token_logprobs(x, ids, temperature=temperature, return_entropy=True), (logits,)
    )


@pytest.mark.parametrize(
    ("logits", "ids", "temperature", "error", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), 1.0, ValueError, "ids must be between 0 and 2, got 3"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), 1.0, ValueError, "ids must be between 0 and 2, got -1"),
        (torch.zeros(2, 3), torch.zeros(3).long(), 1.0, ValueError, r"ids must have shape \[2\], got \[3\]"),
        (torch.zeros(2, 3), torch.zeros(2), 1.0, TypeError, "ids must have dtype torch.int64"),
        (torch.zeros(2, 3).long(), torch.zeros(2).long(), 1.0, TypeError, "logits must be floating point"),
        (torch.zeros(2, 0), torch.zeros(2).long(), 1.0, ValueError, r"logits must have shape \[..., V\]"),
        (torch.zeros(2, 3), torch.zeros(2).long(), 0.0, ValueError, "temperature must be > 0, got 0.0"),
    ],
)
def test_bad_arguments(logits, ids, temperature, error, message):
    with pytest.raises(error, match=message):
        rlkernels.token_logprobs(logits, ids, temperature=temperature)
