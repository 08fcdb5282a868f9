"""Advantages, losses and KL: known values with their arithmetic, invariances, gradient directions.

Bugs that trainers have shipped, and the test that keeps each out of this one:

- The loss changes with the micro-batch or rank split, or with the amount or side of padding:
  test_loss_does_not_depend_on_split_order_or_padding,
  test_trainer.test_neither_weights_nor_metrics_depend_on_micro_batches.
- The end token masked because it is the padding token, or one of several:
  test_trainer.test_several_eos_tokens_end_answers_and_count_in_the_loss, test_trl_parity.
- Sampled at one temperature, scored at another: test_trainer.test_temperature_is_the_same_in_sampling_and_scoring.
- Parity that holds because everything is zero: test_trl_parity wants a loss and gradients that are not.
- Groups filtered by the shaped reward, or by a deviation compared with 0 after rounding:
  test_dynamic_sampling.test_groups_without_spread_in_accuracy_are_dropped_whatever_the_shaped_reward,
  test_dynamic_sampling.test_spread_is_exact, test_equal_rewards_give_exactly_zero_advantage.
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

from python_trainer.algorithms.advantages import (
    StepRewards,
    gae,
    group_advantages,
    group_statistics,
    rloo_advantages,
    whiten,
)
from python_trainer.algorithms.losses import importance_weights, kl_estimate, policy_loss, value_loss
from python_trainer.algorithms.settings import LOSS_TYPES, POLICY_LOSSES, AlgorithmConfig
from python_trainer.settings import PluginError

INF = float("inf")
GRAD = {"dtype": torch.float64, "requires_grad": True}


AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "dr_grpo"]


def token_weights(mask, aggregation, *, num_tokens, num_sequences, max_length=1, lengths=None):
    lengths = mask.sum(1) if lengths is None else lengths
    return LOSS_TYPES.resolve(aggregation)(
        mask, num_tokens=num_tokens, num_sequences=num_sequences, max_length=max_length, lengths=lengths
    )


def mask_of(lengths, width):
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def test_group_advantages_known_values():
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.0, 5.0, 4.0])
    groups = torch.tensor([7, 7, 2, 7, 2, 2])
    # group 7: 1, 0, 0: mean 1/3, std sqrt((4/9 + 1/9 + 1/9) / 2) = sqrt(1/3); group 2: 3, 5, 4: mean 4, std 1
    plain = torch.tensor([2 / 3, -1 / 3, -1, -1 / 3, 1, 0])
    std = torch.tensor([1 / 3, 1 / 3, 1, 1 / 3, 1, 1])
    std[[0, 1, 3]] = math.sqrt(1 / 3)
    torch.testing.assert_close(group_advantages(rewards, groups, scale_rewards="none"), plain)
    torch.testing.assert_close(group_advantages(rewards, groups), plain / (std + 1e-4))
    # all six: mean 13/6, sum of squares 51 - 6 * (13/6)^2 = 22.8333, / 5 = 4.5667
    batch = plain / (math.sqrt((51 - 169 / 6) / 5) + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, groups, scale_rewards="batch"), batch)


def test_equal_rewards_give_exactly_zero_advantage():
    # 0.1 + 0.1 + 0.1 is not 3 x 0.1 in binary: a rounding error divided by a tiny deviation must not become a signal
    for value in (0.1, 0.7, 1e6 + 0.3):
        for n in (1, 3, 7):
            rewards, groups = torch.full((n,), value), torch.zeros(n, dtype=torch.int64)
            for scale in ("group", "batch", "none"):
                assert torch.equal(group_advantages(rewards, groups, scale_rewards=scale), torch.zeros(n))
            assert torch.equal(rloo_advantages(rewards, groups), torch.zeros(n))
            assert torch.equal(group_statistics(rewards, groups)[2], torch.zeros(n))


def test_rloo_known_values():
    # others of 1 are (0, 2): mean 1 -> 0; of 0: 1.5 -> -1.5; of 2: 0.5 -> 1.5; alone: nothing to compare with
    got = rloo_advantages(torch.tensor([1.0, 9.0, 0.0, 2.0]), torch.tensor([0, 1, 0, 0]))
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, -1.5, 1.5]))


def test_empty_batch():
    empty, groups = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert group_advantages(empty, groups).shape == rloo_advantages(empty, groups).shape == (0,)
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


def test_gae_known_values():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.2]])
    # gamma 0.9, lambda 0.5: last: 1 - 0.2 = 0.8; middle: 0.9 * 0.2 - 0.4 + 0.45 * 0.8 = 0.14;
    # first: 0.9 * 0.4 - 0.5 + 0.45 * 0.14 = -0.077
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.077, 0.14, 0.8]]))
    torch.testing.assert_close(returns, advantages + values)


def test_gae_steps_over_masked_tokens():
    rewards, values = torch.randn(2, 5), torch.randn(2, 5)
    dense, dense_returns = gae(rewards, values, torch.ones(2, 5), gamma=0.97, lam=0.9)
    where = torch.tensor([1, 2, 4, 6, 7])  # masked tokens before, between and after, holding NaN
    wide_rewards, wide_values, mask = torch.full((2, 9), math.nan), torch.full((2, 9), math.nan), torch.zeros(2, 9)
    wide_rewards[:, where], wide_values[:, where], mask[:, where] = rewards, values, 1.0
    advantages, returns = gae(wide_rewards, wide_values, mask, gamma=0.97, lam=0.9)
    torch.testing.assert_close(advantages[:, where], dense)
    torch.testing.assert_close(returns[:, where], dense_returns)
    assert torch.equal(advantages[mask == 0], torch.zeros(8))


def test_gae_with_lambda_one_is_the_discounted_return():
    rewards, values = torch.randn(3, 6), torch.randn(3, 6)
    _, returns = gae(rewards, values, torch.ones(3, 6), gamma=0.9, lam=1.0)
    expected = sum(0.9**k * rewards[:, k] for k in range(6))
    torch.testing.assert_close(returns[:, 0], expected)


def test_whiten():
    mask = mask_of([3, 1], 4)
    values = torch.tensor([[1.0, 2.0, 3.0, math.nan], [6.0, INF, 0.0, 0.0]])
    # 1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 3 = 14/3
    scale = math.sqrt(3 / 14)
    expected = torch.tensor([[-2, -1, 0, 0], [3, 0, 0, 0]]) * scale
    torch.testing.assert_close(whiten(values, mask), expected)


def test_token_rewards_sit_on_the_last_token_whatever_the_padding_side():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 0, 1]]).bool()
    step = StepRewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.arange(4), mask, mask, torch.full((4, 3), 0.5))
    expected = torch.tensor([[-0.5, 0.5, 0], [0, -0.5, 1.5], [0, 0, 0], [-0.5, 0, 3.5]])
    torch.testing.assert_close(step.token_rewards(), expected)


def test_kl_known_values():
    r = math.log(2.0)
    logprobs, ref, mask = torch.tensor([[r, -INF]]), torch.tensor([[0.0, math.nan]]), torch.tensor([[1, 0]])
    assert kl_estimate(logprobs, ref, mask, "k1").tolist()[0] == pytest.approx([r, 0])
    assert kl_estimate(logprobs, ref, mask, "k2").tolist()[0] == pytest.approx([r * r / 2, 0])
    # exp(-ln 2) + ln 2 - 1 = 0.5 + 0.6931 - 1
    assert kl_estimate(logprobs, ref, mask, "k3").tolist()[0] == pytest.approx([0.5 + r - 1, 0])
    with pytest.raises(PluginError, match="must be one of k1, k2, k3, module:function, got 'k4'"):
        kl_estimate(logprobs, ref, mask, "k4")


@pytest.mark.parametrize(("kind", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_kl_estimates_in_expectation(kind, unbiased):
    p, q = torch.randn(50).log_softmax(0), torch.randn(50).log_softmax(0)
    expectation = (p.exp() * kl_estimate(p[None], q[None], torch.ones(1, 50), kind)[0]).sum()
    true = (p.exp() * (p - q)).sum()
    assert (abs(expectation - true) < 1e-5) == unbiased


def test_kl_gradients_in_expectation():
    """As losses: k1 pushes nowhere, k2 in the direction of the true KL."""
    logits, q = torch.randn(6, **GRAD), torch.randn(6, dtype=torch.float64).log_softmax(0)

    def gradient(kind):
        p = logits.log_softmax(0)
        loss = (p.exp().detach() * kl_estimate(p[None], q[None], torch.ones(1, 6), kind)[0]).sum()
        return torch.autograd.grad(loss, logits)[0]

    p = logits.log_softmax(0)
    true = torch.autograd.grad((p.exp() * (p - q)).sum(), logits)[0]
    assert gradient("k1").abs().max() < 1e-12
    torch.testing.assert_close(gradient("k2"), true)
    assert not torch.allclose(gradient("k3"), true, rtol=1e-2)


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
    out = policy_loss(
        torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), settings
    )
    assert out.loss.item() == pytest.approx(expected, rel=1e-6)
    assert out.ratio.item() == pytest.approx(ratio, rel=1e-6)
    high = options.get("epsilon_high", 0.2)
    assert out.clipped_low.item() == (ratio < 0.8 and advantage < 0)
    assert out.clipped_high.item() == (ratio > 1 + high and advantage > 0)


def test_sequence_ratio_known_values():
    """GSPO: one ratio per answer, the geometric mean over its tokens, clipped as one."""
    logprobs = torch.tensor([[math.log(2.0), math.log(0.5), math.log(3.375), math.nan]], requires_grad=True)
    mask, advantages = mask_of([3], 4), torch.tensor([1.0])
    # (2 x 0.5 x 3.375)^(1/3) = 1.5: above 1.2, held back at every token, no gradient
    gspo = AlgorithmConfig(importance_sampling_level="sequence")
    out = policy_loss(logprobs, torch.zeros(1, 4), advantages, mask, gspo)
    torch.testing.assert_close(out.ratio.detach(), torch.tensor([[1.5, 1.5, 1.5, 0.0]]))
    torch.testing.assert_close(out.loss.detach(), torch.tensor([[-1.2, -1.2, -1.2, 0.0]]))
    assert out.clipped_high.tolist() == [[True, True, True, False]]
    assert not torch.autograd.grad(out.loss.sum(), logprobs)[0].any()
    # at 0.5 x advantage -1 with epsilon 0.6 nothing is clipped: d(ratio) / d(logprob) = ratio / 3 for each of 3 tokens
    other = torch.full((1, 4), math.log(0.5), requires_grad=True)
    wide = gspo.model_copy(update={"epsilon": 0.6})
    out = policy_loss(other, torch.zeros(1, 4), -advantages, mask, wide)
    (gradient,) = torch.autograd.grad(out.loss.sum(), other)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.5, 0.5, 0.0]]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.1, 1.0, 1.1), (1.5, 1.0, 1.28), (5.0, -2.0, 1.28), (0.01, -2.0, 0.01)],  # min(ratio, 1.28), no lower bound
)
def test_cispo_known_values(ratio, advantage, weight):
    """-weight x A x log pi, and the gradient -weight x A: no token is without one."""
    logprobs = torch.tensor([[-0.75, math.nan]], requires_grad=True)
    old, mask = torch.tensor([[-0.75 - math.log(ratio), 0.0]]), mask_of([1], 2)
    settings = AlgorithmConfig(policy_loss="cispo", epsilon_high=0.28)
    out = policy_loss(logprobs, old, torch.tensor([advantage]), mask, settings)
    torch.testing.assert_close(out.loss, torch.tensor([[0.75 * weight * advantage, 0.0]]))
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([[-weight * advantage, 0.0]]))
    with pytest.raises(PluginError, match="must be one of clip, cispo, module:function, got 'sapo'"):
        policy_loss(
            logprobs, old, torch.tensor([1.0]), mask, AlgorithmConfig().model_copy(update={"policy_loss": "sapo"})
        )


def test_aggregations_known_values():
    losses, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]), mask_of([3, 1], 3)
    expected = {
        "token-mean": 10 / 4,  # (1 + 2 + 3 + 4) / 4 tokens
        "seq-mean-token-sum": 10 / 2,  # (6 + 4) / 2 sequences
        "seq-mean-token-mean": 6 / 2,  # (6 / 3 + 4 / 1) / 2
        "dr_grpo": 10 / 16,  # (6 + 4) / (2 x 8)
    }
    assert set(expected) == set(AGGREGATIONS)
    expected |= {"grpo": expected["seq-mean-token-mean"], "dapo": expected["token-mean"]}
    assert set(expected) == set(LOSS_TYPES.names())
    for name, value in expected.items():
        weights = token_weights(mask, name, num_tokens=4, num_sequences=2, max_length=8)
        assert (losses * weights).sum().item() == pytest.approx(value)
    whole = token_weights(mask, "seq-mean-token-mean", num_tokens=4, num_sequences=2, lengths=torch.tensor([6, 2]))
    assert (losses * whole).sum().item() == pytest.approx((6 / 6 + 4 / 2) / 2)
    with pytest.raises(PluginError, match="must be one of grpo, dapo, .*, got 'mean'"):
        token_weights(mask, "mean", num_tokens=4, num_sequences=2)


def whole_loss(logprobs, old, advantages, mask, aggregation, settings, parts):
    total = 0.0
    for rows in parts:
        weights = token_weights(
            mask[rows], aggregation, num_tokens=int(mask.sum()), num_sequences=len(mask), max_length=9
        )
        total = (
            total
            + (policy_loss(logprobs[rows], old[rows], advantages[rows], mask[rows], settings).loss * weights).sum()
        )
    return total


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    aggregation=st.sampled_from(AGGREGATIONS),
    kind=st.sampled_from(POLICY_LOSSES.names()),
    split=st.integers(1, 4),
    pad=st.integers(0, 3),
    left=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_loss_does_not_depend_on_split_order_or_padding(lengths, aggregation, kind, split, pad, left, seed):
    """Micro-batches or ranks, amount and side of padding, order of rows: the same loss and the same gradient."""
    gen = torch.Generator().manual_seed(seed)
    algorithm, n, width = AlgorithmConfig(policy_loss=kind), len(lengths), max(max(lengths), 1)
    values = torch.randn(n, width, generator=gen, dtype=torch.float64)
    old = values + 0.3 * torch.randn(n, width, generator=gen, dtype=torch.float64)
    advantages, mask = torch.randn(n, generator=gen, dtype=torch.float64), mask_of(lengths, width)
    plain = values.clone().requires_grad_()
    loss = whole_loss(plain, old, advantages, mask, aggregation, algorithm, [slice(None)])
    (expected,) = torch.autograd.grad(loss, plain)

    order = torch.randperm(n, generator=gen)
    wide_values = torch.full((n, width + pad), -INF, dtype=torch.float64)
    wide_old, wide_mask = torch.full_like(wide_values, math.nan), torch.zeros_like(wide_values, dtype=torch.bool)
    for row, source in enumerate(order.tolist()):
        length = lengths[source]
        place = slice(width + pad - length, None) if left else slice(0, length)
        wide_values[row, place], wide_old[row, place] = values[source, :length], old[source, :length]
        wide_mask[row, place] = True
    wide = wide_values.clone().requires_grad_()
    parts = [range(i, n, split) for i in range(min(split, n))]
    other = whole_loss(wide, wide_old, advantages[order], wide_mask, aggregation, algorithm, [list(p) for p in parts])
    (gradient,) = torch.autograd.grad(other, wide)
    torch.testing.assert_close(other, loss)
    for row, source in enumerate(order.tolist()):
        torch.testing.assert_close(gradient[row][wide_mask[row]], expected[source, : lengths[source]])
    assert torch.equal(gradient[~wide_mask], torch.zeros_like(gradient[~wide_mask]))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_descent_follows_the_sign_of_the_advantage(aggregation):
    logits = torch.randn(2, 3, 5, **GRAD)
    ids, mask = torch.randint(5, (2, 3)), mask_of([3, 2], 3)
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    out = policy_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -1.0]), mask, AlgorithmConfig())
    weights = token_weights(mask, aggregation, num_tokens=5, num_sequences=2, max_length=3)
    (gradient,) = torch.autograd.grad((out.loss * weights).sum(), logits)
    after = (logits - 0.1 * gradient).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    change = (after - logprobs).detach()
    assert (change[0] > 0).all() and (change[1, :2] < 0).all() and change[1, 2] == 0


def test_first_pass_gradient_is_the_plain_policy_gradient():
    logprobs, mask = torch.randn(3, 4, **GRAD), mask_of([4, 2, 3], 4)
    advantages = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)
    loss = policy_loss(logprobs, logprobs.detach(), advantages, mask, AlgorithmConfig()).loss.sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -advantages[:, None] * mask)


@pytest.mark.parametrize("kind", POLICY_LOSSES.names())
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
    assert torch.equal(out.ratio, torch.zeros(1, 4)) and not (out.clipped_low | out.clipped_high).any()


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
    old, sampler = torch.tensor([[3.0, 1.5, 0.4], [0.5, 7.0, 7.0]]).log(), torch.zeros(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    sampler[1, 1:] = -INF
    got = importance_weights(old, sampler, mask, mode=mode, cap=cap, level=level)
    torch.testing.assert_close(got, torch.tensor(expected))


def test_samplers_that_differ_are_corrected_unless_told_otherwise():
    algorithm = AlgorithmConfig()
    assert algorithm.with_sampler("vllm").importance_sampling == "token_truncate"
    assert algorithm.with_sampler("paged").importance_sampling == "none" and algorithm.correction is None
    assert AlgorithmConfig(importance_sampling="none").with_sampler("vllm").importance_sampling == "none"


def test_importance_weights_pass_no_gradient_but_scale_the_loss():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    weights = importance_weights(logprobs + 0.5, torch.zeros(1, 2), torch.ones(1, 2), mode="truncate")
    assert not weights.requires_grad
    ones = torch.ones(1, 2)
    loss = policy_loss(logprobs, torch.zeros(1, 2), ones[0, :1], ones, AlgorithmConfig(), weights=weights).loss.sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -torch.full((1, 2), math.exp(0.5)))


def test_value_loss_known_values():
    values = torch.tensor([[1.0, 1.0, 0.0]], requires_grad=True)
    old, returns = torch.tensor([[0.5, 0.9, 0.0]]), torch.tensor([[2.0, 0.0, 9.0]])
    # first: free (1 - 2)^2 = 1, held at 0.7: 1.69 -> 0.845; second: both (1 - 0)^2 -> 0.5; third masked
    loss = value_loss(values, old, returns, torch.tensor([[1, 1, 0]]), clip=0.2)
    torch.testing.assert_close(loss, torch.tensor([[0.845, 0.5, 0.0]]))
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 1.0, 0.0]]))  # the held one no longer moves
    free = value_loss(values, old, returns, torch.tensor([[1, 1, 0]]), clip=None)
    torch.testing.assert_close(free, torch.tensor([[0.5, 0.5, 0.0]]))
