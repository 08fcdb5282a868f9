"""Estimates of KL(pi || pi_ref) from sampled tokens (J. Schulman, "Approximating KL divergence", 2020)."""

import torch


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor, kind: str) -> torch.Tensor:
    """KL per token, with r = log pi - log pi_ref.

    As a number, ``k1`` = r is unbiased, ``k2`` = r^2 / 2 has less variance and some bias, ``k3`` = exp(-r) + r - 1
    is unbiased and never negative. As a *loss* the gradient counts: that of ``k1`` is zero in expectation, that of
    ``k2`` is right on policy, that of ``k3`` leans towards the forward KL.

    Args:
        logprobs: [B, T], differentiable.
        ref_logprobs: [B, T] of the same tokens under the reference.
        mask: bool [B, T]; log-probabilities may be anything, NaN and inf included, where it is False.
        kind: ``"k1"``, ``"k2"`` or ``"k3"``.

    Returns:
        [B, T], 0 where masked.
    """
    mask = mask.bool()
    r = torch.where(mask, logprobs, 0.0) - torch.where(mask, ref_logprobs, 0.0)
    if kind == "k1":
        return r
    if kind == "k2":
        return 0.5 * r * r
    if kind == "k3":
        return torch.expm1(-r) + r
    raise ValueError(f"kind must be 'k1', 'k2' or 'k3', got {kind!r}")
