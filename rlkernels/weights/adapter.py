"""Weights with a low-rank adapter."""

import torch

from rlkernels._precision import without_autocast


def merged_weight(base: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """Add a low-rank adapter to a weight.

    Args:
        base: floating point [out, in].
        down, up: floating point [r, in] and [out, r].
        scale: of their product.

    Returns:
        ``base`` + ``scale`` x ``up`` ``down``, float32 [out, in].
    """
    with without_autocast(base.device):
        return base.float() + scale * (up.float() @ down.float())
