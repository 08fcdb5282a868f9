"""Dynamic time warping by the Triton and CUDA kernels, which leave empty trajectories, NaN and infinity to torch."""

import torch

from rlkernels.similarity import reference

# from here on lower bounds can pay
MIN_PRUNED_PAIRS = 1 << 14  # four for each warp that an H100 holds
MIN_PRUNED_CELLS = 3 * 10**9  # which an H100 computes in 1 ms


def dtw(x, y, x_lengths, y_lengths, band, mode, backend):
    """Compute :func:`reference.dtw` for contiguous float32 [N, L, D] and [M, K, D]."""
    if not (x.shape[1] and y.shape[1]):
        return reference.dtw(x, y, x_lengths, y_lengths, band, mode)
    lengths = reference.full_lengths(x, x_lengths), reference.full_lengths(y, y_lengths)
    subsequence = mode == "subsequence"
    if backend == "cuda":
        band = -1 if band is None else band
        cost, *places = torch.ops.rlkernels.dtw_warps(x, y, *lengths, band, subsequence)
    else:
        from rlkernels.similarity import triton_kernels

        cost, *places = triton_kernels.dtw_pairs(x, y, *lengths, band, subsequence)
    is_usual, cost = _with_special_cases(cost, *_kinds(x, y, x_lengths, y_lengths))
    if not subsequence:
        return cost
    is_special = is_usual.logical_not_()
    return cost, *(place.masked_fill_(is_special, -1) for place in places)


def _kinds(x, y, x_lengths, y_lengths):
    """Return float32 [N] and [M]: NaN for trajectories with NaN or infinity inside the length, inf for usual ones.

    Empty ones of x are 0, those of y -1, which :func:`_with_special_cases` tells apart.
    """
    return _kind(x, x_lengths, 0), _kind(y, y_lengths, -1)


def _kind(x, lengths, empty):
    kinds = (x - x).reciprocal_()  # inf or NaN
    if lengths is not None:
        beyond = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
        kinds.masked_fill_(beyond.unsqueeze(2), empty)
    return kinds.amax((1, 2))


def _with_special_cases(cost, x_kinds, y_kinds):
    """Return bool [N, M]: the kernel computed the pair; ``cost`` [N, M] with those of others, as the reference does."""
    x_kinds = x_kinds.unsqueeze(1)
    is_usual = x_kinds == y_kinds
    return is_usual, torch.where(is_usual, cost, torch.maximum(x_kinds, y_kinds))  # both empty: 0, one empty: inf


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
    keys = torch.add(places, cost.abs_().view(torch.int32), alpha=1 << 32)
    index = keys.topk(k, largest=False).values.bitwise_and_(0xFFFFFFFF)
    return cost.gather(1, index), index


def _promising_costs(x, y, k, x_lengths, y_lengths, band):
    """Compute the costs [N, M] that can be among the k smallest of a row; the others are lower bounds, above those.

    The k-th of the costs with the 2 k lowest bounds is a ceiling. Nothing here waits for the device.
    """
    kinds = _kinds(x, y, x_lengths, y_lengths)
    all_lengths = reference.full_lengths(x, x_lengths), reference.full_lengths(y, y_lengths)
    # the kernels skip empty ones; NaN equals nothing
    lengths = [n * (kind == kind) for n, kind in zip(all_lengths, kinds, strict=True)]
    native = torch.ops.rlkernels
    y_bounds = native.dtw_bounds(y, x, *lengths[::-1], -1).T
    bounds = torch.maximum(native.dtw_bounds(x, y, *lengths, band), y_bounds)
    _, cost = _with_special_cases(bounds, *kinds)
    likely = cost.topk(2 * k, largest=False).indices
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    native.dtw_warps_(cost, rows * y.shape[0] + likely, x, y, *lengths, band)
    ceiling = cost.gather(1, likely).topk(k, largest=False).values[:, -1:]
    undecided = (cost <= ceiling).scatter(1, likely, False)
    pairs = undecided.flatten().nonzero_static(size=undecided.numel())
    native.dtw_warps_(cost, pairs, x, y, *lengths, band)
    return cost
