"""Micro-batches whose logits would be too many: scored block by block, with the same results."""

import pytest
import torch
import transformers
from conftest import save_tiny_policy
from torch.utils._python_dispatch import TorchDispatchMode

import python_trainer.model.forward
import python_trainer.model.policy
from python_trainer.model.forward import LogitRule
from python_trainer.model.packing import pack
from python_trainer.model.policy import Policy, load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.model.traits import find_traits


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
    original, calls = python_trainer.model.forward.linear_token_logprobs, []

    def count(*args, **options):
        calls.append(len(args[0]))
        return original(*args, chunk=10, **options)

    monkeypatch.setattr(python_trainer.model.forward, "linear_token_logprobs", count)
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


SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, eos_token_id=63, bos_token_id=None, pad_token_id=None,
)  # fmt: skip


def of_shape(kind, tiny_policy, **further):
    """A model of a kind of Transformers, as a policy."""
    tokenizer = load_policy(ModelConfig(path=str(tiny_policy), device="cpu")).tokenizer
    config = getattr(transformers, kind + "Config")(**SHAPE, **further)
    torch.manual_seed(0)
    model = getattr(transformers, kind + "ForCausalLM")(config)
    with torch.no_grad():  # logits far enough from 0 for a cap to matter
        model.get_output_embeddings().weight.mul_(40)
    return Policy(model, tokenizer, name=kind)


@pytest.mark.parametrize(
    ("kind", "further", "rule"),
    [
        ("Granite", {"logits_scaling": 0.5}, LogitRule(2.0)),
        ("Cohere", {"logit_scale": 0.25}, LogitRule(0.25)),
        ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8, "attn_logit_softcapping": None}, LogitRule(cap=3.0)),
    ],
)
def test_scaled_and_capped_logits_are_not_held(answers, monkeypatch, tiny_policy, kind, further, rule):
    policy = of_shape(kind, tiny_policy, **further)
    assert policy.traits.logits == rule
    packed = pack(answers, range(len(answers)))
    whole = scored(policy, packed)
    monkeypatch.setattr(python_trainer.model.policy, "LARGEST_LOGITS", 0)
    monkeypatch.setattr(python_trainer.model.forward, "PIECE", 64 * 3)  # three rows
    sizes = []
    with Largest(sizes):
        blocks = scored(policy, packed)
    for a, b in zip(whole, blocks, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    if rule.cap is not None:
        assert max(sizes) == 3 * 64 < packed.targets.numel() * 64


class Largest(TorchDispatchMode):
    """Notes how many elements matrices with a column for each token of the vocabulary have."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.tanh.default) and result.shape[-1] == 64:
            self.sizes.append(result.numel())
        return result


def test_logits_of_an_unknown_kind_are_held(answers, blocks, tiny_policy):
    policy = of_shape("Granite", tiny_policy, logits_scaling=0.5)
    policy.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + 1)  # which no setting names
    policy.traits = find_traits(policy.model)
    assert policy.traits.logits is None
    scored(policy, pack(answers, range(len(answers))))
    assert not blocks
