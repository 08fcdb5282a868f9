"""Estimates of KL(pi || pi_ref) from sampled tokens (J. Schulman, "Approximating KL divergence", 2020)."""

import torch

from python_trainer.algorithms.settings import KL_ESTIMATORS


def k1(r: torch.Tensor) -> torch.Tensor:
    """Returns r = log pi - log pi_ref itself. Unbiased."""
    return r


def k2(r: torch.Tensor) -> torch.Tensor:
    """Returns r^2 / 2. Less variance and some bias."""
    return 0.5 * r * r


def k3(r: torch.Tensor) -> torch.Tensor:
    """Returns exp(-r) + r - 1. Unbiased and never negative."""
    return torch.expm1(-r) + r


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimates the KL per token.

    In a *loss* its gradient counts: that of ``k1`` is zero in expectation, that of ``k2`` is exact on policy, that of
    ``k3`` is biased towards the forward KL.

    Args:
        logprobs: [B, T], differentiable.
        ref_logprobs: [B, T] of the same tokens under the reference.
        mask: bool [B, T]; log-probabilities may be anything, NaN and inf included, where it is False.
        kind: a name in ``KL_ESTIMATORS``, or ``module:function`` of r = log pi - log pi_ref, [B, T].

    Returns:
        [B, T], 0 where masked.
    """
    mask = mask.bool()
    r = torch.where(mask, logprobs, 0.0) - torch.where(mask, ref_logprobs, 0.0)
    return torch.where(mask, KL_ESTIMATORS.resolve(kind)(r), 0.0)
