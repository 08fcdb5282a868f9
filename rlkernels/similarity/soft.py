"""Soft dynamic time warping, the differentiable one."""

import torch

from rlkernels import _check
from rlkernels import backend as _backend
from rlkernels.similarity import arguments, reference


def soft_dtw(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    gamma: float = 1.0,
    x_lengths: torch.Tensor | None = None,
    y_lengths: torch.Tensor | None = None,
    band: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Soft-DTW of B pairs, differentiable in x and y (Cuturi & Blondel, 2017, algorithms 1 and 2).

    DTW with the minimum replaced by ``-gamma log sum exp(-v / gamma)``: below the cost of :func:`dtw`, tending to it
    as gamma goes to 0; it may be negative.

    Args:
        x: floating point [B, L] or [B, L, D]; float64 is computed in float64, everything else in float32.
        y: [B, K] or [B, K, D], paired with x.
        gamma: smoothing, > 0, in units of the cost.
        x_lengths, y_lengths: integers [B], or None. What lies beyond a length is never read and has gradient 0.
        band: Sakoe-Chiba radius as in :func:`dtw`.

    Returns:
        [B], float64 for float64 inputs, else float32. Both empty: 0. One empty: inf. NaN or infinity inside a
        length: NaN. Pairs of these three kinds have gradient 0.

    Raises:
        TypeError, ValueError: a wrong type, dtype, rank, shape, device or value, named in the message.
    """
    arguments.series(x, y)
    _check.shape("y", y, (x.shape[0], *[None] * (y.ndim - 1)))
    if not isinstance(gamma, (int, float)) or isinstance(gamma, bool):
        raise TypeError(f"gamma must be a number, got {gamma!r}")
    _check.positive("gamma", gamma)
    band = arguments.band(band)
    _backend.choose("soft_dtw", x.device, backend)
    x_lengths = arguments.lengths("x_lengths", x_lengths, x)
    y_lengths = arguments.lengths("y_lengths", y_lengths, y)
    return reference.soft_dtw(x, y, gamma=float(gamma), x_lengths=x_lengths, y_lengths=y_lengths, band=band)
