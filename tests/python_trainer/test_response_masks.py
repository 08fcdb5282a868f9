"""Answers that others have written parts of: those tokens are context, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.batch import Batch, Minibatch
from python_trainer.data import Rollout
from python_trainer.model.packing import scored_tokens

CPU = torch.device("cpu")
FORMS = {
    "grpo": {"loss_type": "grpo", "beta": 0.2},
    "dapo": {"loss_type": "dapo", "importance_sampling": "token_truncate"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "entropy_coef": 0.1},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01},
    "rloo": {"loss_type": "seq-mean-token-sum", "advantage": "rloo", "beta": 0.3, "use_kl_in_reward": True},
    "ppo": {"advantage": "gae", "gamma": 0.9, "lam": 0.8, "beta": 0.1, "use_kl_in_reward": True},
    "reinforce++": {"advantage": "reinforce++", "gamma": 0.9, "importance_sampling": "token_mask"},
}


def rollouts_of(masks, *, with_others):
    """Two groups of answers whose own tokens and numbers are the same, with the tokens of others or without."""
    gen = torch.Generator().manual_seed(0)
    out = []
    for index, mask in enumerate(masks):
        ids = torch.randint(0, 63, (len(mask),), generator=gen).tolist()
        logprobs = (-1 - torch.rand(len(mask), generator=gen)).tolist()
        kept = [True] * len(mask) if with_others else mask
        own = [x for x, keep in zip(ids, kept) if keep], [x for x, keep in zip(logprobs, kept) if keep]
        out.append(Rollout([1, 2], own[0], 0, own[1], "stop", prompt_key=index % 2, group=index % 2,
                           reward=float(index % 3), response_mask=list(mask) if with_others else None))  # fmt: skip
    return out


def loss_and_gradient(rollouts, config, own, others):
    """Of the log-probabilities of own tokens, given tables of one row of numbers per own token."""
    batch = Batch(rollouts, config, 16, CPU)
    packed = batch.pack(range(len(rollouts)))
    scored = [scored_tokens(rollout, score_prefix=False) for rollout in batch.rollouts]
    flags = torch.tensor([flag for row in scored for flag in row], dtype=torch.bool)

    def table(numbers):
        flat = torch.full((len(flags),), others).masked_scatter(flags, numbers)
        return torch.full(batch.present.shape, others).masked_scatter(batch.present, flat)

    batch.old, batch.reference = table(own["old"]), table(own["reference"])
    if config.advantage == "gae":
        batch.values = table(own["values"])
    metrics = batch.set_advantages()
    leaves = [own[name].clone().requires_grad_() for name in ("now", "entropy", "predicted")]
    rows = [table(leaf)[packed.samples, : packed.mask.shape[1]] for leaf in leaves]
    values = rows[2] if batch.values is not None else None
    loss, seen = Minibatch(batch, range(len(rollouts))).loss(packed, rows[0], rows[1], values)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), seen, metrics, [*grads]


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=2, max_size=5).filter(
    lambda rows: any(any(row) for row in rows)
)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(masks=masks, others=st.sampled_from([float("nan"), float("inf"), 0.0, -50.0]))
def test_tokens_of_others_change_nothing(form, masks, others):
    """Loss, metrics and gradients are those of the answers with these tokens cut out, whatever numbers they carry."""
    config = AlgorithmConfig(**FORMS[form])
    gen = torch.Generator().manual_seed(1)
    count = sum(map(sum, masks))
    own = {name: -torch.rand(count, generator=gen) * 2 for name in ("old", "reference", "values", "now", "entropy")}
    own["predicted"] = torch.randn(count, generator=gen)
    with_others = loss_and_gradient(rollouts_of(masks, with_others=True), config, own, others)
    without = loss_and_gradient(rollouts_of(masks, with_others=False), config, own, others)
    torch.testing.assert_close(with_others, without, atol=1e-6, rtol=1e-5)
