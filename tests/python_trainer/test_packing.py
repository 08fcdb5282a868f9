"""Packed scoring: micro-batches, recomputed activations, and block by block where logits would be too many."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from paged import make, make_policy
from support import Launches
from transformers.modeling_layers import GradientCheckpointingLayer

from python_trainer.model import packing
from python_trainer.model import policy as policy_module
from python_trainer.model.packing import micro_batches, pack_rollouts, sorted_by_tokens, split_evenly
from python_trainer.model.policy import Policy, recompute_activations
from python_trainer.model.traits import find_traits
from rlkernels import linear_token_logprobs
from rlkernels.prefix_cache.layout import token_ids


def plain_score(policy, answer, temperature=1.0):
    """Return log-probabilities and entropies of one answer by the model's own forward."""
    ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
    logits = policy.model(input_ids=ids).logits[0, len(answer.prompt_ids) - 1 : -1] / temperature
    table = logits.log_softmax(-1)
    targets = torch.tensor(answer.response_ids, dtype=torch.int64)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


def test_micro_batches_keep_to_the_budget(answers):
    for max_tokens in (1, 10, 25, 60, 1000):
        batches = list(micro_batches(answers, range(len(answers)), max_tokens))
        assert [index for samples in batches for index in samples] == list(range(len(answers)))
        sizes = [pack_rollouts(answers, samples).ids.numel() for samples in batches]
        assert all(size <= max_tokens or len(samples) == 1 for size, samples in zip(sizes, batches))
    assert len(list(micro_batches(answers, range(len(answers)), 1000))) == 1
    assert list(micro_batches(answers, [], 10)) == []


def test_the_tokens_of_a_rollout_become_an_array_once(answers, monkeypatch):
    """Sorting, planning and packing share the array; a rollout that has grown gets another."""
    rollouts = [replace(answer) for answer in answers]
    array_sizes = []
    monkeypatch.setattr(packing, "token_ids", lambda name, ids: array_sizes.append(len(ids)) or token_ids(name, ids))
    for _ in range(2):
        order = sorted_by_tokens(rollouts, range(len(rollouts)))
        for stretch in split_evenly(rollouts, order, 2):
            for samples in micro_batches(rollouts, stretch, 60):
                pack_rollouts(rollouts, samples)
    assert sorted(array_sizes) == sorted(len(r.prompt_ids) + len(r.response_ids) for r in rollouts)
    rollouts[0].response_ids = [*rollouts[0].response_ids, 7]
    assert pack_rollouts(rollouts, [0]).targets[-1] == 7


DROPOUT = {
    "Qwen2": {"attention_dropout": 0.5},
    "OPT": {"dropout": 0.5, "attention_dropout": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "BioGpt": {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5, "activation_dropout": 0.5},
}


@pytest.mark.parametrize("kind", DROPOUT)
def test_recomputing_activations_leaves_dropout_off(tokenizer, answers, kind):
    """Log-probabilities and gradients are those of eager Transformers in evaluation mode."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "initializer_range": 0.02}
    model = make(kind, attn_implementation="eager", pad_token_id=0, **sizes, **DROPOUT[kind]).eval()
    policy = Policy(model, tokenizer, name=kind)
    assert model.config._attn_implementation == "eager"
    expected, _ = plain_score(policy, answers[0])
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()), allow_unused=True)
    recompute_activations(model)
    forwards = []
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    layer.self_attn.register_forward_hook(lambda *_: forwards.append(layer.training))
    with policy.packed_attention():
        logprobs = policy.token_logprobs(pack_rollouts(answers, [0]), 1.0)[0][0]
        logprobs.sum().backward()
    assert forwards == [False, False], "once more in the backward pass"
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-5)
    assert not any(module.training for module in model.modules())


def of_shape(kind, tokenizer, **further):
    """Return a policy of one layer."""
    return make_policy(kind, tokenizer, num_hidden_layers=1, initializer_range=0.02, **further)


@pytest.fixture
def scored(monkeypatch):
    """Return a function that gives log-probabilities, entropies, states and all gradients, by rows of logits."""
    monkeypatch.setattr(policy_module, "linear_token_logprobs", partial(linear_token_logprobs, chunk=10))

    def score(policy, packed, max_logits):
        monkeypatch.setattr(policy_module, "LARGEST_LOGITS", max_logits)
        with policy.packed_attention(), Launches() as launches:
            logprobs, entropy, states = policy.token_logprobs(packed, 0.7)
            loss = (logprobs * torch.linspace(-1, 2, logprobs.shape[1]) + 0.1 * entropy).sum()
            gradients = torch.autograd.grad(loss, list(policy.model.parameters()))
        rows = max(shape[0] for name, shape in launches.results if name == "mm" and shape[1] == 64)
        return [logprobs.detach(), entropy.detach(), states.detach(), *gradients], rows

    return score


@pytest.mark.parametrize(
    ("kind", "options", "scale"),
    [
        ("Qwen2", {"tie_word_embeddings": True}, 1.0),
        ("Qwen2", {"tie_word_embeddings": False}, 1.0),
        ("Granite", {"logits_scaling": 0.5}, 2.0),
        ("HyperCLOVAX", {"logits_scaling": 0.5}, 0.5),
        ("Cohere", {"logit_scale": 0.25}, 0.25),
    ],
)
def test_logits_that_are_too_many_are_not_held(answers, scored, tokenizer, kind, options, scale):
    """Scores and gradients are the same; Qwen2 is fused."""
    policy = of_shape(kind, tokenizer, **options)
    packed = pack_rollouts(answers, range(len(answers)))
    assert policy.traits.logit_scale == scale and policy.fused == (kind == "Qwen2")
    (expected, all_rows), (blocks, rows) = (scored(policy, packed, max_logits) for max_logits in (1 << 20, 0))
    assert rows <= 3 < all_rows == packed.targets.numel()
    torch.testing.assert_close(blocks, expected, atol=1e-5, rtol=1e-4)


def test_logits_of_an_unknown_kind_are_held(answers, scored, tokenizer):
    policy = of_shape("Granite", tokenizer, logits_scaling=0.5)
    packed = pack_rollouts(answers, range(len(answers)))
    policy.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + 1)  # which no setting names
    policy.traits = find_traits(policy.model)
    assert policy.traits.logit_scale is None
    assert scored(policy, packed, 0)[1] == packed.targets.numel()
    capped = of_shape("Gemma2", tokenizer, attn_logit_softcapping=None, final_logit_softcapping=1e6)
    assert capped.traits.logit_scale is None  # though logits so small show no cap


def test_caps_of_scores_and_logits_count_in_training(answers, scored, tokenizer):
    """Compare Gemma 2, whose final cap is no factor, with the model's own pass."""
    caps = {"attn_logit_softcapping": 0.02, "final_logit_softcapping": 0.05, "query_pre_attn_scalar": 1}
    policy = of_shape("Gemma2", tokenizer, **caps)
    (logprobs, entropy, *_), _ = scored(policy, pack_rollouts(answers, range(len(answers))), 0)
    policy.model.set_attn_implementation("eager")
    for row, answer in enumerate(answers):
        with torch.no_grad():
            expected = plain_score(policy, answer, 0.7)
        length = len(answer.response_ids)
        torch.testing.assert_close((logprobs[row, :length], entropy[row, :length]), expected, rtol=1e-4, atol=1e-5)
