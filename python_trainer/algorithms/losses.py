"""Policy and value losses on [batch, time].

A loss is a sum of per-token losses times weights, which are computed from the *whole* batch
(:class:`Aggregation`). So micro-batches, ranks, padding and order cannot change it: the losses of the parts add up to
the loss of the whole.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


class Aggregation(Protocol):
    """Computes the weight of every token's loss in the loss of the whole batch.

    Args:
        mask: bool [B, T] of this part of the batch.
        num_tokens: unmasked tokens of the whole batch, over all micro-batches and ranks.
        num_sequences: sequences of the whole batch.
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
    """Weighs a token by 1 / all tokens (DAPO, arXiv 2503.14476)."""
    return mask.float() / max(num_tokens, 1)


def sequence_token_sum(mask: torch.Tensor, *, num_sequences: int, **_: object) -> torch.Tensor:
    """Weighs a token by 1 / all sequences."""
    return mask.float() / max(num_sequences, 1)


def sequence_token_mean(mask: torch.Tensor, *, num_sequences: int, lengths: torch.Tensor, **_: object) -> torch.Tensor:
    """Weighs a token by 1 / (all sequences x tokens of its own) (GRPO, arXiv 2402.03300)."""
    return mask.float() / (lengths[:, None].clamp(min=1) * max(num_sequences, 1))


def constant(mask: torch.Tensor, *, num_sequences: int, max_length: int, **_: object) -> torch.Tensor:
    """Weighs a token by 1 / (all sequences x longest answer allowed) (Dr. GRPO, arXiv 2503.20783)."""
    return mask.float() / (max(num_sequences, 1) * max_length)


@dataclass
class PolicyLoss:
    """Policy loss per token, ratios and clipping; all [B, T] and 0 where masked."""

    loss: torch.Tensor
    ratio: torch.Tensor  # pi / pi_old before any clipping, differentiable
    clipped_low: torch.Tensor  # bool: ratio below 1 - epsilon with a negative advantage
    clipped_high: torch.Tensor  # bool: ratio above 1 + epsilon_high with a positive advantage


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    weights: torch.Tensor | None = None,
    level: str = "token",
) -> PolicyLoss:
    """Computes the clipped surrogate of PPO (arXiv 1707.06347, eq. 7), with a minus sign.

    -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), where ratio = pi / pi_old of the token, or the
    geometric mean of that over the sequence (GSPO, arXiv 2507.18071, eq. 7).

    Args:
        logprobs: [B, T], differentiable.
        old_logprobs: [B, T] under the policy before the update; ``logprobs.detach()`` for the first pass.
        advantages: [B] or [B, T].
        mask: bool [B, T]; the other inputs may be anything, NaN and inf included, where it is False.
        epsilon: clip range below 1, and above 1 unless ``epsilon_high`` is given.
        epsilon_high: clip range above 1 (DAPO uses 0.28).
        delta: upper bound of the ratio where the advantage is negative, > 1 + epsilon_high (INTELLECT-2, arXiv
            2505.07291); None for none.
        weights: [B, T] detached factors, such as :func:`importance_weights`.
        level: ``"token"``: a ratio per token, ``"sequence"``: one per sequence.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")
    mask = mask.bool()
    high = epsilon if epsilon_high is None else epsilon_high
    advantages = torch.where(mask, advantages[:, None] if advantages.ndim == 1 else advantages, 0.0)
    # zero before exp: a masked inf or NaN would otherwise give inf x 0 = NaN in the gradient
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, old_logprobs.detach(), 0.0)
    if level == "sequence":
        difference = (difference.sum(1) / mask.sum(1).clamp(min=1))[:, None].expand(mask.shape)
    ratio = torch.exp(difference)
    free = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(free * advantages, ratio.clamp(1 - epsilon, 1 + high) * advantages)
    if weights is not None:
        loss = loss * torch.where(mask, weights, 0.0)
    seen = ratio.detach()
    return PolicyLoss(
        loss=loss,
        ratio=torch.where(mask, ratio, 0.0),
        clipped_low=mask & (seen < 1 - epsilon) & (advantages < 0),
        clipped_high=mask & (seen > 1 + high) & (advantages > 0),
    )


def importance_weights(
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: str,
    cap: float | torch.Tensor = 2.0,
    level: str = "token",
) -> torch.Tensor:
    """Computes pi_old / pi_sampler, detached, to correct for a sampler that differs from the trained policy.

    A ratio per token is biased and has little variance. The ratio of the whole sequence is unbiased but for the cap,
    and farther from 1 the longer the answer (Liu et al. 2025, "When Speed Kills Stability").

    Args:
        old_logprobs: [B, T], by the trainer, before the update.
        sampler_logprobs: [B, T], recorded when the tokens were drawn.
        mask: bool [B, T], True for tokens that the sampler drew. Other tokens (a given prefix) weigh 1.
        mode: ``"truncate"``: min(ratio, cap). ``"mask"``: 0 where the ratio is above ``cap`` or below 1 / ``cap``.
        cap: > 1; or > 0, [B, 1], for ``"truncate"``.
        level: ``"token"``, or ``"sequence"``: the product over the drawn tokens of a row.

    Returns:
        [B, T].
    """
    mask = mask.bool()
    difference = torch.where(mask, old_logprobs.detach() - sampler_logprobs, 0.0)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand(mask.shape)
    elif level != "token":
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")
    ratio = torch.exp(difference)
    if mode == "truncate":
        return ratio.clamp(max=cap)
    if mode == "mask":
        return torch.where((ratio > cap) | (ratio < 1 / cap), 0.0, ratio)
    raise ValueError(f"mode must be 'truncate' or 'mask', got {mode!r}")


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float | None = 0.2,
) -> torch.Tensor:
    """Computes half the squared error of the critic; with ``clip``, the larger of that and the clipped one (PPO).

    Args:
        values: [B, T], differentiable.
        old_values: [B, T] before the update.
        returns: [B, T].
        mask: bool [B, T].
        clip: how far a value may move from its old one; None for no clipping.

    Returns:
        [B, T], 0 where masked.
    """
    mask = mask.bool()
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values.detach(), returns))
    error = (values - returns) ** 2
    if clip is not None:
        held = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (held - returns) ** 2)
    return 0.5 * error
