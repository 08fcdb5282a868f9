"""Micro-batches whose logits would be too many: scored block by block, with the same results."""

from functools import partial

import pytest
import torch
from paged import make_policy
from torch.utils._python_dispatch import TorchDispatchMode

from python_trainer.model import forward
from python_trainer.model import policy as policy_module
from python_trainer.model.forward import LogitRule
from python_trainer.model.packing import pack
from python_trainer.model.traits import find_traits
from rlkernels import linear_token_logprobs


def of_shape(kind, tokenizer, **further):
    """A policy of one layer, whose logits are far enough from 0 for a cap to matter."""
    policy = make_policy(kind, tokenizer, num_hidden_layers=1, initializer_range=0.02, **further)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(10)
    return policy


class Largest(TorchDispatchMode):
    """Notes the most rows of a matrix with a column for each token of the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.tanh.default) and result.shape[-1] == 64:
            self.rows = max(self.rows, result.numel() // 64)
        return result


@pytest.fixture
def scored(monkeypatch):
    """scored(policy, packed, most) -> log-probabilities, entropies, states, all gradients; rows of logits at a time."""
    monkeypatch.setattr(forward, "linear_token_logprobs", partial(linear_token_logprobs, chunk=10))
    monkeypatch.setattr(forward, "PIECE", 64 * 3)  # three rows

    def score(policy, packed, most):
        monkeypatch.setattr(policy_module, "LARGEST_LOGITS", most)
        with policy.packed_attention(), Largest() as largest:
            logprobs, entropy, states = policy.score_with_states(packed, 0.7)
            loss = (logprobs * torch.linspace(-1, 2, logprobs.shape[1]) + 0.1 * entropy).sum()
            gradients = torch.autograd.grad(loss, list(policy.model.parameters()))
        return [logprobs.detach(), entropy.detach(), states.detach(), *gradients], largest.rows

    return score


@pytest.mark.parametrize(
    ("kind", "further", "rule"),
    [
        ("Qwen2", {"tie_word_embeddings": True}, LogitRule()),
        ("Qwen2", {"tie_word_embeddings": False}, LogitRule()),
        ("Granite", {"logits_scaling": 0.5}, LogitRule(2.0)),
        ("Cohere", {"logit_scale": 0.25}, LogitRule(0.25)),
        ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8, "attn_logit_softcapping": None}, LogitRule(cap=3.0)),
    ],
)
def test_logits_that_are_too_many_are_not_held(answers, scored, tokenizer, kind, further, rule):
    """Scores and gradients are the same; Qwen2 is fused."""
    policy, packed = of_shape(kind, tokenizer, **further), pack(answers, range(len(answers)))
    assert policy.traits.logits == rule and policy.fused == (kind == "Qwen2")
    (whole, all_rows), (blocks, rows) = (scored(policy, packed, most) for most in (1 << 20, 0))
    assert rows <= 3 < all_rows == packed.targets.numel()
    for a, b in zip(whole, blocks, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_logits_of_an_unknown_kind_are_held(answers, scored, tokenizer):
    policy, packed = of_shape("Granite", tokenizer, logits_scaling=0.5), pack(answers, range(len(answers)))
    policy.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + 1)  # which no setting names
    policy.traits = find_traits(policy.model)
    assert policy.traits.logits is None
    assert scored(policy, packed, 0)[1] == packed.targets.numel()
