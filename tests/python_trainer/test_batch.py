"""The loss of a batch: that of the plain form, in every form, though each prefix is computed once per group.

Parts of an answer that others have written are context, and nothing else.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import plain_score

from python_trainer.algorithms.losses import importance_weights, kl_estimate, policy_loss
from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.data import Rollout
from python_trainer.loop.batch import Batch, Minibatch, scatter_rows
from python_trainer.model.packing import logprob_mask, micro_batches, pack_rollouts

MAX_LENGTH = 24
FORMS = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "sequence sums, rloo": {"loss_type": "seq-mean-token-sum", "advantage": "rloo"},
    **{kind: {"beta": 0.3, "kl_estimator": kind} for kind in ("k1", "k2", "k3")},
    "k3 times the ratio": {"beta": 0.3, "use_bias_correction_kl": True, "num_iterations": 2},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "num_iterations": 2},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.1},
    "clipped": {"epsilon": 0.05, "delta": 1.3, "num_iterations": 2},
    "truncated weights": {"importance_sampling": "token_truncate", "importance_sampling_cap": 1.1},
    "weights of sequences": {"importance_sampling": "sequence_truncate", "importance_sampling_cap": 1.1},
    "masked weights": {"importance_sampling": "token_mask", "importance_sampling_cap": 3.0, "num_iterations": 2},
    "everything": {
        "loss_type": "grpo", "beta": 0.3, "epsilon": 0.05, "entropy_coef": 0.1, "num_iterations": 2,
        "mask_truncated_completions": True, "importance_sampling": "token_truncate", "scale_rewards": "batch",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def rollouts():
    """Return groups with a long prefix, a prefix of one token, and none; suffixes differ in length, some truncated.

    Of every second answer others have written some tokens, in prefix and suffix.
    """
    generator = torch.Generator().manual_seed(5)

    def ids(n):
        return torch.randint(0, 63, (n,), generator=generator).tolist()

    answers = []
    for group, (prefix_len, suffixes) in enumerate([(9, (1, 4, 7, 2)), (1, (3, 3, 12)), (0, (5, 1, 8))]):
        prompt = ids(3 + group)
        prefix = ids(prefix_len)
        for number, length in enumerate(suffixes):
            reward = float((number + group) % 3 == 0)
            logprobs = (-4 + torch.rand(length, generator=generator)).tolist()
            reason = "length" if number == 1 else "stop"
            answer = prefix + ids(length)
            fields = {"prompt_index": group, "group": group, "reward": reward, "accuracy": reward}
            if number % 2 == 0:
                fields["response_mask"] = [(position + number) % 3 < 2 for position in range(len(answer))]
            answers.append(Rollout(prompt, answer, prefix_len, logprobs, reason, **fields))
    return answers


def noisy(batch, policy, scale, seed, *, include_prefix):
    """Return log-probabilities of a policy near this one, for every response token."""
    gen = torch.Generator().manual_seed(seed)
    out = batch.empty_table()
    with torch.no_grad(), policy.packed_attention():
        packed = pack_rollouts(batch.rollouts, range(len(batch.rollouts)), include_prefix=include_prefix)
        logprobs, *_ = policy.token_logprobs(packed, 1.0)
        scatter_rows(out, packed, logprobs + scale * torch.randn(logprobs.shape, generator=gen))
    return out


def plain_loss(policy, rollouts, batch, config, *, include_prefix):
    """Return the loss of the full batch on [B, L], from one forward pass of the model per answer."""
    width = max(len(r.response_ids) for r in rollouts)
    mask = torch.zeros(len(rollouts), width, dtype=torch.bool)
    logprob_rows = []
    entropy_rows = []
    for i, rollout in enumerate(rollouts):
        length = len(rollout.response_ids)
        for values, rows in zip(plain_score(policy, rollout), (logprob_rows, entropy_rows)):
            rows.append(torch.nn.functional.pad(values, (0, width - length)))
        start = 0 if include_prefix else rollout.prefix_len
        truncated = config.mask_truncated_completions and rollout.finish_reason == "length"
        policy_tokens = torch.tensor(rollout.response_mask or [True] * length)
        mask[i, start:length] = policy_tokens[start:] & (not truncated)
    logprobs = torch.stack(logprob_rows)
    entropy = torch.stack(entropy_rows)
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    sampled = mask & ~batch.sampler_logprobs.isnan()
    weights = None
    level, _, mode = config.importance_sampling.partition("_")
    if mode:
        cap = config.importance_sampling_cap
        weights = importance_weights(old, batch.sampler_logprobs, sampled, mode=mode, cap=cap, level=level)
    policy_terms = policy_loss(logprobs, old, batch.advantages, mask, config, weights=weights)
    loss = policy_terms.loss
    if config.beta:
        kl = kl_estimate(logprobs, batch.reference_logprobs, mask, config.kl_estimator)
        loss = loss + config.beta * (kl * policy_terms.ratio if config.use_bias_correction_kl else kl)
    token_weights = batch.aggregate(
        mask, num_tokens=int(mask.sum()), num_sequences=len(rollouts), max_length=MAX_LENGTH,
        lengths=torch.tensor([sum(r.response_mask or [True] * len(r.response_ids)) for r in rollouts]),
    )  # fmt: skip
    return (loss * token_weights).sum() - config.entropy_coef * entropy[mask].mean()


@pytest.mark.parametrize("whole_answers", [True, False], ids=["whole answers", "suffixes"])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_equal_the_plain_form(policy, rollouts, form, whole_answers):
    config = AlgorithmConfig(**FORMS[form])
    batch = Batch(rollouts, config, MAX_LENGTH, torch.device("cpu"), prefix_in_loss=whole_answers)
    batch.set_advantages()
    if config.num_iterations > 1:
        batch.old_logprobs = noisy(batch, policy, 0.1, 1, include_prefix=whole_answers)
    if config.beta:
        batch.reference_logprobs = noisy(batch, policy, 0.5, 2, include_prefix=whole_answers)
    params = list(policy.model.parameters())
    expected = plain_loss(policy, rollouts, batch, config, include_prefix=whole_answers)
    expected_grads = torch.autograd.grad(expected, params)
    grad_norm = torch.cat([g.flatten() for g in expected_grads]).norm()
    assert grad_norm > 1e-3
    all_samples = range(len(rollouts))
    minibatch = Minibatch(batch, all_samples)
    tokens = {}
    for budget in (10_000, 30, 1):  # the last one parts all answers
        policy.model.zero_grad()
        total = tokens[budget] = 0
        with policy.packed_attention():
            for samples in micro_batches(batch.rollouts, all_samples, budget):
                packed = pack_rollouts(rollouts, samples, include_prefix=whole_answers)
                if not whole_answers:
                    assert len(packed.rows) == len(packed.targets) == packed.mask.sum()
                loss, _ = minibatch.loss(packed, *policy.token_logprobs(packed, 1.0)[:2])
                loss.backward()
                total += loss.item()
                tokens[budget] += packed.ids.numel()
        assert total == pytest.approx(expected.item(), abs=1e-5)
        error = torch.cat([(p.grad - g).flatten() for p, g in zip(params, expected_grads)]).norm()
        assert error < 1e-5 * grad_norm
    policy.model.zero_grad()
    assert tokens[10_000] < 0.75 * tokens[1]


WITH_OTHERS = {
    "grpo": {"loss_type": "grpo", "beta": 0.2},
    "dapo": {"loss_type": "dapo", "importance_sampling": "token_truncate"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "entropy_coef": 0.1},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01},
    "rloo": {"loss_type": "seq-mean-token-sum", "advantage": "rloo", "beta": 0.3, "use_kl_in_reward": True},
    "ppo": {"advantage": "gae", "gamma": 0.9, "lam": 0.8, "beta": 0.1, "use_kl_in_reward": True},
    "reinforce++": {"advantage": "reinforce++", "gamma": 0.9, "importance_sampling": "token_mask"},
}


def rollouts_of(masks, *, with_others):
    """Make two groups of answers with the same policy tokens, with or without tokens of an environment."""
    generator = torch.Generator().manual_seed(0)
    answers = []
    for index, mask in enumerate(masks):
        ids = torch.randint(0, 63, (len(mask),), generator=generator).tolist()
        logprobs = (-1 - torch.rand(len(mask), generator=generator)).tolist()
        in_answer = [True] * len(mask) if with_others else mask
        answer_ids = [token for token, keep in zip(ids, in_answer) if keep]
        answer_logprobs = [logprob for logprob, keep in zip(logprobs, in_answer) if keep]
        facts = {"prompt_index": index % 2, "group": index % 2, "reward": float(index % 3)}
        mask = list(mask) if with_others else None
        answers.append(Rollout([1, 2], answer_ids, 0, answer_logprobs, "stop", response_mask=mask, **facts))
    return answers


def loss_and_gradient(rollouts, config, numbers, filler):
    """Return loss, metrics and gradients, from tables with a row of numbers per policy token."""
    batch = Batch(rollouts, config, 16, torch.device("cpu"))
    packed = pack_rollouts(rollouts, range(len(rollouts)))
    scored = [logprob_mask(rollout, include_prefix=False) for rollout in batch.rollouts]
    flags = torch.tensor([flag for row in scored for flag in row], dtype=torch.bool)

    def table(row):
        flat = torch.full((len(flags),), filler).masked_scatter(flags, row)
        return torch.full(batch.present.shape, filler).masked_scatter(batch.present, flat)

    batch.old_logprobs = table(numbers["old"])
    batch.reference_logprobs = table(numbers["reference"])
    if config.advantage == "gae":
        batch.values = table(numbers["values"])
    metrics = batch.set_advantages()
    leaves = [numbers[name].clone().requires_grad_() for name in ("now", "entropy", "predicted")]
    rows = [table(leaf)[packed.samples, : packed.mask.shape[1]] for leaf in leaves]
    values = rows[2] if batch.values is not None else None
    loss, token_metrics = Minibatch(batch, range(len(rollouts))).loss(packed, rows[0], rows[1], values)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), token_metrics, metrics, [*grads]


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=2, max_size=5).filter(
    lambda rows: any(any(row) for row in rows)
)


@pytest.mark.parametrize("form", WITH_OTHERS)
@settings(max_examples=40, deadline=None)
@given(masks=masks, filler=st.sampled_from([float("nan"), float("inf"), 0.0, -50.0]))
def test_tokens_of_others_change_nothing(form, masks, filler):
    """Loss, metrics and gradients equal those of answers without these tokens, whatever numbers the tokens carry."""
    config = AlgorithmConfig(**WITH_OTHERS[form])
    generator = torch.Generator().manual_seed(1)
    count = sum(map(sum, masks))
    numbers = {
        name: -torch.rand(count, generator=generator) * 2 for name in ("old", "reference", "values", "now", "entropy")
    }
    numbers["predicted"] = torch.randn(count, generator=generator)
    with_others = loss_and_gradient(rollouts_of(masks, with_others=True), config, numbers, filler)
    without_others = loss_and_gradient(rollouts_of(masks, with_others=False), config, numbers, filler)
    torch.testing.assert_close(with_others, without_others, atol=1e-6, rtol=1e-5)
