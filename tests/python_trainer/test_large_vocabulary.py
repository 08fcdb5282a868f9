"""Micro-batches whose logits would be too many: scored block by block, with the same results."""

import pytest
import torch
from conftest import save_tiny_policy
from transformers import GraniteConfig, GraniteForCausalLM

import python_trainer.model.policy
from python_trainer.model.packing import pack
from python_trainer.model.policy import Policy, load_policy
from python_trainer.model.settings import ModelConfig


def scored(policy, packed):
    """Log-probabilities, entropies and all gradients."""
    params = list(policy.model.parameters())
    with policy.packed_attention():
        logprobs, entropy, states = policy.score_with_states(packed, 0.7)
        grads = torch.autograd.grad((logprobs * torch.linspace(-1, 2, logprobs.shape[1]) + 0.1 * entropy).sum(), params)
    return [logprobs.detach(), entropy.detach(), states.detach(), *grads]


@pytest.fixture
def blocks(monkeypatch):
    """Counts how often log-probabilities were computed block by block, for any number of logits."""
    monkeypatch.setattr(python_trainer.model.policy, "LARGEST_LOGITS", 0)
    original, calls = python_trainer.model.policy.linear_token_logprobs, []

    def count(*args, **options):
        calls.append(len(args[0]))
        return original(*args, chunk=10, **options)

    monkeypatch.setattr(python_trainer.model.policy, "linear_token_logprobs", count)
    return calls


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_scores_and_gradients(answers, blocks, tied, tmp_path, monkeypatch):
    folder = save_tiny_policy(tmp_path / "policy", tie_word_embeddings=tied)
    policy = load_policy(ModelConfig(path=str(folder), device="cpu"))
    packed = pack(answers, range(len(answers)))
    found = scored(policy, packed)
    assert blocks == [packed.rows.numel()]
    monkeypatch.setattr(python_trainer.model.policy, "LARGEST_LOGITS", 1 << 20)
    for a, b in zip(found, scored(policy, packed), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert len(blocks) == 1


def test_a_model_that_scales_its_logits_keeps_them(answers, blocks, tiny_policy, monkeypatch):
    tokenizer = load_policy(ModelConfig(path=str(tiny_policy), device="cpu")).tokenizer
    config = GraniteConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, logits_scaling=0.5, eos_token_id=63, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    policy = Policy(GraniteForCausalLM(config), tokenizer, name="granite")
    packed = pack(answers, range(len(answers)))
    found = scored(policy, packed)
    assert not blocks
    monkeypatch.setattr(python_trainer.model.policy, "LARGEST_LOGITS", 1 << 20)
    for a, b in zip(found, scored(policy, packed), strict=True):
        torch.testing.assert_close(a, b)
