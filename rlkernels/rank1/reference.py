"""Rank-1 ops in plain torch: the single source of truth for tests and benchmarks.

The solver is a block Krylov method on D^T D for D = weight - base [m, n], four columns wide. Each step reads both
matrices once and computes Y = D Q and Z = D^T Y. They give the Ritz pairs of the whole basis, their exact residuals and
the next block. Only the reads are large.

``csrc/include/rank1_solve.h`` in C++, ``grouped.py`` and ``triton_vectors.py`` in Triton are the same algorithm: change
all three.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from rlkernels._precision import without_autocast
from rlkernels.rank1.update import GAP_FLOOR, LowRankDelta, Rank1Update, factors, status_of
from rlkernels.sampling.reference import keyed_uniform, philox_word

KRYLOV_COLUMNS = 4  # columns of the Krylov block
DELTA_ROWS = 1024  # rows of the delta in memory at a time
DROP = 1e-5  # smallest length, relative to its column's, at which a new direction is more than rounding
RISK = 1e-4  # chance that the random start hides a direction from the certificate
EPS = 2.0**-23  # float32 rounding

Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # [n, k] -> [m, k], [n, k]


def delta_read(weight: torch.Tensor, base: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Y = D q [m, k] and Z = D^T Y [n, k] in float32, with ``DELTA_ROWS`` rows of D at a time."""
    blocks: list[torch.Tensor] = []
    z = torch.zeros_like(q)
    for w, b in zip(weight.split(DELTA_ROWS), base.split(DELTA_ROWS)):
        delta = w.float() - b.float()
        with without_autocast(q.device):
            y = delta @ q
            z += delta.T @ y
        blocks.append(y)
    return torch.cat(blocks), z


def delta_stats(weight: torch.Tensor, base: torch.Tensor) -> tuple[float, float, float]:
    """Return the delta's Frobenius norm, share of nonzero entries and largest magnitude (not finite if an entry is)."""
    square = 0.0
    changed = 0
    largest = 0.0
    for w, b in zip(weight.split(DELTA_ROWS), base.split(DELTA_ROWS)):
        delta = w.double() - b.double()
        square += delta.square().sum().item()
        changed += int(torch.count_nonzero(delta))
        block_largest = delta.abs().max().item()  # NaN if any entry is NaN
        largest = block_largest if math.isnan(block_largest) else max(largest, block_largest)
    return math.sqrt(square), changed / weight.numel(), largest


@lru_cache(maxsize=64)
def random_block(n: int, columns: int, seed: int, device: torch.device) -> torch.Tensor:
    """Draw float64 [n, columns] in (-1/2, 1/2), keyed by (seed, column, row), equal on every device; do not write."""
    rows = torch.arange(n, device=device).repeat(columns)
    ids = torch.arange(columns, device=device).repeat_interleave(n)
    return (keyed_uniform(seed, ids, rows) - 0.5).view(columns, n).T.double()


def orthonormal(block: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return at most k orthonormal columns (float64) that extend ``basis`` [n, K] to the span of ``block`` [n, k]."""
    out: list[torch.Tensor] = []
    for column in block.T:
        full_length = column.norm()
        for _ in range(2):
            column = column - basis @ (basis.T @ column)
            for direction in out:
                column = column - direction * (direction @ column)
        length = column.norm()
        if length > DROP * full_length:
            out.append(column / length)
    return torch.stack(out, 1) if out else block[:, :0]


def hidden_floor(random_columns: int, n: int) -> float:
    """Return the length that a fixed unit vector's coordinates in the start exceed with probability 1 - ``RISK``.

    They are close to normal with variance 1 / n each, so n times the squared length is chi-squared; for small x
    its distribution is x^(k/2) / (2^(k/2) Gamma(k/2 + 1)).
    """
    k = random_columns
    return math.sqrt((RISK * 2 ** (k / 2) * math.gamma(k / 2 + 1)) ** (2 / k) / n)


def second_eigenvalue(theta: torch.Tensor, first: torch.Tensor, last: torch.Tensor, floor: float) -> float | None:
    """Return an upper bound for the second eigenvalue of D^T D, given its Ritz values ``theta`` [K] (descending).

    Let an eigenvector with eigenvalue x have coordinates a in the Krylov basis. Its equation, projected, reads
    (x - G) a = F^T e with F the residual block and |e| <= 1, so its coordinates along the random start are at most
    |first (x - theta)^-1 last^T| long (``first`` [r, K]: rows of the Ritz coordinates of the random start; ``last``
    [k, K]: rows of the last block, times the square root of the Gram matrix of F). If that is below ``floor``, x is
    no eigenvalue. None: the leading pair is not separated from the others yet.
    """

    def max_length(x: float, skip: int) -> float:
        response = (first[:, skip:] / (x - theta[skip:])) @ last[:, skip:].T
        return torch.linalg.matrix_norm(response, 2).item()

    top = theta[0].item()
    second = theta[1].item() if len(theta) > 1 else 0.0
    if top <= second or (len(theta) > 1 and max_length(top, 1) >= floor / 2):  # an eigenvalue may hide above the first
        return None
    bound = None
    for step in range(49, 0, -1):  # from the first eigenvalue down, through the excluded interval
        x = second + (top - second) * step / 50
        if max_length(x, 0) < floor:
            bound = x
        elif bound is not None:
            break
    return bound


class RitzTriplets(NamedTuple):
    """At most ``rank`` leading directions of the basis, and the quality of the first."""

    u: torch.Tensor  # [r, m] float32; zeros where sigma is 0
    sigma: list[float]  # [r], descending
    v: torch.Tensor  # [r, n] float32
    gap: float
    residual: float
    bound: float
    passes: int


def iterate(read: Read, m: int, n: int, start: torch.Tensor | None, *, tol: float, max_passes: int, min_passes: int,
          rank: int, seed: int, device: torch.device) -> RitzTriplets:  # fmt: skip
    """Run block Krylov iteration on a nonzero delta, with ``min_passes`` reads at least."""
    width = min(KRYLOV_COLUMNS, n)
    randoms = width - (start is not None and n > 1)
    columns = random_block(n, randoms, seed, device)
    if start is not None and n > 1:
        columns = torch.cat([start.double()[:, None], columns], 1)
    block = orthonormal(columns, columns[:, :0])
    floor = hidden_floor(randoms, n)
    first = slice(block.shape[1] - randoms, block.shape[1])
    q = z = torch.empty(n, 0, dtype=torch.float64, device=device)
    y = torch.empty(m, 0, dtype=torch.float64, device=device)
    for passes in range(1, max_passes + 1):
        block = block.float()  # the kernels read float32, so the basis must hold the rounded block
        block_y, block_z = read(block)
        q = torch.cat([q, block], 1)  # float64, as y and z
        y = torch.cat([y, block_y], 1)
        z = torch.cat([z, block_z], 1)
        ascending, vectors = torch.linalg.eigh((y.T @ y).cpu())
        theta = ascending.flip(0).clamp_min(0)
        ritz = vectors.flip(1)
        coordinates = ritz[:, 0].to(device)
        sigma = math.sqrt(theta[0].item())
        if sigma == 0:  # the start lies in the null space, as for one nonzero entry: try the next block
            residual = math.inf
            gap = 0.0
            bound = math.pi / 2
        else:
            residual = (z @ coordinates / theta[0].item() - q @ coordinates).norm().item()
            gap = 1 - math.sqrt(theta[1].item()) / sigma if len(theta) > 1 else 1.0
        outside = block_z.double() - q @ (q.T @ block_z.double())  # the residual block F
        outside = outside - q @ (q.T @ outside)
        k = block.shape[1]
        if sigma > 0:
            values, vectors = torch.linalg.eigh((outside.T @ outside).cpu())
            root = values.clamp_min(0).sqrt()[:, None] * vectors.T  # root^T root = F^T F
            last = root @ ritz[-k:]
            bound = angle_bound(theta, residual, ritz[first], last, floor)
            converged = gap < GAP_FLOOR and residual <= tol * GAP_FLOOR
            if passes == max_passes or (passes >= min_passes and (converged or bound <= tol)):
                break
        block = orthonormal(block_z.double(), q)
        if block.shape[1] == 0:  # the basis is invariant
            break
    sigmas = theta[:rank].sqrt()
    leading = ritz[:, :rank].to(device)
    u = y @ leading / sigmas.where(sigmas > 0, 1.0).to(device)
    v = q @ leading
    return RitzTriplets(u.T.float(), sigmas.tolist(), v.T.float(), gap, residual, bound, passes)


def angle_bound(theta: torch.Tensor, residual: float, first: torch.Tensor, last: torch.Tensor, floor: float) -> float:
    """Bound the angle of the leading Ritz vector in radians, by the sin-theta theorem of Davis and Kahan."""
    second = second_eigenvalue(theta, first, last, floor)
    if second is None:
        return math.pi / 2
    distance = 1 - second / theta[0].item()
    return min(math.pi / 2, math.asin(min(1.0, (residual + 4 * EPS) / distance)) + EPS)


def not_finite(weight: torch.Tensor, base: torch.Tensor) -> ValueError:
    """Return an error that names the matrix, or the difference, with NaN or infinity, and the place."""
    for name, matrix in (("weight", weight), ("base", base)):
        if not matrix.isfinite().all():
            i, j = (~matrix.isfinite()).nonzero()[0].tolist()
            return ValueError(f"{name} must be finite, got {float(matrix[i, j])} at [{i}, {j}]")
    i, j = ((weight.double() - base.double()).abs() > torch.finfo(torch.float32).max).nonzero()[0].tolist()
    return ValueError(
        f"weight - base must fit float32, got {float(weight[i, j]):g} - {float(base[i, j]):g} at [{i}, {j}]"
    )


def solve_delta(weight: torch.Tensor, base: torch.Tensor, *, start: torch.Tensor | None = None, tol: float = 1e-2,
                  max_passes: int = 12, min_passes: int = 1, rank: int = 1, seed: int = 0) -> LowRankDelta:  # fmt: skip
    """See :func:`rlkernels.rank1.ops.solve_deltas`."""
    m, n = weight.shape
    frobenius, changed, largest = delta_stats(weight, base)
    if not largest <= torch.finfo(torch.float32).max:
        raise not_finite(weight, base)
    if largest == 0:
        u = torch.zeros(m, dtype=torch.float32, device=weight.device)
        v = torch.zeros(n, dtype=torch.float32, device=weight.device)
        update = Rank1Update(u, 0.0, v, 0.0, 0.0, 0.0, math.pi / 2, 1, 0.0, "zero")
        return LowRankDelta(update, u[:, None], v[:, None])
    if start is not None and not start.any():
        start = None
    scale = 2.0 ** min(max(-math.frexp(largest)[1], -126), 126)  # squares of tiny or huge deltas stay within float32

    def scaled(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = delta_read(weight, base, q * scale)
        return y, z * scale

    triplets = iterate(scaled, m, n, start, tol=tol, max_passes=max_passes, min_passes=min_passes, rank=rank, seed=seed,
                   device=weight.device)  # fmt: skip
    largest_entry = triplets.v.gather(1, triplets.v.abs().argmax(1, keepdim=True))
    sign = (largest_entry >= 0).float() * 2 - 1  # [r, 1]
    u = triplets.u * sign
    v = triplets.v * sign
    sigma = [value / scale for value in triplets.sigma]
    update = Rank1Update(u[0], sigma[0], v[0], frobenius, triplets.gap, triplets.residual, triplets.bound,
                         triplets.passes, changed, status_of(triplets.gap, triplets.bound, tol))  # fmt: skip
    return LowRankDelta(update, *factors(u, sigma, v))


def delta_matvec(weight: torch.Tensor, base: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """See :func:`rlkernels.delta_matvec`."""
    v = v.float()
    with without_autocast(v.device):
        return torch.cat(
            [(w.float() - b.float()) @ v for w, b in zip(weight.split(DELTA_ROWS), base.split(DELTA_ROWS))]
        )


def stochastic_round(value: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Round float32 [m, n] to a neighbour in bfloat16 or float16, up with the probability that makes it unbiased.

    The random bits are keyed by (seed, row, column): half a Philox word per entry, two columns to a word.
    """
    m, n = value.shape
    bits, min_exponent = (7, -126) if dtype == torch.bfloat16 else (10, -14)
    rows = torch.arange(m, device=value.device)[:, None].expand(m, (n + 1) // 2)
    pairs = torch.arange((n + 1) // 2, device=value.device).expand(m, -1)
    word = philox_word(seed, rows.contiguous(), pairs.contiguous())
    half = torch.stack([word & 0xFFFF, word >> 16], 2).view(m, -1)[:, :n]
    drop = 23 - bits  # random bits that matter
    exponent = torch.frexp(value)[1] - 1
    unit = torch.ldexp(torch.ones_like(value), exponent.clamp_min(min_exponent) - bits)  # spacing of dtype around value
    noise = (half >> (16 - drop)).float() * 2.0**-drop
    rounded = torch.floor(value / unit + noise) * unit
    return torch.where(value.isfinite(), rounded, value).to(dtype)


def add_rank1_(weight: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scale: float, *,
               stochastic_rounding: bool = False, seed: int = 0) -> torch.Tensor:  # fmt: skip
    """See :func:`rlkernels.add_rank1_`."""
    value = torch.addcmul(weight.float(), (u.float() * scale)[:, None], v.float()[None, :])
    if stochastic_rounding and weight.dtype != torch.float32:
        return weight.copy_(stochastic_round(value, weight.dtype, seed))
    return weight.copy_(value)
