"""Dynamic time warping by the Triton and CUDA kernels, which leave empty trajectories, NaN and infinity to torch."""

import torch

from rlkernels.similarity import reference

# from here on lower bounds can pay
MIN_PRUNED_PAIRS = 1 << 14  # four for each warp that an H100 holds
MIN_PRUNED_CELLS = 3 * 10**9  # which an H100 computes in 1 ms


def dtw(x, y, x_lengths, y_lengths, band, mode, backend):
    """Compute :func:`reference.dtw` for contiguous float32 [N, L, D] and [M, K, D]."""
    x_lengths = reference.full_lengths(x, x_lengths)
    y_lengths = reference.full_lengths(y, y_lengths)
    subsequence = mode == "subsequence"
    if backend == "cuda":
        band = -1 if band is None else band
        pairs = torch.ops.rlkernels.dtw_warps(x, y, x_lengths, y_lengths, band, subsequence)
    else:
        from rlkernels.similarity import triton_kernels

        pairs = triton_kernels.dtw_pairs(x, y, x_lengths, y_lengths, band, subsequence)
    is_usual, special = _special_cases(_kinds(x, x_lengths), _kinds(y, y_lengths))
    cost = torch.where(is_usual, pairs[0], special)
    if not subsequence:
        return cost
    return cost, pairs[1].where(is_usual, -1), pairs[2].where(is_usual, -1)


def _kinds(x, lengths):
    """Return float32 [N]: NaN for trajectories with NaN or infinity inside the length, 0 for empty ones, else inf."""
    kinds = (x - x).sum(-1).reciprocal()  # [N, L], inf or NaN
    inside = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
    return torch.where(inside, kinds, 0.0).sum(1)


def _special_cases(x_kinds, y_kinds):
    """Return bool [N, M]: the kernel computes the pair; float32 [N, M]: the costs of others, as the reference does."""
    x_kinds = x_kinds.unsqueeze(1)
    return torch.minimum(x_kinds, y_kinds).isposinf(), torch.maximum(x_kinds, y_kinds)  # both empty: 0, one empty: inf


def dtw_topk(x, y, k, x_lengths, y_lengths, band, backend):
    """Find the ``k`` smallest of :func:`dtw`.

    On CUDA, lower bounds decide which costs to compute if the problem is large and ``k`` below half of the candidates.
    """
    candidates = y.shape[0]
    pairs = x.shape[0] * candidates
    cells = pairs * x.shape[1] * y.shape[1]
    is_large = pairs >= MIN_PRUNED_PAIRS and cells >= MIN_PRUNED_CELLS
    if backend == "cuda" and is_large and 0 < 2 * k < candidates:
        cost = _promising_costs(x, y, k, x_lengths, y_lengths, -1 if band is None else band)
    else:
        cost = dtw(x, y, x_lengths, y_lengths, band, "full", backend)
    # the bits of costs >= 0 are ordered as they are, and a positive NaN comes last
    places = torch.arange(candidates, device=x.device)
    keys = torch.add(places, cost.abs().view(torch.int32), alpha=1 << 32)
    index = keys.topk(k, largest=False).values & 0xFFFFFFFF
    return cost.gather(1, index), index


def _promising_costs(x, y, k, x_lengths, y_lengths, band):
    """Compute the costs [N, M] that can be among the k smallest of a row; the others are lower bounds, above those.

    The k-th of the costs with the 2 k lowest bounds is a ceiling. Nothing here waits for the device.
    """
    x_lengths = reference.full_lengths(x, x_lengths)
    y_lengths = reference.full_lengths(y, y_lengths)
    kinds = _kinds(x, x_lengths), _kinds(y, y_lengths)
    is_usual, special = _special_cases(*kinds)
    # the kernels skip empty ones
    lengths = [n.masked_fill(kind.isnan(), 0) for n, kind in zip((x_lengths, y_lengths), kinds, strict=True)]
    native = torch.ops.rlkernels
    y_bounds = native.dtw_bounds(y, x, *lengths[::-1], -1).T
    bounds = torch.maximum(native.dtw_bounds(x, y, *lengths, band), y_bounds)
    cost = torch.where(is_usual, bounds, special)
    likely = cost.topk(2 * k, largest=False).indices
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    native.dtw_warps_(cost, rows * y.shape[0] + likely, x, y, *lengths, band)
    ceiling = cost.gather(1, likely).topk(k, largest=False).values[:, -1:]
    undecided = (cost <= ceiling).scatter(1, likely, False)
    pairs = undecided.flatten().nonzero_static(size=undecided.numel())
    native.dtw_warps_(cost, pairs, x, y, *lengths, band)
    return cost
