"""Advantages, losses and KL: known values with their arithmetic, invariances, gradients.

Bugs that trainers have shipped, and the test that keeps each out of this one:

- The loss changes with the micro-batch or rank split, or with the amount or side of padding:
  test_loss_does_not_depend_on_split_order_or_padding,
  test_trainer.test_neither_weights_nor_metrics_depend_on_micro_batches.
- The end token masked because it is the padding token, or one of several:
  test_trainer.test_several_eos_tokens_end_answers_and_count_in_the_loss, test_trl_parity.
- Sampled at one temperature, scored at another: test_trainer.test_temperature_is_the_same_in_sampling_and_scoring.
- Parity that holds because everything is zero: test_trl_parity wants a loss and gradients that are not.
- Groups filtered by the shaped reward, or by a deviation compared with 0 after rounding:
  test_dynamic_sampling.test_a_step_is_filled_with_prompts_that_teach,
  test_real_rewards.test_good_answers_are_right_or_better_than_the_mean,
  test_equal_rewards_give_exactly_zero_advantage.
- 0 x inf = NaN from masked log-probabilities: test_masked_entries_may_hold_anything.
- A resumed run draws other noise: test_checkpoint.test_resume_equals_the_uninterrupted_run.
- 32-bit offsets into the logits: rlkernels/test_logprobs.py.
- The logged loss is that of the last micro-batch:
  test_trainer.test_neither_weights_nor_metrics_depend_on_micro_batches.
- The entropy's gradient lost: rlkernels/test_logprobs.py, test_trl_parity (entropy).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_trainer.algorithms.advantages import StepRewards, gae, group_statistics
from python_trainer.algorithms.losses import importance_weights, kl_estimate, policy_loss, value_loss
from python_trainer.algorithms.settings import ADVANTAGES, LOSS_TYPES, POLICY_LOSSES, AlgorithmConfig
from python_trainer.errors import UserError

INF = float("inf")


def mask_of(lengths, width):
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def advantages(kind, rewards, groups, **settings):
    """Return the advantages of answers with these rewards, of one token each."""
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    step = StepRewards(rewards, groups, mask, mask, torch.zeros(len(rewards), 1))
    return ADVANTAGES.resolve(kind)(step, AlgorithmConfig(**settings))[0]


def test_group_advantages_known_values():
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.0, 5.0, 4.0])
    groups = torch.tensor([7, 7, 2, 7, 2, 2])
    # group 7: 1, 0, 0: mean 1/3, std sqrt((4/9 + 1/9 + 1/9) / 2) = sqrt(1/3); group 2: 3, 5, 4: mean 4, std 1
    plain = torch.tensor([2 / 3, -1 / 3, -1, -1 / 3, 1, 0])
    std = torch.tensor([1 / 3, 1 / 3, 1, 1 / 3, 1, 1])
    std[[0, 1, 3]] = math.sqrt(1 / 3)
    torch.testing.assert_close(advantages("group", rewards, groups, scale_rewards="none"), plain)
    torch.testing.assert_close(advantages("group", rewards, groups), plain / (std + 1e-4))
    # all six: mean 13/6, sum of squares 51 - 6 * (13/6)^2 = 22.8333, / 5 = 4.5667
    batch = plain / (math.sqrt((51 - 169 / 6) / 5) + 1e-4)
    torch.testing.assert_close(advantages("group", rewards, groups, scale_rewards="batch"), batch)


def test_equal_rewards_give_exactly_zero_advantage():
    # 0.1 + 0.1 + 0.1 is not 3 x 0.1 in binary: a rounding error divided by a tiny deviation must not become a signal
    for value in (0.1, 0.7, 1e6 + 0.3):
        for n in (0, 1, 3, 7):
            rewards = torch.full((n,), value)
            groups = torch.zeros(n, dtype=torch.int64)
            for scale in ("group", "batch", "none"):
                assert torch.equal(advantages("group", rewards, groups, scale_rewards=scale), torch.zeros(n))
            assert torch.equal(advantages("rloo", rewards, groups), torch.zeros(n))
            assert torch.equal(group_statistics(rewards, groups)[2], torch.zeros(n))


def test_rloo_known_values():
    # others of 1 are (0, 2): mean 1 -> 0; of 0: 1.5 -> -1.5; of 2: 0.5 -> 1.5; alone: nothing to compare with
    rloo = advantages("rloo", torch.tensor([1.0, 9.0, 0.0, 2.0]), torch.tensor([0, 1, 0, 0]))
    torch.testing.assert_close(rloo, torch.tensor([0.0, 0.0, -1.5, 1.5]))


def test_gae_known_values():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.4, 0.2]])
    # gamma 0.9, lambda 0.5: last: 1 - 0.2 = 0.8; middle: 0.9 * 0.2 - 0.4 + 0.45 * 0.8 = 0.14;
    # first: 0.9 * 0.4 - 0.5 + 0.45 * 0.14 = -0.077
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.077, 0.14, 0.8]]))
    torch.testing.assert_close(returns, advantages + values)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 + math.log(2) - 1, 0.5),  # exp(-ln 2) + ln 2 - 1, and 1 - exp(-ln 2)
    ],
)
def test_kl_known_values(kind, value, gradient):
    logprobs = torch.tensor([[math.log(2), -INF]], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([[0.0, math.nan]]), torch.tensor([[1, 0]]), kind)
    torch.testing.assert_close(estimate, torch.tensor([[value, 0.0]]))
    (grad,) = torch.autograd.grad(estimate.sum(), logprobs)
    torch.testing.assert_close(grad, torch.tensor([[gradient, 0.0]]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "expected"),
    [
        (1.5, 1.0, {}, -1.2),  # -min(1.5, 1.2): held back
        (1.5, -1.0, {}, 1.5),  # -min(-1.5, -1.2): a bad answer that became likelier is pushed in full
        (0.5, 1.0, {}, -0.5),
        (0.5, -1.0, {}, 0.8),  # -min(-0.5, -0.8): enough taken away
        (1.25, 1.0, {"epsilon_high": 0.28}, -1.25),
        (1.5, 2.0, {"epsilon_high": 0.28}, -2.56),
        (5.0, -1.0, {"delta": 3.0}, 3.0),
        (5.0, 1.0, {"delta": 3.0}, -1.2),
    ],
)
def test_policy_loss_known_values(ratio, advantage, options, expected):
    settings = AlgorithmConfig(**options)
    ones = torch.ones(1, 1)
    logprobs = torch.tensor([[math.log(ratio)]])
    out = policy_loss(logprobs, torch.zeros(1, 1), advantage * ones[0], ones, settings)
    assert out.loss.item() == pytest.approx(expected, rel=1e-6)
    assert out.ratio.item() == pytest.approx(ratio, rel=1e-6)
    high = options.get("epsilon_high", 0.2)
    assert out.clipped["low"].item() == (ratio < 0.8 and advantage < 0)
    assert out.clipped["high"].item() == (ratio > 1 + high and advantage > 0)


def test_sequence_ratio_known_values():
    """GSPO: one ratio per answer, the geometric mean over its tokens, clipped as one."""
    logprobs = torch.tensor([[math.log(2.0), math.log(0.5), math.log(3.375), math.nan]], requires_grad=True)
    mask = mask_of([3], 4)
    advantages = torch.tensor([1.0])
    # (2 x 0.5 x 3.375)^(1/3) = 1.5: above 1.2, held back at every token, no gradient
    gspo = AlgorithmConfig(importance_sampling_level="sequence")
    out = policy_loss(logprobs, torch.zeros(1, 4), advantages, mask, gspo)
    torch.testing.assert_close(out.ratio.detach(), torch.tensor([[1.5, 1.5, 1.5, 0.0]]))
    torch.testing.assert_close(out.loss.detach(), torch.tensor([[-1.2, -1.2, -1.2, 0.0]]))
    assert out.clipped["high"].tolist() == [[True, True, True, False]]
    assert not torch.autograd.grad(out.loss.sum(), logprobs)[0].any()
    # at 0.5 x advantage -1 with epsilon 0.6 nothing is clipped: d(ratio) / d(logprob) = ratio / 3 for each of 3 tokens
    halved = torch.full((1, 4), math.log(0.5), requires_grad=True)
    wide_clip = gspo.model_copy(update={"epsilon": 0.6})
    out = policy_loss(halved, torch.zeros(1, 4), -advantages, mask, wide_clip)
    (gradient,) = torch.autograd.grad(out.loss.sum(), halved)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.5, 0.5, 0.0]]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),  # min(ratio, 1.28), no lower bound
    [(1.1, 1.0, 1.1), (1.5, 1.0, 1.28), (5.0, -2.0, 1.28), (0.01, -2.0, 0.01), (5.0, 0.0, 1.28)],
)
def test_cispo_known_values(ratio, advantage, weight):
    """-weight x A x log pi, and the gradient -weight x A: no token is without one."""
    logprobs = torch.tensor([[-0.75, math.nan]], requires_grad=True)
    old = torch.tensor([[-0.75 - math.log(ratio), 0.0]])
    mask = mask_of([1], 2)
    settings = AlgorithmConfig(policy_loss="cispo", epsilon_high=0.28)
    out = policy_loss(logprobs, old, torch.tensor([advantage]), mask, settings)
    torch.testing.assert_close(out.loss, torch.tensor([[0.75 * weight * advantage, 0.0]]))
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([[-weight * advantage, 0.0]]))
    # eq. 4 clips from above alone, whatever the sign of the advantage
    assert out.clipped.keys() == {"high"}
    assert out.clipped["high"].tolist() == [[weight < ratio and advantage != 0, False]]


def test_aggregations_known_values():
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    mask = mask_of([3, 1], 3)
    expected = {
        "token-mean": 10 / 4,  # (1 + 2 + 3 + 4) / 4 tokens
        "seq-mean-token-sum": 10 / 2,  # (6 + 4) / 2 sequences
        "dapo": 10 / 4,
        "seq-mean-token-mean": 6 / 2,  # (6 / 3 + 4 / 1) / 2
        "grpo": 6 / 2,
        "dr_grpo": 10 / 16,  # (6 + 4) / (2 x 8)
    }
    assert set(expected) == set(LOSS_TYPES.names)
    for name, value in expected.items():
        weigh = LOSS_TYPES.resolve(name)
        weights = weigh(mask, num_tokens=4, num_sequences=2, max_length=8, lengths=mask.sum(1))
        assert (losses * weights).sum().item() == pytest.approx(value)
    longer_weights = LOSS_TYPES.resolve("seq-mean-token-mean")(mask, num_sequences=2, lengths=torch.tensor([6, 2]))
    assert (losses * longer_weights).sum().item() == pytest.approx((6 / 6 + 4 / 2) / 2)


@pytest.mark.parametrize("reduced", [torch.mean, lambda loss: loss.mean(1), lambda loss: loss.mean(1, keepdim=True)])
def test_a_policy_loss_that_averages_is_refused(reduced):
    """Broadcast, it would train on something else, and differently in each split into micro-batches."""
    settings = AlgorithmConfig(policy_loss=lambda logprobs, ratio, advantages, _: reduced(-ratio * advantages))
    with pytest.raises(UserError, match=r"policy_loss must return a loss per token, \[2, 3\], got \["):
        policy_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2), mask_of([3, 1], 3), settings)


def loss_in_parts(logprobs, old, advantages, mask, aggregation, settings, micro_batches):
    total = 0.0
    counts = {"num_tokens": int(mask.sum()), "num_sequences": len(mask), "max_length": 9}
    for rows in micro_batches:
        losses = policy_loss(logprobs[rows], old[rows], advantages[rows], mask[rows], settings).loss
        weights = LOSS_TYPES.resolve(aggregation)(mask[rows], lengths=mask[rows].sum(1), **counts)
        total = total + (losses * weights).sum()
    return total


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    aggregation=st.sampled_from([*{LOSS_TYPES.resolve(name): name for name in LOSS_TYPES.names}.values()]),
    policy_loss_kind=st.sampled_from(POLICY_LOSSES.names),
    num_parts=st.integers(1, 4),
    padding=st.integers(0, 3),
    left_padded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_loss_does_not_depend_on_split_order_or_padding(
    lengths, aggregation, policy_loss_kind, num_parts, padding, left_padded, seed
):
    """Micro-batches or ranks, amount and side of padding, order of rows: the same loss and the same gradient."""
    generator = torch.Generator().manual_seed(seed)
    algorithm = AlgorithmConfig(policy_loss=policy_loss_kind)
    n = len(lengths)
    width = max(max(lengths), 1)
    mask = mask_of(lengths, width)
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    values, noise = torch.randn(2, n, width, generator=generator, dtype=torch.float64)
    old = torch.where(mask, values + 0.3 * noise, math.nan)
    logprobs = torch.where(mask, values, -INF).requires_grad_()
    loss = loss_in_parts(logprobs, old, advantages, mask, aggregation, algorithm, [slice(None)])
    (expected,) = torch.autograd.grad(loss, logprobs)
    assert not expected[~mask].any()

    order = torch.randperm(n, generator=generator)

    def pad_rows(x, fill):
        return torch.nn.functional.pad(x[order], (padding, 0) if left_padded else (0, padding), value=fill)

    padded = pad_rows(logprobs.detach(), -INF).requires_grad_()
    micro_batches = [list(range(i, n, num_parts)) for i in range(min(num_parts, n))]
    split_loss = loss_in_parts(
        padded, pad_rows(old, math.nan), advantages[order], pad_rows(mask, False), aggregation, algorithm, micro_batches
    )
    (gradient,) = torch.autograd.grad(split_loss, padded)
    torch.testing.assert_close(split_loss, loss)
    torch.testing.assert_close(gradient, pad_rows(expected, 0.0))


@pytest.mark.parametrize("kind", POLICY_LOSSES.names)
def test_masked_entries_may_hold_anything(kind):
    """0 x inf: a masked -inf, inf or NaN log-probability leaves loss and gradient finite."""
    bad = torch.tensor([[-0.5, -INF, INF, math.nan]])
    logprobs = bad.clone().requires_grad_()
    mask = torch.tensor([[1, 0, 0, 0]])
    weights = importance_weights(bad, bad * 2, mask, mode="truncate")
    torch.testing.assert_close(weights, torch.tensor([[math.exp(0.5), 1.0, 1.0, 1.0]]))
    out = policy_loss(
        logprobs, bad.nan_to_num(0) - 99, torch.tensor([1.0]), torch.zeros(1, 4), AlgorithmConfig(policy_loss=kind),
        weights=bad,
    )  # fmt: skip
    kl = kl_estimate(logprobs, bad.flip(1), torch.zeros(1, 4), "k3")
    value = value_loss(logprobs, bad, bad.flip(1), torch.zeros(1, 4))
    (gradient,) = torch.autograd.grad((out.loss + kl + value).sum(), logprobs)
    assert torch.equal(out.loss + kl + value, torch.zeros(1, 4)) and torch.equal(gradient, torch.zeros(1, 4))
    assert torch.equal(out.ratio, torch.zeros(1, 4)) and not any(tokens.any() for tokens in out.clipped.values())
    settings = AlgorithmConfig(policy_loss=kind, importance_sampling_level="sequence")  # one ratio for all tokens
    loss = policy_loss(logprobs, bad.requires_grad_(), -2 * bad.detach(), mask, settings, weights=-bad.detach()).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)  # 1 x -0.5 x 1: old log-probabilities get no gradient
    torch.testing.assert_close(gradient, -torch.tensor([[0.5, 0.0, 0.0, 0.0]]))
    assert not policy_loss(logprobs.detach(), bad, torch.ones(1), mask, settings).loss.requires_grad


@pytest.mark.parametrize(
    ("level", "mode", "cap", "expected"),
    [
        ("token", "truncate", 2.0, [[2.0, 1.5, 0.4], [0.5, 1, 1]]),
        ("token", "mask", 2.0, [[0.0, 1.5, 0.4], [0.5, 1, 1]]),
        ("sequence", "truncate", 2.0, [[1.8] * 3, [0.5] * 3]),
        ("sequence", "truncate", 1.5, [[1.5] * 3, [0.5] * 3]),
        ("sequence", "mask", 2.5, [[1.8] * 3, [0.5] * 3]),
        ("sequence", "mask", 1.7, [[0.0] * 3, [0.5] * 3]),  # a small ratio stays as it is, as in TRL
    ],
)
def test_importance_weights_known_values(level, mode, cap, expected):
    """3 x 1.5 x 0.4 = 1.8; of the second row only 0.5 was drawn by the sampler. A sequence's weight is that of all."""
    old = torch.tensor([[3.0, 1.5, 0.4], [0.5, 7.0, 7.0]]).log()
    sampler = torch.zeros(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    sampler[1, 1:] = -INF
    weights = importance_weights(old.requires_grad_(), sampler, mask, mode=mode, cap=cap, level=level)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert not weights.requires_grad


def test_a_weight_per_sequence_keeps_the_expectation_of_the_gradient_at_a_given_prefix():
    """The advantage of the prefix depends on the token drawn after it: sum of mu w A over tokens = sum of pi A."""
    policy, sampler = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    advantages = torch.tensor([1.0, -3.0, 0.5])
    old = torch.stack([torch.zeros(3), policy.log()], 1)  # a row for each token that may be drawn after the prefix
    drawn = torch.stack([torch.full((3,), math.nan), sampler.log()], 1)
    weights = importance_weights(old, drawn, ~drawn.isnan(), mode="truncate", cap=99.0, level="sequence")
    expectation = (sampler[:, None] * weights * advantages[:, None]).sum(0)
    torch.testing.assert_close(expectation, (policy * advantages).sum().expand(2))


def test_samplers_that_differ_are_corrected_unless_told_otherwise():
    algorithm = AlgorithmConfig()
    assert algorithm.with_sampler("vllm").importance_sampling == "token_truncate"
    assert algorithm.with_sampler("paged").importance_sampling == "none" and algorithm.correction is None
    assert AlgorithmConfig(importance_sampling="none").with_sampler("vllm").importance_sampling == "none"


def test_value_loss_without_a_limit():
    """The clipped one is in test_ppo.test_loss_and_gradients_of_ppo_known_values."""
    values, old, returns = torch.tensor([[[1.0, 1.0, 0.0]], [[0.5, 0.9, 0.0]], [[2.0, 0.0, 9.0]]])
    loss = value_loss(values, old, returns, torch.tensor([[1, 1, 0]]), clip=None)
    torch.testing.assert_close(loss, torch.tensor([[0.5, 0.5, 0.0]]))
