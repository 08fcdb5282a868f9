"""The block Krylov solver of ``reference.py`` for many modules at once, on the Triton kernels.

All modules advance together; those that are done are skipped by every kernel. The vectors of all modules lie one after
another in ``q``, ``z`` [K, all columns] and ``y`` [K, all rows]; directions that drop out are zero columns, so every
module has the same K. The small matrices are float64 [modules, ...] on the device: per pass two waits for it (inside
``eigh``, and to see which modules go on) and about 250 small launches, whatever the number of modules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlkernels.rank1 import reference, triton_kernels, triton_vectors
from rlkernels.rank1.layout import Layout, Pair, Tiling, shared_bytes
from rlkernels.rank1.reference import BLOCK, DROP, EPS
from rlkernels.rank1.triton_kernels import Module
from rlkernels.rank1.update import GAP_FLOOR, Leading, Rank1Update, factors

STEPS = 50  # places between the two leading Ritz values where the certificate looks


def cholesky_columns(gram: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Return T [B, 4, 4] such that R T has orthonormal columns, for gram = R^T R; zero where a column is no longer than
    ``least`` [B, 4] once its part in the columns before is gone. Gram-Schmidt on coordinates."""
    t = torch.zeros_like(gram)
    for b in range(gram.shape[-1]):
        column = -(t @ (t.mT @ gram[:, :, b : b + 1]))
        column[:, b] += 1
        length = (column * (gram @ column)).sum((1, 2)).clamp_min(0).sqrt()
        kept = length > least[:, b]
        t[:, :, b] = torch.where(kept[:, None], column[:, :, 0] / length.where(kept, 1)[:, None], 0)
    return t


def spectral_norm(m: torch.Tensor) -> torch.Tensor:
    """Bound the largest eigenvalue of positive semidefinite [..., 4, 4] from above, by at most a factor of 4^(1/8)."""
    trace = m.diagonal(dim1=-2, dim2=-1).sum(-1)
    power = m / trace.where(trace > 0, 1)[..., None, None]
    for _ in range(3):
        power = power @ power
    return power.diagonal(dim1=-2, dim2=-1).sum(-1) ** 0.125 * trace


def angle_bound(theta: torch.Tensor, ritz: torch.Tensor, first: torch.Tensor, rest: torch.Tensor,
                residual: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """Bound angles as the reference, for B modules: theta [B, K], ritz [B, K, K], first [B, 4] (rows of the start),
    rest [B, 4, 4] (Gram matrix of the residual block), residual and floor [B] -> [B]."""
    top, second = theta[:, :1], theta[:, 1:2]
    steps = torch.arange(STEPS - 1, -1, -1, device=theta.device, dtype=theta.dtype)
    x = torch.where(steps > 0, second + (top - second) * steps / STEPS, top)  # [B, 49 down to 1, then the top itself]
    weight = 1 / (x[:, :, None] - theta[:, None, :])  # [B, 50, K]
    weight[:, -1, 0] = 0
    start, last = ritz[:, :BLOCK] * first[:, :, None], ritz[:, -BLOCK:]
    response = (start[:, None] * weight[:, :, None, :]) @ last.mT[:, None]  # [B, 50, 4, 4]
    reach = spectral_norm(response @ rest[:, None] @ response.mT).sqrt().nan_to_num(nan=math.inf)
    free = reach[:, :-1] < floor[:, None]
    seen = free.cumsum(1) > 0
    run = seen & ((seen & ~free).cumsum(1) == 0)  # the first stretch that is excluded, from the top down
    bound = torch.where(run, x[:, :-1], math.inf).amin(1)
    known = run.any(1) & (theta[:, 0] > theta[:, 1]) & (reach[:, -1] < floor / 2)
    sine = (residual + 4 * EPS) / (1 - bound / theta[:, 0])
    return torch.where(known, sine.clamp(max=1).asin() + EPS, math.pi / 2).clamp(max=math.pi / 2)


@dataclass
class Found:
    """What is known of every module, each [B] float64 but for the two whose shape is given; frozen when it is done."""

    theta: torch.Tensor  # [B, R], of the leading directions
    leading: torch.Tensor  # [B, K, R], their coordinates in the basis
    gap: torch.Tensor
    residual: torch.Tensor
    bound: torch.Tensor
    passes: torch.Tensor

    def update(self, active: torch.Tensor, theta: torch.Tensor, ritz: torch.Tensor, gap: torch.Tensor,
               residual: torch.Tensor, bound: torch.Tensor, passes: int) -> None:  # fmt: skip
        """Take theta [B, K] descending, ritz [B, K, K]: all of the basis as it is."""
        k, r = theta.shape[1], min(theta.shape[1], self.theta.shape[1])
        self.theta[:, :r] = torch.where(active[:, None], theta[:, :r], self.theta[:, :r])
        self.leading[:, :k, :r] = torch.where(active[:, None, None], ritz[:, :, :r], self.leading[:, :k, :r])
        self.gap = torch.where(active, gap, self.gap)
        self.residual = torch.where(active, residual, self.residual)
        self.bound = torch.where(active, bound, self.bound)
        self.passes = torch.where(active, passes, self.passes)


class Solver:
    """One call of ``leading_deltas``. Rows of the matrices must be contiguous."""

    def __init__(self, pairs: Sequence[Pair], starts: Sequence[torch.Tensor | None], *, tol: float, max_passes: int,
                 min_passes: int, rank: int, seed: int, tiling: Tiling) -> None:  # fmt: skip
        self.pairs, self.tol, self.max_passes, self.seed = pairs, tol, max_passes, seed
        self.min_passes, self.rank = min_passes, rank
        given = [s is not None and w.shape[1] > 1 for s, (w, _) in zip(starts, pairs)]
        self.layout = layout = Layout(pairs, given, tiling)
        self.device, self.count = pairs[0][0].device, len(pairs)
        k = BLOCK * max_passes
        self.q, self.z = self._zeros(k, layout.columns), self._zeros(k, layout.columns)
        self.y = self._zeros(k, layout.rows)
        self.work = self._zeros(BLOCK, layout.columns, dtype=torch.float64)
        self.gram = self._zeros(self.count, k, k, dtype=torch.float64)
        self.partial = torch.empty(layout.partial, device=self.device)
        self.stats = torch.empty(layout.stats, 2, dtype=torch.float64, device=self.device)
        self.active = torch.ones(self.count, dtype=torch.bool, device=self.device)
        self.starts = self._zeros(layout.columns)
        offset = 0
        for start, is_given, (weight, _) in zip(starts, given, pairs):
            if start is not None and is_given:
                self.starts[offset : offset + len(start)] = start
            offset += weight.shape[1]
        widths = [min(BLOCK, w.shape[1]) for w, _ in pairs]
        place = range(BLOCK)
        self.first = torch.tensor(
            [[float(g <= c < width) for c in place] for g, width in zip(given, widths)],
            dtype=torch.float64,
            device=self.device,
        )
        self.floor = torch.tensor(
            [reference.hidden_floor(width - g, w.shape[1]) for g, width, (w, _) in zip(given, widths, pairs)],
            dtype=torch.float64,
            device=self.device,
        )

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _read(self, old: int, statistics: bool) -> None:
        """Compute Y and Z of the columns of q from ``old`` on."""
        layout, t = self.layout, self.layout.tiling
        q, y, z = self.q[old:], self.y[old:], self.z[old:]
        for group in layout.groups.values():
            common = {"ALIGNED": group.aligned, "STATISTICS": statistics}
            weight, base = map(triton_kernels.stored, group.pair)
            tables = (weight, base, layout.table, group.table, self.active, q, y, self.partial, self.stats)
            if group.wide:
                row_bytes = group.wide * (weight.element_size() + base.element_size())
                held, stages = t.block(row_bytes, shared_bytes(self.device))
                triton_kernels._rows_kernel[(len(group.table),)](
                    *tables, layout.rows, layout.columns, **common, ROWS=held, WIDE=group.wide, STAGES=stages,
                    num_warps=max(4, group.wide // 256),
                )  # fmt: skip
            else:
                triton_kernels._panel_kernel[(len(group.table),)](
                    *tables, torch.empty(group.y_partial, device=self.device),
                    torch.zeros(group.counters, dtype=torch.int32, device=self.device), layout.rows, layout.columns,
                    **common, ROWS=t.rows, CHUNK=t.chunk, STRIP=t.strip,
                    MOST_CHUNKS=1 << (group.chunks - 1).bit_length(), num_warps=4,
                )  # fmt: skip
        triton_kernels._sum_slots_kernel[(len(layout.places),)](
            layout.table, layout.places, self.active, self.partial, z, layout.columns, COLUMNS=triton_kernels.COLUMNS
        )

    def _dots(self, x: torch.Tensor, w: torch.Tensor, rows: bool = False) -> torch.Tensor:
        """Return the dot products of x [K, all] and w [4, all]: [B, K, 4] float64."""
        out = self._zeros(self.count, len(x), BLOCK, dtype=torch.float64)
        triton_vectors._dots_kernel[(self.count, len(x))](
            self.layout.table, self.active, x, w, out, x.stride(0), w.stride(0), len(x),
            LENGTH=int(Module.M if rows else Module.N), OFFSET=int(Module.Y if rows else Module.Q), BLOCK=512,
            num_warps=8,
        )  # fmt: skip
        return out

    def _combine(self, x: torch.Tensor, coefficients: torch.Tensor, out: torch.Tensor, add: torch.Tensor | None = None,
                 rows: bool = False) -> None:  # fmt: skip
        """Set out [b, all] = sum_a x_a coefficients[B, a, b] (+ add)."""
        layout = self.layout
        places = layout.row_places if rows else layout.places
        triton_vectors._combine_kernel[(len(places),)](
            layout.table, places, self.active, x, coefficients.contiguous(), out if add is None else add, out,
            x.stride(0), out.stride(0), len(x), ADD=add is not None, WANTED=coefficients.shape[2],
            OFFSET=int(Module.Y if rows else Module.Q), LENGTH=int(Module.M if rows else Module.N),
            BLOCK=triton_kernels.COLUMNS, num_warps=4,
        )  # fmt: skip

    def _start(self) -> None:
        layout = self.layout
        triton_vectors._start_kernel[(len(layout.places),)](
            layout.table,
            layout.places,
            self.starts,
            self.work,
            layout.columns,
            self.seed,
            COLUMNS=triton_kernels.COLUMNS,
        )
        self._extend(0, self._dots(self.work, self.work), torch.zeros_like(self.first))

    def _extend(self, old: int, gram: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        """Set q[old:] to the orthonormal columns of work (Cholesky QR, twice); return how many each module has."""
        mixed = torch.empty_like(self.work)
        self._combine(self.work, cholesky_columns(gram, least), mixed)
        again = cholesky_columns(self._dots(mixed, mixed), torch.zeros_like(least))
        self._combine(mixed, again, self.q[old : old + BLOCK])
        return (again.diagonal(dim1=1, dim2=2) > 0).sum(1)

    def _rest(self, old: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Set work to the newest Z minus its part in the basis; return its Gram matrix and the norms of Z's columns."""
        fresh, basis = self.z[old : old + BLOCK], self.q[: old + BLOCK]
        lengths = self._dots(fresh, fresh).diagonal(dim1=1, dim2=2).sqrt()
        self._combine(basis, -self._dots(basis, fresh), self.work, add=fresh)
        self._combine(basis, -self._dots(basis, self.work), self.work, add=self.work)
        return self._dots(self.work, self.work), lengths

    def _residual(self, k: int, leading: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        out = self._zeros(self.count, dtype=torch.float64)
        triton_vectors._residual_kernel[(self.count,)](
            self.layout.table, self.active, self.q, self.z, leading.contiguous(), theta, out, self.layout.columns, k,
            BLOCK=triton_kernels.COLUMNS,
        )  # fmt: skip
        return out.sqrt()

    def _statistics(self) -> torch.Tensor:
        """Return float64 [B, 2] on the host: squared Frobenius norm, changed entries."""
        out = self._zeros(self.count, 2, dtype=torch.float64)
        triton_kernels._sum_stats_kernel[(self.count,)](self.layout.table, self.stats, out, BLOCK=256)
        return out.cpu()

    def solve(self) -> list[Leading | None]:
        """Return what was found; None for modules that float32 squares do not suit or that are not finite."""
        self._start()
        flat = torch.zeros(self.count, dtype=torch.float64, device=self.device)
        theta = self._zeros(self.count, self.rank, dtype=torch.float64)
        leading = self._zeros(self.count, BLOCK * self.max_passes, self.rank, dtype=torch.float64)
        found = Found(theta, leading, flat, flat, flat + math.pi / 2, flat + 1)
        for step in range(self.max_passes):
            old, k = BLOCK * step, BLOCK * (step + 1)
            self._read(old, statistics=step == 0)
            if step == 0:
                statistics = self._statistics()
                usual = (statistics[:, 0] >= 1e-24) & (statistics[:, 0] <= 1e24)
                self.active = usual.to(self.device)
                if not usual.any():
                    break
            dots = self._dots(self.y[:k], self.y[old:k], rows=True)
            self.gram[:, :k, old:k], self.gram[:, old:k, :k] = dots, dots.mT
            theta, ritz = torch.linalg.eigh(self.gram[:, :k, :k])
            theta, ritz = theta.flip(1).clamp_min(0), ritz.flip(2)
            top = theta[:, 0]
            safe = top.where(top > 0, 1)
            residual = self._residual(k, ritz[:, :, 0], safe).where(top > 0, math.inf)
            gap = torch.where(top > 0, 1 - (theta[:, 1] / safe).sqrt(), 0)
            rest, lengths = self._rest(old)
            bound = angle_bound(theta, ritz, self.first, rest, residual, self.floor)
            found.update(self.active, theta, ritz, gap, residual, bound, step + 1)
            if step + 1 >= self.min_passes:
                flat_top = (gap < GAP_FLOOR) & (residual <= self.tol * GAP_FLOOR) & (top > 0)
                self.active = self.active & ~flat_top & ~(bound <= self.tol)
            if step + 1 == self.max_passes or not self.active.any().item():
                break
            self.active = self.active & (self._extend(k, rest, DROP * lengths) > 0)
        return self._finish(found, statistics)

    def _finish(self, found: Found, statistics: torch.Tensor) -> list[Leading | None]:
        layout = self.layout
        self.active = torch.ones_like(self.active)
        v = torch.empty(self.rank, layout.columns, dtype=torch.float64, device=self.device)
        u = torch.empty(self.rank, layout.rows, dtype=torch.float64, device=self.device)
        sigma = found.theta.sqrt()  # [B, R]
        self._combine(self.q, found.leading, v)
        self._combine(self.y, found.leading / sigma.where(sigma > 0, 1)[:, None], u, rows=True)
        facts = torch.stack([found.gap, found.residual, found.bound, found.passes], 1).tolist()
        shapes = [weight.shape for weight, _ in self.pairs]
        vectors = u.split([m for m, _ in shapes], 1), v.split([n for _, n in shapes], 1)
        return [self._leading(*parts) for parts in zip(shapes, *vectors, sigma.tolist(), facts, statistics.tolist())]

    def _leading(self, shape: torch.Size, left: torch.Tensor, right: torch.Tensor, sigma: list[float],
                 facts: list[float], statistics: list[float]) -> Leading | None:  # fmt: skip
        """Return one module's result from left [R, m], right [R, n]."""
        (gap, residual, bound, passes), (square, changed) = facts, statistics
        if changed == 0 and square == 0:
            u, v = left[0].float().zero_(), right[0].float().zero_()
            update = Rank1Update(u, 0.0, v, 0.0, 0.0, 0.0, math.pi / 2, 1, 0.0, "zero")
            return Leading(update, u[:, None], v[:, None])
        if not 1e-24 <= square <= 1e24:
            return None
        sign = right.gather(1, right.abs().argmax(1, keepdim=True)).sign()
        u, v = (left * sign).float(), (right * sign).float()
        status = "ill_defined" if gap < GAP_FLOOR else "ok" if bound <= self.tol else "not_converged"
        update = Rank1Update(u[0], sigma[0], v[0], math.sqrt(square), gap, residual, bound, int(passes),
                             changed / shape.numel(), status)  # fmt: skip
        return Leading(update, *factors(u, sigma, v))


def leading_deltas(pairs: Sequence[Pair], starts: Sequence[torch.Tensor | None], *, tiling: Tiling | None = None,
                   **settings: Any) -> list[Leading | ValueError]:  # fmt: skip
    """Return the result of each pair, or the error that ``reference.leading_delta`` raises for it; settings as there,
    starts are not all zero."""
    with torch.cuda.device(pairs[0][0].get_device()):  # as rlkernels.backend.on_its_device
        found = Solver(pairs, starts, tiling=tiling or Tiling(), **settings).solve()
    out: list[Leading | ValueError] = []
    for (weight, base), start, leading in zip(pairs, starts, found):
        if leading is None:  # tiny, huge, NaN or infinite: rare, and the reference takes care
            try:
                leading = reference.leading_delta(weight, base, start=start, **settings)
            except ValueError as error:
                out.append(error)
                continue
        out.append(leading)
    return out
