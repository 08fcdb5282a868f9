"""Dynamic time warping as a wavefront in Triton: one pair at a time per program, an anti-diagonal per step."""

import torch
import triton
import triton.language as tl

from rlkernels._fakes import warps
from rlkernels.backend import kernel_op, next_power_of_2


@triton.jit
def _shift(values, border, ROWS: tl.constexpr):
    """Move values down by one row; row 0 becomes ``border``."""
    row = tl.arange(0, ROWS)
    return tl.where(row == 0, border, tl.gather(values, tl.maximum(row - 1, 0), 0))


@triton.jit(do_not_specialize=["pairs", "m", "columns"])
def _dtw_kernel(
    x, y, x_lengths, y_lengths, cost, start, end, border, border_start, pairs, m, columns, x_stride, y_stride, radius,
    dims, ROWS: tl.constexpr, BAND: tl.constexpr, SUBSEQUENCE: tl.constexpr,
):  # fmt: skip
    """Align pairs (n, m), taken with a fixed stride. A strip of ROWS rows of x advances along y, row i one column
    behind row i - 1; the last row of a strip is the border [programs, columns] of the next."""
    row = tl.arange(0, ROWS)
    infinity = float("inf")
    program = tl.program_id(0).to(tl.int64)
    border += program * columns
    border_start += program * columns
    for pair in range(program, pairs, tl.num_programs(0)):
        n = pair // m
        n_rows = tl.load(x_lengths + n).to(tl.int32)
        n_columns = tl.load(y_lengths + pair % m).to(tl.int32)
        x_row = x + n * x_stride
        y_row = y + (pair % m) * y_stride
        reach = tl.maximum(radius, tl.abs(n_rows - n_columns))
        best = infinity
        best_start = -1
        best_end = -1
        for first in range(0, n_rows, ROWS):
            i = first + row
            old = tl.full((ROWS,), infinity, tl.float32)  # the anti-diagonal before, at its rows
            corner = old  # the one before that, moved down by one row
            old_start = tl.full((ROWS,), -1, tl.int32)
            corner_start = old_start
            for step in range(n_columns + ROWS - 1):
                j = step - row
                inside = (j >= 0) & (j < n_columns) & (i < n_rows)
                above_border = infinity
                above_border_start = -1
                corner_border = infinity
                if first > 0:
                    if step < n_columns:
                        above_border = tl.load(border + step)
                        if SUBSEQUENCE:
                            above_border_start = tl.load(border_start + step)
                elif SUBSEQUENCE:
                    above_border = 0.0
                    above_border_start = step
                elif step == 0:
                    corner_border = 0.0
                above = _shift(old, above_border, ROWS)
                if step == 0:
                    corner = tl.where(row == 0, corner_border, corner)
                distance = tl.zeros((ROWS,), tl.float32)
                for d in range(dims):  # 1 is a constant to the compiler, and no loop is left
                    a = tl.load(x_row + i.to(tl.int64) * dims + d, mask=i < n_rows, other=0.0)
                    b = tl.load(y_row + j.to(tl.int64) * dims + d, mask=inside, other=0.0)
                    distance += (b - a) * (b - a)
                before = tl.minimum(corner, above)
                if SUBSEQUENCE:  # ties: the first of above, corner, left has the highest start
                    above_start = _shift(old_start, above_border_start, ROWS)
                    new_start = tl.where(corner < above, corner_start, above_start)
                    new_start = tl.where(old < before, old_start, new_start)
                    corner_start = above_start
                new = distance + tl.minimum(old, before)
                if BAND:
                    inside = inside & (tl.abs(i - j) <= reach)
                new = tl.where(inside, new, infinity)
                corner = above
                old = new
                if SUBSEQUENCE:
                    old_start = new_start
                at_end = inside & (i == n_rows - 1)
                if SUBSEQUENCE:
                    value = tl.min(tl.where(at_end, new, infinity), 0)
                    here = step - (n_rows - 1 - first)
                    last_row = (here >= 0) & (here < n_columns) & (n_rows - first <= ROWS)
                    if last_row & ((value < best) | (here == 0)):
                        best = value
                        best_start = tl.max(tl.where(at_end, new_start, -1), 0)
                        best_end = here
                else:
                    tl.store(cost + pair + 0 * row, new, mask=at_end & (j == n_columns - 1))
                if first + ROWS < n_rows:
                    last = (row == ROWS - 1) & (j >= 0) & (j < n_columns)
                    tl.store(border + j, new, mask=last)
                    if SUBSEQUENCE:
                        tl.store(border_start + j, new_start, mask=last)
            tl.debug_barrier()  # the border is written before the next strip reads it
        if SUBSEQUENCE:
            tl.store(cost + pair, best)
            tl.store(start + pair, best_start)
            tl.store(end + pair, best_end)


@kernel_op("rlkernels::dtw_triton", warps)
def dtw_pairs(
    x: torch.Tensor, y: torch.Tensor, x_lengths: torch.Tensor, y_lengths: torch.Tensor, band: int | None,
    subsequence: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute costs (and starts, ends) of all pairs of x [N, L, D], y [M, K, D] without an empty trajectory."""
    n, m, columns = x.shape[0], y.shape[0], y.shape[1]
    cost, start, end = warps(x, y, x_lengths, y_lengths, band, subsequence)
    rows = min(128, max(32, next_power_of_2(x.shape[1])))
    programs = min(n * m, 4096)
    size = programs * columns if x.shape[1] > rows else 1  # one strip has no border
    border = x.new_empty(size)
    border_start = x.new_empty(size if subsequence else 1, dtype=torch.int32)
    if programs:
        _dtw_kernel[(programs,)](
            x, y, x_lengths, y_lengths, cost, start, end, border, border_start, n * m, m, columns, x.stride(0),
            y.stride(0), 0 if band is None else band, x.shape[2], ROWS=rows, BAND=band is not None,
            SUBSEQUENCE=subsequence, num_warps=1,
        )  # fmt: skip
    return cost, start, end
