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
    series = value.unsqueeze(-1) if value.ndim == 2 else value
    return series if series.dtype == dtype else series.to(dtype)


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


def prepare_series(
    value: torch.Tensor, lengths: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return series [N, L, D], their :func:`full_lengths`, and which are :func:`not_finite`, [N].

    The series are 0 beyond their lengths and where they are not finite.
    """
    lengths = full_lengths(value, lengths)
    series = as_series(value, dtype)
    bad = not_finite(series, lengths)
    beyond = torch.arange(series.shape[1], device=series.device) >= lengths[:, None]
    return series.masked_fill((beyond | bad[:, None]).unsqueeze(-1), 0), lengths, bad


def band_radius(x_lengths: torch.Tensor, y_lengths: torch.Tensor, band: int | None) -> torch.Tensor:
    """Return the Sakoe-Chiba radius of each pair: ``band``, or the difference of the lengths if that is larger."""
    difference = (x_lengths - y_lengths).abs()
    if band is None:
        return torch.full_like(difference, torch.iinfo(torch.int64).max)
    return difference.clamp_min(band)


def spans(x: torch.Tensor, y: torch.Tensor):
    """Yield (d, lo, hi) for every anti-diagonal: its cells are (i, d - i) with lo <= i < hi."""
    rows = x.shape[1]
    columns = y.shape[1]
    for d in range(rows + columns - 1 if rows and columns else 0):
        yield d, max(0, d - columns + 1), min(d + 1, rows)


def diagonals(x: torch.Tensor, y: torch.Tensor):
    """Yield (d, lo, hi, squared distances [B, hi - lo]) for every anti-diagonal of pairs x [B, L, D], y [B, K, D]."""
    for d, lo, hi in spans(x, y):
        y_steps = y[:, d - hi + 1 : d - lo + 1].flip(1)
        yield d, lo, hi, (x[:, lo:hi] - y_steps).square().sum(-1)


def predecessors(corners: torch.Tensor, sides: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Return [3, B, hi - lo]: the cells above, left and at the corner of those of anti-diagonal d.

    Args:
        corners: anti-diagonal d - 2, [B, rows + 1]; cell (i, j) lies at i + 1, and place 0 is the border.
        sides: anti-diagonal d - 1.
    """
    return torch.stack([sides[:, lo:hi], sides[:, lo + 1 : hi + 1], corners[:, lo:hi]])


def with_special_cases(cost, x_lengths, y_lengths, bad):
    """Set the cost of two empty trajectories to 0, of one empty one to inf, with NaN or infinity inside to NaN."""
    x_empty = x_lengths == 0
    y_empty = y_lengths == 0
    cost = cost.masked_fill(x_empty != y_empty, torch.inf)
    cost = cost.masked_fill(x_empty & y_empty, 0.0)
    return cost.masked_fill(bad, torch.nan)


def _dtw_pairs(x, y, x_lengths, y_lengths, band):
    """Compute costs [B] of the pairs x [B, L, D], y [B, K, D] along anti-diagonals."""
    batch, rows = x.shape[:2]
    radius = band_radius(x_lengths, y_lengths, band)
    # cumulative costs of the last two anti-diagonals, laid out as :func:`predecessors` takes them
    sides = x.new_full((batch, rows + 1), torch.inf)
    corners = sides.clone()
    corners[:, 0] = 0
    result = x.new_zeros(batch)
    for d, lo, hi, cost in diagonals(x, y):
        best_side = torch.minimum(sides[:, lo:hi], sides[:, lo + 1 : hi + 1])
        total = cost + torch.minimum(best_side, corners[:, lo:hi])
        offset = (2 * torch.arange(lo, hi, device=x.device) - d).abs()  # |i - j|
        totals = torch.full_like(sides, torch.inf)
        totals[:, lo + 1 : hi + 1] = total.masked_fill(offset > radius[:, None], torch.inf)
        is_end = x_lengths + y_lengths - 2 == d
        result = torch.where(is_end, totals.gather(1, x_lengths[:, None])[:, 0], result)
        corners, sides = sides, totals
    return result


def _subsequence_pairs(x, y, x_lengths, y_lengths):
    """Return (cost, start, end) [B] of the best stretch of y [B, K, D] for the whole of x [B, L, D]."""
    batch, rows = x.shape[:2]
    # cumulative costs of the last two anti-diagonals, and where their paths start in y
    sides = x.new_full((batch, rows + 1), torch.inf)
    corners = sides.clone()
    side_starts = torch.full((batch, rows + 1), -1, device=x.device)
    corner_starts = side_starts.clone()
    result = x.new_full((batch,), torch.inf)
    start = torch.full_like(x_lengths, -1)
    end = torch.full_like(x_lengths, -1)
    for d, lo, hi, cost in diagonals(x, y):
        corners[:, 0] = 0  # a path may start in any cell (0, j = d)
        corner_starts[:, 0] = d
        candidates = predecessors(corners, sides, lo, hi)
        candidate_starts = predecessors(corner_starts, side_starts, lo, hi)
        best = candidates.amin(0)
        totals = torch.full_like(sides, torch.inf)
        totals[:, lo + 1 : hi + 1] = cost + best
        starts = torch.full_like(side_starts, -1)
        starts[:, lo + 1 : hi + 1] = candidate_starts.masked_fill(candidates > best, -1).amax(0)
        column = d - x_lengths + 1  # of the last row
        last, last_start = (t.gather(1, x_lengths[:, None])[:, 0] for t in (totals, starts))
        exists = (column >= 0) & (column < y_lengths) & (x_lengths > 0)
        is_better = exists & ((last < result) | (end < 0))
        result = torch.where(is_better, last, result)
        start = torch.where(is_better, last_start, start)
        end = torch.where(is_better, column, end)
        corners, sides = sides, totals
        corner_starts, side_starts = side_starts, starts
    return result, start, end


def dtw(x, y, x_lengths=None, y_lengths=None, band=None, mode="full"):
    """See :func:`rlkernels.dtw`; the cost keeps float64 where the input has it."""
    dtype = compute_dtype(x, y)
    x, x_lengths, x_bad = prepare_series(x, x_lengths, dtype)
    y, y_lengths, y_bad = prepare_series(y, y_lengths, dtype)
    shape = x.shape[0], y.shape[0]
    outputs = [x.new_empty(shape)]
    if mode == "subsequence":
        outputs += [x_lengths.new_empty(shape) for _ in range(2)]
    floats_of_pair = (x.shape[1] + y.shape[1]) * x.shape[2] + 1
    for rows, columns in blocks(*shape, BLOCK_FLOATS // floats_of_pair):
        indices = (torch.arange(block.start, block.stop, device=x.device) for block in (rows, columns))
        x_index, y_index = torch.cartesian_prod(*indices).reshape(-1, 2).unbind(1)
        series = x[x_index], y[y_index]
        lengths = x_lengths[x_index], y_lengths[y_index]
        bad = x_bad[x_index] | y_bad[y_index]
        if mode == "full":
            cost, *stretch = [_dtw_pairs(*series, *lengths, band)]
        else:
            cost, *stretch = _subsequence_pairs(*series, *lengths)
        results = with_special_cases(cost, *lengths, bad), *(t.masked_fill(bad, -1) for t in stretch)
        for output, result in zip(outputs, results):
            output[rows, columns] = result.view(output[rows, columns].shape)
    return outputs[0] if mode == "full" else tuple(outputs)


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
    x_lengths = full_lengths(x, x_lengths)
    y_lengths = full_lengths(y, y_lengths)
    return smallest_by_blocks(
        x.shape[0],
        y.shape[0],
        k,
        lambda rows, columns: dtw(x[rows], y[columns], x_lengths[rows], y_lengths[columns], band),
    )


def soft_dtw(x, y, *, gamma=1.0, x_lengths=None, y_lengths=None, band=None):
    """See :func:`rlkernels.soft_dtw`; the gradient comes from autograd through every cell."""
    dtype = compute_dtype(x, y)
    x, x_lengths, x_bad = prepare_series(x, x_lengths, dtype)
    y, y_lengths, y_bad = prepare_series(y, y_lengths, dtype)
    radius = band_radius(x_lengths, y_lengths, band)
    batch, rows = x.shape[:2]
    far = torch.finfo(dtype).max / 4  # stands for infinity, whose gradient would be NaN
    sides = x.new_full((batch, rows + 1), far)
    corners = sides.clone()
    corners[:, 0] = 0
    result = x.new_zeros(batch)
    for d, lo, hi, cost in diagonals(x, y):
        candidates = predecessors(corners, sides, lo, hi)
        shift = candidates.detach().amin(0)  # any shift gives the same value and gradient but for rounding
        total = cost + shift - gamma * torch.logsumexp((shift - candidates) / gamma, dim=0)
        offset = (2 * torch.arange(lo, hi, device=x.device) - d).abs()
        total = torch.where((offset > radius[:, None]) | (total > far / 2), far, total)
        totals = torch.nn.functional.pad(total, (lo + 1, rows - hi), value=far)
        is_end = x_lengths + y_lengths - 2 == d
        result = torch.where(is_end, totals.gather(1, x_lengths[:, None])[:, 0], result)
        corners, sides = sides, totals
    return with_special_cases(result, x_lengths, y_lengths, x_bad | y_bad)


def _distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean distances [N, M] of float64 rows, from their differences: |x|^2 + |y|^2 - 2 xy cancels."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _divide_rows(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Divide each row of x [N, E] by its divisor [N, 1]; by 1 where that is 0."""
    return x / divisor.masked_fill(divisor == 0, 1)


def _scale_rows(x: torch.Tensor) -> torch.Tensor:
    """Divide each row of x [N, E] by its largest magnitude, so that no square overflows or vanishes; 0 stays 0."""
    largest = torch.nn.functional.pad(x.abs(), (0, 1)).amax(1, keepdim=True)  # rows may be empty
    return _divide_rows(x, largest)


def project_and_sort(samples: torch.Tensor, projections: int, seed: int) -> torch.Tensor:
    """Project samples [N, S, E] on random unit vectors, sort along S: float64 [N, S * projections], scaled so that
    Euclidean distances are sliced 2-Wasserstein distances (Bonneel et al., 2015). Infinity counts as NaN."""
    generator = torch.Generator("cpu").manual_seed(seed)  # the same directions on every device
    size = samples.shape[2], projections
    directions = torch.randn(size, dtype=torch.float64, generator=generator, device="cpu")
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
    x, y = (_scale_rows(t.double()) for t in (x, y))
    if metric == "hellinger":
        # H = |sqrt(p) - sqrt(q)| / sqrt(2); an all-zero histogram stays at the origin
        roots = (_divide_rows(t, t.sum(1, keepdim=True)).sqrt() for t in (x, y))
        distance = _distances(*roots) / 2**0.5
    else:
        # (1 + cos) / 2 = 1 - |u - v|^2 / 4 for unit vectors; the form without a sum of 1 and cos keeps 1 for itself
        units = (_divide_rows(t, t.norm(dim=1, keepdim=True)) for t in (x, y))
        distance = (_distances(*units) / 2).square()
    similarity = (1 - distance).clamp(0, 1)
    x_zero, y_zero = ((t == 0).all(1) for t in (x, y))
    of_one_zero = 0.0 if metric == "hellinger" else 0.5
    similarity = similarity.masked_fill(x_zero[:, None] != y_zero, of_one_zero)
    return similarity.masked_fill(x_zero[:, None] & y_zero, 1.0)


def rhyme_similarity(cost, x_lengths, y_lengths, *, reward_weight, reward_scale, state):
    """Return C_rhyme [N, M], float64, from the DTW cost and the similarity of states (None for weight 1), [N, M]."""
    mean_length = ((x_lengths[:, None] + y_lengths).double() / 2).clamp_min(1)  # both empty: cost 0 over length 1
    difference = (cost.double() / mean_length).sqrt()
    # divided before the square: that of a small scale would vanish
    similarity = reward_weight * torch.exp(-(difference / reward_scale).square())
    return similarity if state is None else similarity + (1 - reward_weight) * state.double()
