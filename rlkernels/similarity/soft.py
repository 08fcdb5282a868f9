"""Soft dynamic time warping, the differentiable one."""

from typing import Any

import torch

from rlkernels import _check, _gradients
from rlkernels import backend as _backend
from rlkernels._contexts import public_op
from rlkernels.similarity import arguments, reference


def _shares(around: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the softmin of three predecessors [3, ...]: the least, exp((least - each) / gamma), and their sum.

    Where none can be reached the parts are 0, 0 and 0. Otherwise the sum is at least 1.
    """
    least = around.amin(0)
    least = least.masked_fill(least == torch.inf, 0)
    parts = ((least - around) / gamma).exp()
    return least, parts, parts.sum(0)


class _SoftDtw(torch.autograd.Function):
    """Along anti-diagonals, all pairs at once. Keeps one table of cumulative costs; the backward pass walks it from the
    last cell and divides each cell's share of the gradient among its three predecessors by a softmax."""

    @staticmethod
    def forward(x, y, x_lengths, y_lengths, band, gamma):
        batch, rows = x.shape[:2]
        # cell (i, j) lies at [i + j + 2, :, i + 1]; the rest is the border
        table = x.new_full((rows + y.shape[1] + 1, batch, rows + 1), torch.inf)
        table[0, :, 0] = 0
        radius = reference.band_radius(x_lengths, y_lengths, band)
        for d, lo, hi, cost in reference.diagonals(x, y):
            least, _, total = _shares(_predecessors(table, d, lo, hi), gamma)
            offset = (2 * torch.arange(lo, hi, device=x.device) - d).abs()
            value = cost + (least - gamma * total.log())  # minus log 0: infinity
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
    def backward(ctx: Any, grad, _):
        x, y, x_lengths, y_lengths, table = ctx.saved_tensors
        grad_x, grad_y = torch.zeros_like(x), torch.zeros_like(y)
        flow, next_flow, last_flow = (torch.zeros_like(table[0]) for _ in range(3))  # of d, d - 1, d - 2
        for d, lo, hi in reversed(list(reference.spans(x, y))):
            ends = (x_lengths + y_lengths - 2 == d) & (x_lengths > 0) & (y_lengths > 0)
            flow.scatter_add_(1, x_lengths[:, None], torch.where(ends, grad, 0)[:, None])
            here = flow[:, lo + 1 : hi + 1]
            _, parts, total = _shares(_predecessors(table, d, lo, hi), ctx.gamma)
            above, left, corner = parts * (here / total.clamp_min(1))
            next_flow[:, lo:hi] += above
            next_flow[:, lo + 1 : hi + 1] += left
            last_flow[:, lo:hi] += corner
            columns = slice(d - hi + 1, d - lo + 1)
            step = 2 * here.unsqueeze(-1) * (x[:, lo:hi] - y[:, columns].flip(1))
            grad_x[:, lo:hi] += step
            grad_y[:, columns] -= step.flip(1)
            flow, next_flow, last_flow = next_flow, last_flow, flow.zero_()
        return grad_x, grad_y, None, None, None, None


def _predecessors(table: torch.Tensor, d: int, lo: int, hi: int) -> torch.Tensor:
    """Return [3, B, hi - lo]: the cells above, left and at the corner of those of an anti-diagonal."""
    older, old = table[d], table[d + 1]
    return torch.stack([old[:, lo:hi], old[:, lo + 1 : hi + 1], older[:, lo:hi]])


def _check_types(x: torch.Tensor, y: torch.Tensor, **_: object) -> None:
    arguments.series(x, y)


@public_op("soft_dtw", _check_types)
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
    x, y = reference.as_series(x, torch.float64), reference.as_series(y, torch.float64)
    x_lengths, y_lengths = reference.full_lengths(x, x_lengths), reference.full_lengths(y, y_lengths)
    (x, x_bad), (y, y_bad) = reference.blank_padding(x, x_lengths), reference.blank_padding(y, y_lengths)
    value, _ = _gradients.apply(_SoftDtw, x, y, x_lengths, y_lengths, band, float(gamma))
    return reference.with_special_cases(value.to(dtype), x_lengths, y_lengths, x_bad | y_bad)
