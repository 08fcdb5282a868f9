"""Similarity ops in plain torch: the single source of truth for tests and benchmarks.

float64 inputs are computed in float64, everything else in float32. Arguments are checked by the public functions.
"""

import math
from collections.abc import Callable, Iterator

import torch

BLOCK_PAIRS = 1 << 22  # pairs whose results are computed at a time
BLOCK_FLOATS = 1 << 22  # values of one anti-diagonal, or of the projected samples of one side, that are held at a time


def blocks(n: int, m: int, pairs: int, longest: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Yield slices (rows, columns) that cover all n x m pairs: at most ``pairs`` of them and ``longest`` of each side.

    One block at least, empty where there are no pairs. Rows come in order, columns in order within them.
    """
    pairs = max(pairs, 1)
    longest = pairs if longest is None else max(longest, 1)
    height = min(max(n, 1), math.isqrt(pairs), longest)
    width = min(pairs // height, longest)
    for i in range(0, max(n, 1), height):
        for j in range(0, max(m, 1), width):
            yield slice(i, min(i + height, n)), slice(j, min(j + width, m))


def as_series(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reshape [N, L] or [N, L, D] -> [N, L, D]."""
    return (value.unsqueeze(-1) if value.ndim == 2 else value).to(dtype)


def compute_dtype(x: torch.Tensor, y: torch.Tensor) -> torch.dtype:
    """Return float64 if either input is, else float32."""
    return torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32


def full_lengths(x: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Return int64 [N]: ``lengths``, or the whole second dimension of x [N, L, ...] where None."""
    return torch.full((x.shape[0],), x.shape[1], device=x.device) if lengths is None else lengths.long()


def not_finite(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return bool [N]: a value of x [N, L, D] inside the length is NaN or infinite."""
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]  # [N, L]
    return (inside & ~x.isfinite().all(-1)).any(1)


def blank_padding(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Set x [N, L, D] to 0 beyond its lengths and in :func:`not_finite` trajectories; return also which those are."""
    bad = not_finite(x, lengths)
    beyond = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return x.masked_fill((beyond | bad[:, None]).unsqueeze(-1), 0), bad


def band_radius(x_lengths: torch.Tensor, y_lengths: torch.Tensor, band: int | None) -> torch.Tensor:
    """Return the Sakoe-Chiba radius of each pair: ``band``, or the difference of the lengths if that is larger."""
    least = (x_lengths - y_lengths).abs()
    return torch.full_like(least, torch.iinfo(torch.int64).max) if band is None else least.clamp_min(band)


def spans(x: torch.Tensor, y: torch.Tensor):
    """Yields (d, lo, hi) for every anti-diagonal: its cells are (i, d - i) with lo <= i < hi."""
    rows, columns = x.shape[1], y.shape[1]
    for d in range(rows + columns - 1 if rows and columns else 0):
        yield d, max(0, d - columns + 1), min(d + 1, rows)


def diagonals(x: torch.Tensor, y: torch.Tensor):
    """Yields (d, lo, hi, squared distances [B, hi - lo]) for every anti-diagonal of pairs x [B, L, D], y [B, K, D]."""
    for d, lo, hi in spans(x, y):
        yield d, lo, hi, (x[:, lo:hi] - y[:, d - hi + 1 : d - lo + 1].flip(1)).square().sum(-1)


def with_special_cases(cost, x_lengths, y_lengths, bad):
    """Set the cost of two empty trajectories to 0, of one empty one to inf, with NaN or infinity inside to NaN."""
    cost = cost.masked_fill((x_lengths == 0) != (y_lengths == 0), torch.inf)
    return cost.masked_fill((x_lengths == 0) & (y_lengths == 0), 0.0).masked_fill(bad, torch.nan)


def _dtw_pairs(x, y, x_lengths, y_lengths, band):
    """Compute costs [B] of the pairs x [B, L, D], y [B, K, D] along anti-diagonals."""
    batch, rows = x.shape[:2]
    radius = band_radius(x_lengths, y_lengths, band)
    # cell (i, j) of an anti-diagonal lies at i + 1; place 0 is the border
    older, old = x.new_full((batch, rows + 1), torch.inf), x.new_full((batch, rows + 1), torch.inf)
    older[:, 0] = 0
    result = x.new_zeros(batch)
    for d, lo, hi, cost in diagonals(x, y):
        best = torch.minimum(torch.minimum(old[:, lo:hi], old[:, lo + 1 : hi + 1]), older[:, lo:hi])
        offset = (2 * torch.arange(lo, hi, device=x.device) - d).abs()  # |i - j|
        new = torch.full_like(old, torch.inf)
        new[:, lo + 1 : hi + 1] = (cost + best).masked_fill(offset > radius[:, None], torch.inf)
        result = torch.where(x_lengths + y_lengths - 2 == d, new.gather(1, x_lengths[:, None])[:, 0], result)
        older, old = old, new
    return result


def _subsequence_pairs(x, y, x_lengths, y_lengths):
    """Return (cost, start, end) [B] of the best stretch of y [B, K, D] for the whole of x [B, L, D]."""
    batch, rows = x.shape[:2]
    older, old = x.new_full((batch, rows + 1), torch.inf), x.new_full((batch, rows + 1), torch.inf)
    older_start, old_start = (torch.full((batch, rows + 1), -1, device=x.device) for _ in range(2))
    result = x.new_full((batch,), torch.inf)
    start, end = torch.full_like(x_lengths, -1), torch.full_like(x_lengths, -1)
    for d, lo, hi, cost in diagonals(x, y):
        older[:, 0], older_start[:, 0] = 0, d  # a path may start in any cell (0, j = d)
        values = torch.stack([old[:, lo:hi], old[:, lo + 1 : hi + 1], older[:, lo:hi]])
        starts = torch.stack([old_start[:, lo:hi], old_start[:, lo + 1 : hi + 1], older_start[:, lo:hi]])
        best = values.amin(0)
        new, new_start = torch.full_like(old, torch.inf), torch.full_like(old_start, -1)
        new[:, lo + 1 : hi + 1] = cost + best
        new_start[:, lo + 1 : hi + 1] = starts.masked_fill(values > best, -1).amax(0)
        column = d - x_lengths + 1  # of the last row
        last, last_start = (t.gather(1, x_lengths[:, None])[:, 0] for t in (new, new_start))
        better = (column >= 0) & (column < y_lengths) & (x_lengths > 0) & ((last < result) | (end < 0))
        result = torch.where(better, last, result)
        start, end = torch.where(better, last_start, start), torch.where(better, column, end)
        older, old, older_start, old_start = old, new, old_start, new_start
    return result, start, end


def dtw(x, y, x_lengths=None, y_lengths=None, band=None, mode="full"):
    """See :func:`rlkernels.dtw`; the cost keeps float64 where the input has it."""
    dtype = compute_dtype(x, y)
    x, y = as_series(x, dtype), as_series(y, dtype)
    x_lengths, y_lengths = full_lengths(x, x_lengths), full_lengths(y, y_lengths)
    (x, x_bad), (y, y_bad) = blank_padding(x, x_lengths), blank_padding(y, y_lengths)
    n, m = x.shape[0], y.shape[0]
    out = [x.new_empty(n, m)]
    if mode == "subsequence":
        out += [x_lengths.new_empty(n, m) for _ in range(2)]
    for rows, columns in blocks(n, m, BLOCK_FLOATS // ((x.shape[1] + y.shape[1]) * x.shape[2] + 1)):
        places = (torch.arange(part.start, part.stop, device=x.device) for part in (rows, columns))
        a, b = torch.cartesian_prod(*places).reshape(-1, 2).unbind(1)
        lengths, bad = (x_lengths[a], y_lengths[b]), x_bad[a] | y_bad[b]
        if mode == "full":
            cost, *place = [_dtw_pairs(x[a], y[b], *lengths, band)]
        else:
            cost, *place = _subsequence_pairs(x[a], y[b], *lengths)
        results = with_special_cases(cost, *lengths, bad), *(t.masked_fill(bad, -1) for t in place)
        for whole, result in zip(out, results):
            whole[rows, columns] = result.view(whole[rows, columns].shape)
    return out[0] if mode == "full" else tuple(out)


def smallest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k smallest of float [N, M], ascending, ties by lower index, NaN last: (values, index) [N, k]."""
    ordered, index = values.sort(dim=1, stable=True)
    return ordered[:, :k], index[:, :k]


def smallest_by_blocks(
    n: int, m: int, k: int, values: Callable[[slice, slice], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`smallest` of the [n, m] that ``values`` computes for (rows, columns), one block at a time."""
    lowest: list[torch.Tensor] = []
    indices: list[torch.Tensor] = []
    for rows, columns in blocks(n, m, BLOCK_PAIRS):
        value, index = smallest(values(rows, columns), k)
        index = index + columns.start
        if columns.start:  # equal values of the columns before come first, and the sort is stable
            value, index = (torch.cat(pair, 1) for pair in ((lowest.pop(), value), (indices.pop(), index)))
            value, order = smallest(value, k)
            index = index.gather(1, order)
        lowest.append(value.clone())  # not a view of the whole block
        indices.append(index.clone())
    return torch.cat(lowest), torch.cat(indices)


def dtw_topk(x, y, k, x_lengths=None, y_lengths=None, band=None):
    """See :func:`rlkernels.dtw_topk`: all costs, sorted."""
    x_lengths, y_lengths = full_lengths(x, x_lengths), full_lengths(y, y_lengths)
    return smallest_by_blocks(
        x.shape[0],
        y.shape[0],
        k,
        lambda rows, columns: dtw(x[rows], y[columns], x_lengths[rows], y_lengths[columns], band),
    )


def soft_dtw(x, y, *, gamma=1.0, x_lengths=None, y_lengths=None, band=None):
    """See :func:`rlkernels.soft_dtw`; the gradient comes from autograd through every cell."""
    dtype = compute_dtype(x, y)
    x, y = as_series(x, dtype), as_series(y, dtype)
    x_lengths, y_lengths = full_lengths(x, x_lengths), full_lengths(y, y_lengths)
    (x, x_bad), (y, y_bad) = blank_padding(x, x_lengths), blank_padding(y, y_lengths)
    radius = band_radius(x_lengths, y_lengths, band)
    batch, rows = x.shape[:2]
    far = torch.finfo(dtype).max / 4  # stands for infinity, whose gradient would be NaN
    older, old = x.new_full((batch, rows + 1), far), x.new_full((batch, rows + 1), far)
    older[:, 0] = 0
    result = x.new_zeros(batch)
    for d, lo, hi, cost in diagonals(x, y):
        around = torch.stack([old[:, lo:hi], old[:, lo + 1 : hi + 1], older[:, lo:hi]])
        least = around.detach().amin(0)  # whatever it is, value and gradient are the same but for rounding
        new = cost + least - gamma * torch.logsumexp((least - around) / gamma, dim=0)
        offset = (2 * torch.arange(lo, hi, device=x.device) - d).abs()
        new = torch.where((offset > radius[:, None]) | (new > far / 2), far, new)
        new = torch.nn.functional.pad(new, (lo + 1, rows - hi), value=far)
        result = torch.where(x_lengths + y_lengths - 2 == d, new.gather(1, x_lengths[:, None])[:, 0], result)
        older, old = old, new
    return with_special_cases(result, x_lengths, y_lengths, x_bad | y_bad)


def _distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean distances [N, M] of float64 rows, from their differences: |x|^2 + |y|^2 - 2 xy cancels."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _over_largest(x: torch.Tensor) -> torch.Tensor:
    """Divide each row of x [N, E] by its largest magnitude, so that no square overflows or vanishes; 0 stays 0."""
    largest = torch.nn.functional.pad(x.abs(), (0, 1)).amax(1, keepdim=True)  # rows may be empty
    return x / largest.masked_fill(largest == 0, 1)


def project_and_sort(samples: torch.Tensor, projections: int, seed: int) -> torch.Tensor:
    """Project samples [N, S, E] on random unit vectors, sort along S: float64 [N, S * projections], scaled so that
    Euclidean distances are sliced 2-Wasserstein distances (Bonneel et al., 2015). Infinity counts as NaN."""
    generator, size = torch.Generator("cpu").manual_seed(seed), (samples.shape[2], projections)
    directions = torch.randn(size, dtype=torch.float64, generator=generator, device="cpu")  # the same on every device
    directions = (directions / directions.norm(dim=0)).to(samples.device)
    samples = samples.double()
    projected = (samples.masked_fill(samples.isinf(), torch.nan) @ directions).sort(dim=1).values
    return projected.flatten(1) / (projected.shape[1] * projections) ** 0.5


def state_similarity(x, y, *, metric="sliced_wasserstein", scale=1.0, projections=64, seed=0):
    """See :func:`rlkernels.state_similarity`; float64 throughout."""
    out = x.new_empty(x.shape[0], y.shape[0], dtype=torch.float32)
    width = x.shape[1] * projections if metric == "sliced_wasserstein" else x.shape[1]  # of a row of features
    for rows, columns in blocks(x.shape[0], y.shape[0], BLOCK_PAIRS, longest=BLOCK_FLOATS // max(width, 1)):
        if metric == "sliced_wasserstein":
            samples = [project_and_sort(t, projections, seed) for t in (x[rows], y[columns])]
            out[rows, columns] = torch.exp(_distances(*samples) / -scale).float()
        else:
            out[rows, columns] = _vector_similarity(x[rows], y[columns], metric).float()
    return out


def _vector_similarity(x: torch.Tensor, y: torch.Tensor, metric: str) -> torch.Tensor:
    """Return the "hellinger" or "cosine" similarity, float64 [N, M], of x [N, E] and y [M, E]."""
    x, y = (_over_largest(t.double()) for t in (x, y))
    if metric == "hellinger":
        # H = |sqrt(p) - sqrt(q)| / sqrt(2); an all-zero histogram stays at the origin
        sums = [t.sum(1, keepdim=True) for t in (x, y)]
        distance = _distances(*((t / s.masked_fill(s == 0, 1)).sqrt() for t, s in zip((x, y), sums))) / 2**0.5
    else:
        # (1 + cos) / 2 = 1 - |u - v|^2 / 4 for unit vectors; the form without a sum of 1 and cos keeps 1 for itself
        norms = [t.norm(dim=1, keepdim=True) for t in (x, y)]
        distance = (_distances(*(t / s.masked_fill(s == 0, 1) for t, s in zip((x, y), norms))) / 2).square()
    similarity = (1 - distance).clamp(0, 1)
    x_zero, y_zero = ((t == 0).all(1) for t in (x, y))
    similarity = similarity.masked_fill(x_zero[:, None] != y_zero, 0.0 if metric == "hellinger" else 0.5)
    return similarity.masked_fill(x_zero[:, None] & y_zero, 1.0)


def rhyme_similarity(cost, x_lengths, y_lengths, *, reward_weight, reward_scale, state):
    """Return C_rhyme [N, M], float64, from the DTW cost and the similarity of states (None for weight 1), [N, M]."""
    mean_length = ((x_lengths[:, None] + y_lengths).double() / 2).clamp_min(1)  # both empty: cost 0 over length 1
    # the root first: the square of a small scale would vanish
    similarity = reward_weight * torch.exp(-((cost.double() / mean_length).sqrt() / reward_scale).square())
    return similarity if state is None else similarity + (1 - reward_weight) * state.double()
