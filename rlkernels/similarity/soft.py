"""Soft dynamic time warping, the differentiable one."""

from typing import Any

import torch

from rlkernels import _check, _gradients
from rlkernels import backend as _backend
from rlkernels._contexts import public_op
from rlkernels.similarity import arguments, reference


def _softmin_terms(values: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the terms of the softmin of three predecessors [3, ...].

    Returns:
        The minimum, exp((minimum - each) / gamma), and their sum, at least 1. Where no predecessor can be reached, 0,
        three zeros, and 0.
    """
    minimum = values.amin(0)
    minimum = minimum.masked_fill(minimum == torch.inf, 0)
    weights = ((minimum - values) / gamma).exp()
    return minimum, weights, weights.sum(0)


class _SoftDtw(torch.autograd.Function):
    """Walk along anti-diagonals, all pairs at once, and keep one table of cumulative costs.

    The backward pass walks the table from the last cell. It divides each cell's share of the gradient among its three
    predecessors by a softmax.
    """

    @staticmethod
    def forward(x, y, x_lengths, y_lengths, band, gamma):
        batch, rows = x.shape[:2]
        # cell (i, j) lies at [i + j + 2, :, i + 1]; the rest is the border
        table = x.new_full((rows + y.shape[1] + 1, batch, rows + 1), torch.inf)
        table[0, :, 0] = 0
        radius = reference.band_radius(x_lengths, y_lengths, band)
        for d, lo, hi, cost in reference.diagonals(x, y):
            minimum, _, weight_sum = _softmin_terms(reference.predecessors(table[d], table[d + 1], lo, hi), gamma)
            value = cost + (minimum - gamma * weight_sum.log())  # minus log 0: infinity
            offset = (2 * torch.arange(lo, hi, device=x.device) - d).abs()
            table[d + 2, :, lo + 1 : hi + 1] = value.masked_fill(offset > radius[:, None], torch.inf)
        return table[x_lengths + y_lengths, torch.arange(batch, device=x.device), x_lengths], table

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        x, y, x_lengths, y_lengths, _, ctx.gamma = inputs
        _, table = output
        ctx.mark_non_differentiable(table)
        ctx.save_for_backward(x, y, x_lengths, y_lengths, table)

    @staticmethod
    @_gradients.once("soft_dtw")
    def backward(ctx: Any, saved: Any, grad, _):
        x, y, x_lengths, y_lengths, table = saved
        grad_x = torch.zeros_like(x)
        grad_y = torch.zeros_like(y)
        # gradients of the cumulative costs on anti-diagonals d, d - 1, d - 2
        grad_cells, grad_sides, grad_corners = (torch.zeros_like(table[0]) for _ in range(3))
        for d, lo, hi in reversed(list(reference.spans(x, y))):
            is_end = (x_lengths + y_lengths - 2 == d) & (x_lengths > 0) & (y_lengths > 0)
            grad_cells.scatter_add_(1, x_lengths[:, None], torch.where(is_end, grad, 0)[:, None])
            grad_span = grad_cells[:, lo + 1 : hi + 1]
            costs = reference.predecessors(table[d], table[d + 1], lo, hi)
            _, weights, weight_sum = _softmin_terms(costs, ctx.gamma)
            to_above, to_left, to_corner = weights * (grad_span / weight_sum.clamp_min(1))
            grad_sides[:, lo:hi] += to_above
            grad_sides[:, lo + 1 : hi + 1] += to_left
            grad_corners[:, lo:hi] += to_corner
            columns = slice(d - hi + 1, d - lo + 1)
            grad_difference = 2 * grad_span.unsqueeze(-1) * (x[:, lo:hi] - y[:, columns].flip(1))
            grad_x[:, lo:hi] += grad_difference
            grad_y[:, columns] -= grad_difference.flip(1)
            grad_cells, grad_sides, grad_corners = grad_sides, grad_corners, grad_cells.zero_()
        return grad_x, grad_y, None, None, None, None


@public_op("soft_dtw", arguments.aligned_types)
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
    """Compute the soft-DTW of B pairs, differentiable in x and y (Cuturi & Blondel, 2017, algorithms 1 and 2).

    DTW with the minimum replaced by ``-gamma log sum exp(-v / gamma)``: below the cost of :func:`dtw`, tending to it
    as gamma goes to 0; it may be negative.

    Args:
        x: floating point [B, L] or [B, L, D]. Computed in float64: rounding of a cumulative cost is divided by gamma
            before it enters an exponential.
        y: [B, K] or [B, K, D], paired with x.
        gamma: smoothing, > 0, in units of the cost.
        x_lengths, y_lengths: integers [B], or None. What lies beyond a length is never read and has gradient 0.
        band: Sakoe-Chiba radius as in :func:`dtw`.

    Returns:
        [B], float64 for float64 inputs, else float32; inf for a cost beyond that dtype. Both empty: 0. One empty:
        inf. NaN or infinity inside a length: NaN. Pairs of these last three kinds have gradient 0.

    Raises:
        TypeError, ValueError: a wrong type, dtype, rank, shape, device or value, named in the message.
    """
    arguments.same_features(x, y)
    _check.shape("y", y, (x.shape[0], *[None] * (y.ndim - 1)))
    _check.positive("gamma", gamma)
    band = arguments.band(band)
    _backend.choose("soft_dtw", x.device, backend)
    x_lengths = arguments.lengths("x_lengths", x_lengths, x)
    y_lengths = arguments.lengths("y_lengths", y_lengths, y)
    dtype = reference.compute_dtype(x, y)
    if not torch.finfo(dtype).tiny <= gamma <= torch.finfo(dtype).max:
        raise ValueError(f"gamma must be a number that {dtype} holds, got {gamma!r}")
    x, x_lengths, x_bad = reference.prepare_series(x, x_lengths, torch.float64)
    y, y_lengths, y_bad = reference.prepare_series(y, y_lengths, torch.float64)
    value, _ = _gradients.apply(_SoftDtw, x, y, x_lengths, y_lengths, band, float(gamma))
    return reference.with_special_cases(value.to(dtype), x_lengths, y_lengths, x_bad | y_bad)
