"""Dynamic time warping by the Triton and CUDA kernels, which leave empty trajectories, NaN and infinity to torch."""

import torch

from rlkernels.similarity import reference


def dtw(x, y, *, x_lengths, y_lengths, band, mode, backend):
    """Compute :func:`reference.dtw` for contiguous float32 [N, L, D] and [M, K, D]."""
    x_lengths, y_lengths = reference.full_lengths(x, x_lengths), reference.full_lengths(y, y_lengths)
    subsequence = mode == "subsequence"
    if backend == "cuda":
        band_or_none = -1 if band is None else band
        pairs = torch.ops.rlkernels.dtw_warps(x, y, x_lengths, y_lengths, band_or_none, subsequence)
    else:
        from rlkernels.similarity import triton_kernels

        pairs = triton_kernels.dtw_pairs(x, y, x_lengths, y_lengths, band, subsequence)
    bad = reference.not_finite(x, x_lengths)[:, None] | reference.not_finite(y, y_lengths)
    cost = reference.with_special_cases(pairs[0], x_lengths[:, None], y_lengths, bad)
    if not subsequence:
        return cost
    nowhere = bad | (x_lengths == 0)[:, None] | (y_lengths == 0)
    return cost, pairs[1].masked_fill(nowhere, -1), pairs[2].masked_fill(nowhere, -1)
