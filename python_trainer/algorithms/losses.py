"""Policy and value losses on [batch, time], and estimates of the KL to a reference.

A loss is a sum of per-token losses times weights, which are computed from the minibatch, the answers of one optimizer
step (:class:`Aggregation`). So micro-batches, ranks, padding and order cannot change it: the losses of the parts add up
to the loss of the minibatch.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from python_trainer.algorithms.settings import KL_ESTIMATORS, POLICY_LOSSES, AlgorithmConfig
from python_trainer.errors import UserError


class Aggregation(Protocol):
    """Compute the weight of every token's loss in the loss of the minibatch (one optimizer step).

    Args:
        mask: bool [B, T] of this part of the minibatch.
        num_tokens: unmasked tokens of the minibatch, over all micro-batches and ranks.
        num_sequences: sequences of the minibatch.
        max_length: most tokens that an answer may have.
        lengths: [B] tokens of each sequence. It includes a masked prefix: without it, the tokens of a short suffix
            would outweigh all others.

    Returns:
        float32 [B, T], 0 where masked.
    """

    def __call__(
        self, mask: torch.Tensor, *, num_tokens: int, num_sequences: int, max_length: int, lengths: torch.Tensor
    ) -> torch.Tensor: ...


def token_mean(mask: torch.Tensor, *, num_tokens: int, **_: object) -> torch.Tensor:
    """Weigh a token by 1 / all tokens (DAPO, arXiv 2503.14476)."""
    return mask.float() / max(num_tokens, 1)


def sequence_token_sum(mask: torch.Tensor, *, num_sequences: int, **_: object) -> torch.Tensor:
    """Weigh a token by 1 / all sequences."""
    return mask.float() / max(num_sequences, 1)


def sequence_token_mean(mask: torch.Tensor, *, num_sequences: int, lengths: torch.Tensor, **_: object) -> torch.Tensor:
    """Weigh a token by 1 / (all sequences x tokens of its own) (GRPO, arXiv 2402.03300)."""
    return mask.float() / (lengths[:, None].clamp(min=1) * max(num_sequences, 1))


def constant(mask: torch.Tensor, *, num_sequences: int, max_length: int, **_: object) -> torch.Tensor:
    """Weigh a token by 1 / (all sequences x longest answer allowed) (Dr. GRPO, arXiv 2503.20783)."""
    return mask.float() / (max(num_sequences, 1) * max_length)


def clip(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmConfig
) -> torch.Tensor:
    """Return -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) (PPO, arXiv 1707.06347, eq. 7).

    With ``delta`` the first r is at most that (dual clip; INTELLECT-2, arXiv 2505.07291). With
    ``importance_sampling_level: sequence`` r is the geometric mean over the answer (GSPO, arXiv 2507.18071, eq. 7).
    """
    unclipped = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    low, high = settings.clip_range
    return -torch.minimum(unclipped * advantages, ratio.clamp(low, high) * advantages)


def cispo(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmConfig
) -> torch.Tensor:
    """Return -sg(min(r, 1 + epsilon_high)) A log pi, sg without gradient (CISPO, arXiv 2506.13585, eq. 4).

    No token loses its gradient, but its weight is bounded. There is no lower bound, as in the paper's runs and TRL.
    """
    return -ratio.detach().clamp(max=settings.clip_range[1]) * advantages * logprobs


@dataclass
class PolicyLoss:
    """Policy loss per token, ratios and clipping; all [B, T] and 0 where masked."""

    loss: torch.Tensor
    ratio: torch.Tensor  # pi / pi_old before any clipping, differentiable
    clipped: dict[str, torch.Tensor]  # bool, for each of AlgorithmConfig.clip_bounds: tokens whose ratio it replaces


def clipped_tokens(ratio: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """Return for each of ``settings.clip_bounds`` the tokens whose ratio it replaces, bool [B, T].

    In ``clip`` a bound counts where the clipped term is the smaller one. ``cispo`` bounds every token from above.
    """
    low, high = settings.clip_range
    clipped = {"low": (ratio < low) & (advantages < 0), "high": (ratio > high) & (advantages > 0)}
    if settings.policy_loss == "cispo":
        clipped["high"] = (ratio > high) & (advantages != 0)  # a token without an advantage has no loss to clip
    return {bound: clipped[bound] for bound in settings.clip_bounds}


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    settings: AlgorithmConfig,
    *,
    weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """Compute ``settings.policy_loss`` of every token.

    Args:
        logprobs: [B, T], differentiable.
        old_logprobs: [B, T] under the policy before the update; ``logprobs.detach()`` for the first pass.
        advantages: [B] or [B, T].
        mask: bool [B, T]; the other inputs may be anything, NaN and inf included, where it is False.
        weights: [B, T] detached factors, such as :func:`importance_weights`.

    Raises:
        UserError: ``settings.policy_loss`` returns another shape.
    """
    mask = mask.bool()
    advantages = torch.where(mask, advantages[:, None] if advantages.ndim == 1 else advantages, 0.0)
    # zero before exp: a masked inf or NaN would otherwise give inf x 0 = NaN in the gradient
    logprobs = torch.where(mask, logprobs, 0.0)
    difference = logprobs - torch.where(mask, old_logprobs.detach(), 0.0)
    if settings.importance_sampling_level == "sequence":
        difference = (difference.sum(1) / mask.sum(1).clamp(min=1))[:, None].expand(mask.shape)
    ratio = torch.exp(difference)
    loss = POLICY_LOSSES.resolve(settings.policy_loss)(logprobs, ratio, advantages, settings)
    if loss.shape != mask.shape:  # a mean would count as the loss of every token
        raise UserError(f"policy_loss must return a loss per token, {list(mask.shape)}, got {list(loss.shape)}")
    if weights is not None:
        loss = loss * torch.where(mask, weights, 0.0)
    clipped = clipped_tokens(ratio.detach(), advantages, settings)  # advantages are 0 where masked: none there
    return PolicyLoss(torch.where(mask, loss, 0.0), torch.where(mask, ratio, 0.0), clipped)


def importance_weights(
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: str,
    cap: float | torch.Tensor = 2.0,
    level: str = "token",
) -> torch.Tensor:
    """Compute pi_old / pi_sampler, detached, to correct for a sampler that differs from the trained policy.

    A ratio per token is biased and has little variance. The ratio of the whole sequence is unbiased but for the cap,
    and farther from 1 the longer the answer (Liu et al. 2025, "When Speed Kills Stability").

    Args:
        mask: bool [B, T], True for tokens that the sampler drew, False for a given prefix.
        mode: ``"truncate"``: min(ratio, cap). ``"mask"``: 0 where the ratio is above ``cap``.
        cap: > 1; or > 0, [B, 1], for ``"truncate"``.
        level: ``"token"``: tokens that were not drawn weigh 1. ``"sequence"``: the product over the drawn tokens of a
            row weighs all of its tokens, since the advantage of a given prefix depends on what was drawn after it.
    """
    mask = mask.bool()
    difference = torch.where(mask, old_logprobs.detach() - sampler_logprobs, 0.0)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand(mask.shape)
    ratio = torch.exp(difference)
    return torch.where(ratio > cap, 0.0, ratio) if mode == "mask" else ratio.clamp(max=cap)


def k1(r: torch.Tensor) -> torch.Tensor:
    """Return r = log pi - log pi_ref itself. Unbiased."""
    return r


def k2(r: torch.Tensor) -> torch.Tensor:
    """Return r^2 / 2. Less variance and some bias."""
    return 0.5 * r * r


def k3(r: torch.Tensor) -> torch.Tensor:
    """Return exp(-r) + r - 1. Unbiased and never negative."""
    return torch.expm1(-r) + r


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(pi || pi_ref) per token, from sampled ones (J. Schulman, "Approximating KL divergence", 2020).

    In a *loss* its gradient counts: that of ``k1`` is zero in expectation, that of ``k2`` is exact on policy, that of
    ``k3`` is biased towards the forward KL.

    Args:
        mask: bool [B, T]; log-probabilities may be anything, NaN and inf included, where it is False.
        kind: a name in ``KL_ESTIMATORS``, or ``module:function`` of r = log pi - log pi_ref, [B, T].
    """
    mask = mask.bool()
    r = torch.where(mask, logprobs, 0.0) - torch.where(mask, ref_logprobs, 0.0)
    return torch.where(mask, KL_ESTIMATORS.resolve(kind)(r), 0.0)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float | None = 0.2,
) -> torch.Tensor:
    """Compute half the squared error [B, T] of the critic, 0 where masked.

    With ``clip``, the most that a value may move from its old one, return the larger of the clipped and unclipped error
    (PPO).
    """
    mask = mask.bool()
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values.detach(), returns))
    error = (values - returns) ** 2
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns) ** 2)
    return 0.5 * error
