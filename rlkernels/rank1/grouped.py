"""The block Krylov solver of ``reference.py`` for many modules at once, on the Triton kernels.

All modules advance together; every kernel skips finished ones. The vectors of all modules lie one after another in
``q``, ``z`` [K, all columns] and ``y`` [K, all rows]; dropped directions are zero columns, so every module has the same
K. For any number of modules a pass launches a read, the sum of its partial results, and a step for the small work. From
the second pass on the host waits for the list of active modules.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlkernels.backend import generation
from rlkernels.rank1 import reference, triton_kernels, triton_vectors
from rlkernels.rank1.layout import Group, Layout, Pair, Tiling, padded, shared_bytes
from rlkernels.rank1.reference import EPS, KRYLOV_COLUMNS
from rlkernels.rank1.triton_vectors import Fact
from rlkernels.rank1.update import (
    GAP_FLOOR,
    LEAST_SQUARE,
    MOST_SQUARE,
    LowRankDelta,
    Rank1Update,
    num_directions,
    status_of,
)

STEP_ELEMENTS = 512  # of a vector that a program of the step processes at a time
SUM = 32, 128  # slots and columns that a program sums at a time
MOST_PASSES = 16  # the step holds the Gram matrix in registers; the reference solves modules that need more passes


class Solver:
    """One call of :func:`solve`. Rows of the matrices must be contiguous."""

    def __init__(self, pairs: Sequence[Pair], starts: Sequence[torch.Tensor | None], *, tol: float, max_passes: int,
                 min_passes: int, rank: int, seed: int, tiling: Tiling) -> None:  # fmt: skip
        self.pairs = pairs
        self.tol = tol
        self.min_passes = min_passes
        self.max_passes = min(max_passes, MOST_PASSES)
        self.cut = max_passes > MOST_PASSES
        self.rank = rank
        self.seed = seed
        self.tiling = tiling
        self.device = pairs[0][0].device
        float32: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        shapes = [weight.shape for weight, _ in pairs]
        has_start = [start is not None and n > 1 for start, (_, n) in zip(starts, shapes)]
        self.outs = [torch.empty(rank * (m + n) + m, **float32) for m, n in shapes]
        self.layout = layout = Layout(pairs, has_start, self.outs, tiling)
        self.k = k = KRYLOV_COLUMNS * self.max_passes
        vectors = torch.zeros(k * (2 * layout.columns + layout.rows), **float32)
        q, z, y = vectors.split([k * layout.columns, k * layout.columns, k * layout.rows])
        self.q = q.view(k, -1)
        self.z = z.view(k, -1)
        self.y = y.view(k, -1)
        self.work = torch.zeros(KRYLOV_COLUMNS, layout.columns, dtype=torch.float64, device=self.device)
        self.state = torch.zeros(len(pairs), k * (2 * k + rank + 4), dtype=torch.float64, device=self.device)
        self.partial = torch.empty(layout.partial, **float32)
        self.stats = torch.empty(layout.stats, 2, dtype=torch.float64, device=self.device)
        self.active = torch.ones(len(pairs), dtype=torch.bool, device=self.device)
        facts: list[list[float]] = []
        offset = 0
        for i in layout.order:
            n = shapes[i][1]
            start = starts[i]
            fact = dict.fromkeys(Fact, 0.0) | {Fact.SINE: 1.0, Fact.PASSES: 1.0}
            fact[Fact.FLOOR] = reference.hidden_floor(min(KRYLOV_COLUMNS, n) - has_start[i], n)
            fact[Fact.SINE_LIMIT] = math.sin(tol - EPS)
            fact[Fact.FLAT_LIMIT] = tol * GAP_FLOOR
            facts.append([*(fact[column] for column in list(Fact)[: Fact.THETA]), *[0.0] * rank])
            if start is not None and has_start[i]:
                self.work[0, offset : offset + n] = start
            offset += padded(n)
        self.facts = torch.tensor(facts, dtype=torch.float64, device="cpu").to(self.device, non_blocking=True)

    def start(self) -> None:
        """Set the first block of q."""
        triton_vectors._start_kernel[(len(self.pairs),)](
            self.layout.table, self.q, self.work, self.state, self.layout.columns, self.k, self.rank, self.seed,
            BLOCK=STEP_ELEMENTS, num_warps=8,
        )  # fmt: skip

    def read(self, old: int, statistics: bool) -> None:
        """Compute Y and Z of the columns of q from ``old`` on."""
        layout = self.layout
        for group in layout.groups:
            self._read_group(group, self.q[old:], self.y[old:], statistics)
        widest = max(group.longest[1] for group in layout.groups)
        triton_kernels._sum_kernel[(KRYLOV_COLUMNS * -(-widest // SUM[1]), len(self.pairs))](
            layout.table, self.active, self.partial, self.z[old:], self.work, layout.columns,
            SLOTS_AT_ONCE=SUM[0], COLUMNS=SUM[1],
        )  # fmt: skip

    def _read_group(self, group: Group, q: torch.Tensor, y: torch.Tensor, statistics: bool) -> None:
        tiling = self.tiling
        layout = self.layout
        count = len(group.shapes)
        m, n = group.longest
        weight, base = map(triton_kernels.stored, group.pair)
        slots = max(-(-height // tiling.slot_rows(height, width)) for height, width in group.shapes)
        tables = (weight, base, layout.table, self.active)
        if group.register_columns:
            sizes = weight.element_size(), base.element_size()
            rows, stages = tiling.block(
                group.register_columns, sizes, group.aligned, shared_bytes(self.device), generation(self.device)
            )
            triton_kernels._rows_kernel[(slots, count)](
                *tables, q, y, self.partial, self.stats, group.first, layout.rows, layout.columns,
                ALIGNED=group.aligned, STATISTICS=statistics, ROWS=rows,
                REGISTER_COLUMNS=group.register_columns, STAGES=stages,
                num_warps=max(4, group.register_columns // 256),
            )  # fmt: skip
            return
        tile = {"ALIGNED": group.aligned, "ROWS": tiling.rows, "COLUMNS": tiling.columns, "STAGES": 3, "num_warps": 8}
        triton_kernels._times_kernel[(-(-m // tiling.rows), count)](
            *tables, q, y, self.stats, group.first, layout.rows, layout.columns, STATISTICS=statistics, **tile
        )
        triton_kernels._transpose_kernel[(-(-n // tiling.columns), slots, count)](
            *tables, y, self.partial, group.first, layout.rows, **tile
        )

    def step(self, k: int) -> None:
        """Run the small work of a pass; k: columns so far."""
        triton_vectors._step_kernel[(len(self.pairs),)](
            self.layout.table, self.facts, self.active, self.q, self.z, self.y, self.work, self.stats, self.state,
            self.layout.rows, self.layout.columns, k, self.k, self.rank, self.min_passes,
            BLOCK=STEP_ELEMENTS, KP=max(16, 1 << (k - 1).bit_length()), num_warps=8,
        )  # fmt: skip

    def solve(self) -> list[LowRankDelta | None]:
        """Return each module's result; None if it is not finite, its squares leave float32, or it needs more passes."""
        self.start()
        for passes in range(1, self.max_passes + 1):
            self.read(KRYLOV_COLUMNS * (passes - 1), statistics=passes == 1)
            self.step(KRYLOV_COLUMNS * passes)
            if max(2, self.min_passes) <= passes < self.max_passes and not any(self.active.tolist()):
                break
        triton_vectors._finish_kernel[(len(self.pairs), self.rank)](
            self.layout.table, self.facts, self.q, self.y, self.state, self.outs[0], self.layout.rows,
            self.layout.columns, self.k, self.rank, BLOCK=STEP_ELEMENTS, num_warps=8,
        )  # fmt: skip
        facts = dict(zip(self.layout.order, self.facts.tolist()))
        return [self._leading(weight.shape, self.outs[i], facts[i]) for i, (weight, _) in enumerate(self.pairs)]

    def _leading(self, shape: torch.Size, out: torch.Tensor, facts: list[float]) -> LowRankDelta | None:
        """Return one module's result from out: v [R, n], u * sigma [R, m], u [m]."""
        m, n = shape
        *_, square, changed, gap, residual, sine, passes = facts[: Fact.THETA]
        is_zero = changed == 0 and square == 0
        if not is_zero and (not LEAST_SQUARE <= square <= MOST_SQUARE or (self.cut and passes == MOST_PASSES)):
            return None
        sigma = [math.sqrt(value) for value in facts[Fact.THETA :]]
        right = out[: self.rank * n].view(-1, n)
        left = out[self.rank * n : -m].view(-1, m)
        bound = min(math.asin(sine) + EPS, math.pi / 2)
        status = "zero" if is_zero else status_of(gap, bound, self.tol)
        update = Rank1Update(out[-m:], sigma[0], right[0], math.sqrt(square), gap, residual, bound, int(passes),
                             changed / (m * n), status)  # fmt: skip
        k = num_directions(sigma)
        return LowRankDelta(update, left[:k].T, right[:k].T)


def solve(pairs: Sequence[Pair], starts: Sequence[torch.Tensor | None], *, tiling: Tiling | None = None,
          **settings: Any) -> Iterator[LowRankDelta]:  # fmt: skip
    """Yield each pair's result. Settings and errors are those of ``reference.solve_delta``; no start is all zeros."""
    with torch.cuda.device(pairs[0][0].get_device()):  # as rlkernels.backend.on_its_device
        results = Solver(pairs, starts, tiling=tiling or Tiling(), **settings).solve()
    for (weight, base), start, leading in zip(pairs, starts, results):
        if leading is None:  # rare, so the slower reference solves it
            leading = reference.solve_delta(weight, base, start=start, **settings)
        yield leading
