"""Rank-1 ops in plain torch: the single source of truth for tests and benchmarks.

The solver is a block Krylov method on D^T D for D = weight - base [m, n], four columns wide. One read of both
matrices per step gives Y = D Q and Z = D^T Y, hence the Ritz pairs of the whole basis, their exact residuals and
the next block. The native and Triton kernels replace ``read``; everything else is small.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from rlkernels._precision import without_autocast
from rlkernels.rank1.update import GAP_FLOOR, Leading, Rank1Update, factors
from rlkernels.sampling.reference import keyed_uniform, philox_word

BLOCK = 4  # columns of the Krylov block
ROWS = 1024  # rows of the delta held at a time
DROP = 1e-5  # a new direction this much shorter than its column was lost to rounding
RISK = 1e-4  # chance that the random start hides a direction from the certificate
EPS = 2.0**-23  # float32 rounding

Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # [n, k] -> [m, k], [n, k]


def delta_read(weight: torch.Tensor, base: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Y = D q [m, k] and Z = D^T Y [n, k] in float32, with ``ROWS`` rows of D at a time."""
    ys, z = [], torch.zeros_like(q)
    for w, b in zip(weight.split(ROWS), base.split(ROWS)):
        delta = w.float() - b.float()
        with without_autocast(q.device):
            ys.append(delta @ q)
            z += delta.T @ ys[-1]
    return torch.cat(ys), z


def delta_stats(weight: torch.Tensor, base: torch.Tensor) -> tuple[float, float, float]:
    """Frobenius norm of the delta, share of unequal entries, largest magnitude (NaN or inf when the input has any)."""
    square, changed, largest = 0.0, 0, 0.0
    for w, b in zip(weight.split(ROWS), base.split(ROWS)):
        delta = w.double() - b.double()
        square += delta.square().sum().item()
        changed += int(torch.count_nonzero(delta))
        top = delta.abs().max().item()  # NaN when any is NaN
        largest = top if math.isnan(top) else max(largest, top)
    return math.sqrt(square), changed / weight.numel(), largest


@lru_cache(maxsize=64)
def random_block(n: int, columns: int, seed: int, device: torch.device) -> torch.Tensor:
    """Draw float64 [n, columns] in (-1/2, 1/2), keyed by (seed, column, row), equal on every device; read only."""
    rows = torch.arange(n, device=device).repeat(columns)
    ids = torch.arange(columns, device=device).repeat_interleave(n)
    return (keyed_uniform(seed, ids, rows) - 0.5).view(columns, n).T.double()


def orthonormal(block: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns (float64) for what ``block`` [n, k] adds to ``basis`` [n, K]; at most k."""
    out: list[torch.Tensor] = []
    for column in block.T:
        before = column.norm()
        for _ in range(2):
            column = column - basis @ (basis.T @ column)
            for done in out:
                column = column - done * (done @ column)
        length = column.norm()
        if length > DROP * before:
            out.append(column / length)
    return torch.stack(out, 1) if out else block[:, :0]


def hidden_floor(random_columns: int, n: int) -> float:
    """Return the length that the start's coordinates of any fixed unit vector exceed, but for a chance of ``RISK``.

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
    [k, K]: rows of the last block, times the square root of the Gram matrix of F). Where that is below ``floor``
    there is no eigenvalue. None: the leading pair cannot be told from the rest yet.
    """

    def reach(x: float, skip: int) -> float:
        response = (first[:, skip:] / (x - theta[skip:])) @ last[:, skip:].T
        return torch.linalg.matrix_norm(response, 2).item()

    top = theta[0].item()
    second = theta[1].item() if len(theta) > 1 else 0.0
    if top <= second or (len(theta) > 1 and reach(top, 1) >= floor / 2):  # something may hide above the first
        return None
    bound = None
    for step in range(49, 0, -1):  # from the first eigenvalue down, across what is excluded
        x = second + (top - second) * step / 50
        if reach(x, 0) < floor:
            bound = x
        elif bound is not None:
            break
    return bound


class Solved(NamedTuple):
    """The leading ``rank`` directions of the basis, where it has as many, and what is known of the first."""

    u: torch.Tensor  # [r, m] float32; zeros where sigma is 0
    sigma: list[float]  # [r], descending
    v: torch.Tensor  # [r, n] float32
    gap: float
    residual: float
    bound: float
    passes: int

    def status(self, tol: float) -> str:
        return "ill_defined" if self.gap < GAP_FLOOR else "ok" if self.bound <= tol else "not_converged"


def solve(read: Read, m: int, n: int, start: torch.Tensor | None, *, tol: float, max_passes: int, min_passes: int,
          rank: int, seed: int, device: torch.device) -> Solved:  # fmt: skip
    """Block Krylov iteration, ``min_passes`` reads at least. The delta is not zero."""
    width = min(BLOCK, n)
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
        block = block.float()  # the kernels read float32: what they were given is what the basis holds
        image, back = read(block)
        q, y, z = torch.cat([q, block], 1), torch.cat([y, image], 1), torch.cat([z, back], 1)  # float64
        theta, ritz = torch.linalg.eigh((y.T @ y).cpu())
        theta, ritz = theta.flip(0).clamp_min(0), ritz.flip(1)
        coordinates = ritz[:, 0].to(device)
        sigma = math.sqrt(theta[0].item())
        if sigma == 0:  # the start lies in the null space, as for one non-zero entry: look elsewhere
            residual, gap, bound = math.inf, 0.0, math.pi / 2
        else:
            residual = (z @ coordinates / theta[0].item() - q @ coordinates).norm().item()
            gap = 1 - math.sqrt(theta[1].item()) / sigma if len(theta) > 1 else 1.0
        rest = back.double() - q @ (q.T @ back.double())
        rest = rest - q @ (q.T @ rest)
        k = block.shape[1]
        if sigma > 0:
            values, vectors = torch.linalg.eigh((rest.T @ rest).cpu())
            root = values.clamp_min(0).sqrt()[:, None] * vectors.T  # root^T root = rest^T rest
            last = root @ ritz[-k:]
            bound = angle_bound(theta, residual, ritz[first], last, floor)
            converged = gap < GAP_FLOOR and residual <= tol * GAP_FLOOR
            if passes == max_passes or (passes >= min_passes and (converged or bound <= tol)):
                break
        block = orthonormal(back.double(), q)
        if block.shape[1] == 0:  # the basis is invariant
            break
    sigmas = theta[:rank].sqrt()
    leading = ritz[:, :rank].to(device)
    u, v = y @ leading / sigmas.where(sigmas > 0, 1.0).to(device), q @ leading
    return Solved(u.T.float(), sigmas.tolist(), v.T.float(), gap, residual, bound, passes)


def angle_bound(theta: torch.Tensor, residual: float, first: torch.Tensor, last: torch.Tensor, floor: float) -> float:
    """Bound in radians on the angle of the leading Ritz vector, by the sin-theta theorem of Davis and Kahan."""
    second = second_eigenvalue(theta, first, last, floor)
    if second is None:
        return math.pi / 2
    distance = 1 - second / theta[0].item()
    return min(math.pi / 2, math.asin(min(1.0, (residual + 4 * EPS) / distance)) + EPS)


def not_finite(weight: torch.Tensor, base: torch.Tensor) -> ValueError:
    """Return the error that says which of the two, or their difference, holds NaN or infinity, and where."""
    for name, matrix in (("weight", weight), ("base", base)):
        if not matrix.isfinite().all():
            i, j = (~matrix.isfinite()).nonzero()[0].tolist()
            return ValueError(f"{name} must be finite, got {float(matrix[i, j])} at [{i}, {j}]")
    i, j = ((weight.double() - base.double()).abs() > torch.finfo(torch.float32).max).nonzero()[0].tolist()
    return ValueError(
        f"weight - base must fit float32, got {float(weight[i, j]):g} - {float(base[i, j]):g} at [{i}, {j}]"
    )


def leading_delta(weight: torch.Tensor, base: torch.Tensor, *, start: torch.Tensor | None = None, tol: float = 1e-2,
                  max_passes: int = 12, min_passes: int = 1, rank: int = 1, seed: int = 0) -> Leading:  # fmt: skip
    """See :func:`rlkernels.rank1.ops.leading_deltas`."""
    m, n = weight.shape
    frobenius, changed, largest = delta_stats(weight, base)
    if not largest <= torch.finfo(torch.float32).max:
        raise not_finite(weight, base)
    if largest == 0:
        u, v = (torch.zeros(length, dtype=torch.float32, device=weight.device) for length in (m, n))
        update = Rank1Update(u, 0.0, v, 0.0, 0.0, 0.0, math.pi / 2, 1, 0.0, "zero")
        return Leading(update, u[:, None], v[:, None])
    if start is not None and not start.any():
        start = None
    scale = 2.0 ** min(max(-math.frexp(largest)[1], -126), 126)  # squares of tiny or huge deltas stay within float32

    def scaled(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = delta_read(weight, base, q * scale)
        return y, z * scale

    found = solve(scaled, m, n, start, tol=tol, max_passes=max_passes, min_passes=min_passes, rank=rank, seed=seed,
                  device=weight.device)  # fmt: skip
    sign = (found.v.gather(1, found.v.abs().argmax(1, keepdim=True)) >= 0).float() * 2 - 1  # [r, 1]
    u, v, sigma = found.u * sign, found.v * sign, [s / scale for s in found.sigma]
    update = Rank1Update(u[0], sigma[0], v[0], frobenius, found.gap, found.residual, found.bound, found.passes, changed,
                         found.status(tol))  # fmt: skip
    return Leading(update, *factors(u, sigma, v))


def top1_delta(weight: torch.Tensor, base: torch.Tensor, **settings: Any) -> Rank1Update:
    """See :func:`rlkernels.top1_delta`; settings as for :func:`leading_delta`."""
    return leading_delta(weight, base, **settings).update


def delta_matvec(weight: torch.Tensor, base: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """See :func:`rlkernels.delta_matvec`."""
    v = v.float()
    with without_autocast(v.device):
        return torch.cat([(w.float() - b.float()) @ v for w, b in zip(weight.split(ROWS), base.split(ROWS))])


def stochastic_round(value: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rounds float32 [m, n] to a neighbour in bfloat16 or float16, up with the probability that makes it unbiased.

    The random bits are keyed by (seed, row, column): half a Philox word per entry, two columns to a word.
    """
    m, n = value.shape
    bits, smallest = (7, -126) if dtype == torch.bfloat16 else (10, -14)
    rows = torch.arange(m, device=value.device)[:, None].expand(m, (n + 1) // 2)
    pairs = torch.arange((n + 1) // 2, device=value.device).expand(m, -1)
    word = philox_word(seed, rows.contiguous(), pairs.contiguous())
    half = torch.stack([word & 0xFFFF, word >> 16], 2).view(m, -1)[:, :n]
    drop = 23 - bits  # random bits that matter
    exponent = torch.frexp(value)[1] - 1
    unit = torch.ldexp(torch.ones_like(value), exponent.clamp_min(smallest) - bits)  # spacing of dtype around value
    rounded = torch.floor(value / unit + (half >> (16 - drop)).float() * 2.0**-drop) * unit
    return torch.where(value.isfinite(), rounded, value).to(dtype)


def add_rank1_(weight: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scale: float, *,
               stochastic_rounding: bool = False, seed: int = 0) -> torch.Tensor:  # fmt: skip
    """See :func:`rlkernels.add_rank1_`."""
    value = torch.addcmul(weight.float(), (u.float() * scale)[:, None], v.float()[None, :])
    if stochastic_rounding and weight.dtype != torch.float32:
        return weight.copy_(stochastic_round(value, weight.dtype, seed))
    return weight.copy_(value)
