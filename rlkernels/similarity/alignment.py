"""Dynamic time warping of every trajectory with every other."""

from typing import Any

import torch

from rlkernels import _check
from rlkernels import backend as _backend
from rlkernels._contexts import public_op
from rlkernels.similarity import arguments, gpu, reference

MODES = ("full", "subsequence")


def _prepare(op, x, y, x_lengths, y_lengths, band, backend):
    """Check what :func:`dtw` and :func:`dtw_topk` share.

    Returns:
        The backend, and x, y (contiguous float32 [N, L, D] for kernels), lengths and band as it takes them.
    """
    arguments.same_features(x, y)
    wide = x.ndim == 3 and x.shape[2] > 1
    chosen = _backend.choose("dtw/wide" if wide else op, x.device, backend)  # both run these kernels
    x_lengths = arguments.lengths("x_lengths", x_lengths, x, in_kernel=chosen == "cpu")
    y_lengths = arguments.lengths("y_lengths", y_lengths, y, in_kernel=chosen == "cpu")
    if chosen != "torch":
        x = reference.as_series(x, torch.float32).contiguous()
        y = reference.as_series(y, torch.float32).contiguous()
    return chosen, x, y, x_lengths, y_lengths, arguments.band(band)


def _check_types(x: torch.Tensor, y: torch.Tensor, **others: Any) -> None:
    arguments.aligned_types(x, y, **others)
    _check.no_gradient(f"{arguments.DETACH}, or call soft_dtw, whose cost is differentiable", x=x, y=y)


@public_op("dtw", _check_types)
def dtw(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    x_lengths: torch.Tensor | None = None,
    y_lengths: torch.Tensor | None = None,
    band: int | None = None,
    mode: str = "full",
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the dynamic time warping cost of all N x M pairs (Sakoe & Chiba, 1978).

    The cost is the sum of squared Euclidean distances along the cheapest warping path, without a square root. Only the
    result takes memory in proportion to N * M. Tensors that require gradients raise, except under ``torch.no_grad``:
    :func:`soft_dtw` is differentiable.

    Args:
        x: floating point [N, L] or [N, L, D]; computed in float32.
        y: [M, K] or [M, K, D], of x's rank and device.
        x_lengths: integers [N] in 0..L, or None for L everywhere. What lies beyond a length is never read.
        y_lengths: integers [M] in 0..K, or None.
        band: Sakoe-Chiba radius: only cells with ``|i - j| <= band`` may be used, where the radius is widened to
            ``|len_x - len_y|`` so that a path exists. None: no band. Full mode only.
        mode: "full" aligns whole with whole; "subsequence" aligns all of x with the best stretch of y.

    Returns:
        float32 cost [N, M]. In subsequence mode ``(cost, start, end)``, the last two int64 [N, M], inclusive; of
        equally cheap stretches the one with the lowest end, then the highest start.
        Both empty: 0. One empty: inf. NaN or infinity inside a length: NaN, for all pairs of that trajectory.
        Start and end are -1 where there is no stretch (something empty or NaN).

    Raises:
        TypeError, ValueError: a wrong type, dtype, rank, shape, device or value, named in the message.
    """
    if mode not in MODES:
        _check.one_of("mode", mode, MODES)
    if mode == "subsequence" and band is not None:
        raise ValueError(f"band must be None with mode='subsequence', got {band}")
    chosen, x, y, x_lengths, y_lengths, band = _prepare("dtw", x, y, x_lengths, y_lengths, band, backend)
    if chosen == "cpu":
        native = torch.ops.rlkernels
        values = x, y, x_lengths, y_lengths
        return native.dtw(*values, band) if mode == "full" else native.dtw_subsequence(*values)
    if chosen in ("cuda", "triton"):
        return gpu.dtw(x, y, x_lengths, y_lengths, band, mode, chosen)
    result = reference.dtw(x, y, x_lengths, y_lengths, band, mode)
    return result.float() if mode == "full" else (result[0].float(), *result[1:])


@public_op("dtw_topk", _check_types)
def dtw_topk(
    x: torch.Tensor,
    y: torch.Tensor,
    k: int,
    *,
    x_lengths: torch.Tensor | None = None,
    y_lengths: torch.Tensor | None = None,
    band: int | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the k nearest of M trajectories to each of N by the cost of :func:`dtw`, exactly.

    Args:
        x, y, x_lengths, y_lengths, band: as for :func:`dtw` in full mode.
        k: how many, 0..M.

    Returns:
        float32 cost [N, k] and int64 index [N, k] into y, in ascending order, ties by lower index. NaN costs come
        after infinite ones.

    Raises:
        TypeError, ValueError: a wrong type, dtype, rank, shape, device or value, named in the message.
    """
    chosen, x, y, x_lengths, y_lengths, band = _prepare("dtw_topk", x, y, x_lengths, y_lengths, band, backend)
    k = _check.integer("k", k, 0, y.shape[0])
    if chosen == "cpu":
        return torch.ops.rlkernels.dtw_topk(x, y, k, x_lengths, y_lengths, band)
    if chosen in ("cuda", "triton"):
        return gpu.dtw_topk(x, y, k, x_lengths, y_lengths, band, chosen)
    cost, index = reference.dtw_topk(x, y, k, x_lengths, y_lengths, band)
    return cost.float(), index
