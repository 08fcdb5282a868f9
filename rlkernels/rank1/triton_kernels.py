"""The solver's reads in Triton: both matrices once (twice if their rows are long), for many modules in one launch.

A row of an int64 table (``Module``) describes a module, so that one launch covers matrices anywhere in memory. The
grids are as large as the largest module needs; programs beyond a smaller one end at once. Partial results have a place
of their own and are added up in a fixed order. bfloat16 is handled as its 16 bits, in Triton's interpreter as on a GPU.
"""

from enum import IntEnum

import torch
import triton
import triton.language as tl


class Module(IntEnum):
    """Columns of the module table, in elements."""

    WEIGHT = 0  # from the weight of the first module of the launch, wherever it lies
    BASE = 1
    WEIGHT_STRIDE = 2
    BASE_STRIDE = 3
    M = 4
    N = 5
    Y = 6  # where its rows start in y [K, all rows]
    Q = 7  # where its columns start in q and z [K, all columns]
    PARTIAL = 8  # its partial Z: [slots, 4, n]
    SLOTS = 9
    HEIGHT = 10  # rows of a slot
    STATS = 11  # its first partial statistics
    ITEMS = 12  # how many of them
    GIVEN = 13  # 1 when the first column of the first block is given
    OUT = 14  # its results, from those of the first module


WIDTH = tl.constexpr(len(Module))
(
    WEIGHT, BASE, WEIGHT_STRIDE, BASE_STRIDE, M, N, Y, Q, PARTIAL, SLOTS, HEIGHT, STATS, ITEMS, GIVEN, OUT,
) = (tl.constexpr(int(column)) for column in Module)  # fmt: skip


@triton.jit
def _float(x):
    if x.dtype == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _load_module(modules, module, ALIGNED: tl.constexpr):
    """Return the module's row of the table, and load m, n."""
    module_row = modules + module * WIDTH
    m, n = tl.load(module_row + M), tl.load(module_row + N)
    if ALIGNED:
        n = tl.multiple_of(n, 16)
    return module_row, m, n


@triton.jit
def _matrices(module_row, weights, bases, ALIGNED: tl.constexpr):
    """Return where weight and base start, and their strides."""
    weight, base = tl.load(module_row + WEIGHT), tl.load(module_row + BASE)
    weight_stride, base_stride = tl.load(module_row + WEIGHT_STRIDE), tl.load(module_row + BASE_STRIDE)
    if ALIGNED:  # a hint holds for the value of the operation right before it
        weight, base = tl.multiple_of(weight, 8), tl.multiple_of(base, 8)
        weight_stride, base_stride = tl.multiple_of(weight_stride, 16), tl.multiple_of(base_stride, 16)
    return weights + weight, bases + base, weight_stride, base_stride


@triton.jit
def _raw(pointer, stride, row, end, column, n):
    """Load rows of a matrix as stored, zeros outside: [rows, columns]."""
    mask = (row < end)[:, None] & (column < n)[None, :]
    return tl.load(pointer + row[:, None] * stride + column[None, :], mask=mask, other=0)


@triton.jit
def _vectors(pointer, module_row, OFFSET: tl.constexpr):
    """Return where the module's vectors start."""
    return pointer + tl.load(module_row + OFFSET)


@triton.jit(do_not_specialize=["first"])
def _rows_kernel(
    weights, bases, modules, active, q, y, partial, stats, first, all_rows, all_columns,
    ALIGNED: tl.constexpr, STATISTICS: tl.constexpr,
    ROWS: tl.constexpr, REGISTER_COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute Y = D Q and the slot's part of D^T Y. A row of the delta and the sums for Z lie in registers; the next
    block of rows is on its way while one is multiplied. Program (slot, module of the launch)."""
    module = first + tl.program_id(1)
    if tl.load(active + module) == 0:
        return
    module_row, m, n = _load_module(modules, module, ALIGNED)
    slot, height = tl.program_id(0), tl.load(module_row + HEIGHT)
    if slot * height >= m:
        return
    weight, base, weight_stride, base_stride = _matrices(module_row, weights, bases, ALIGNED)
    end = tl.minimum((slot + 1) * height, m)
    q = _vectors(q, module_row, Q)
    y = _vectors(y, module_row, Y)
    column = tl.arange(0, REGISTER_COLUMNS)
    inside = column < n
    q0 = tl.load(q + column, mask=inside, other=0.0)[None, :]
    q1 = tl.load(q + all_columns + column, mask=inside, other=0.0)[None, :]
    q2 = tl.load(q + 2 * all_columns + column, mask=inside, other=0.0)[None, :]
    q3 = tl.load(q + 3 * all_columns + column, mask=inside, other=0.0)[None, :]
    z0 = tl.zeros([REGISTER_COLUMNS], tl.float32)
    z1, z2, z3 = z0, z0, z0
    square = tl.zeros([ROWS], tl.float32)
    changed = tl.zeros([ROWS], tl.float32)
    for start in tl.range(slot * height, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        w = _raw(weight, weight_stride, row, end, column, n)
        b = _raw(base, base_stride, row, end, column, n)
        delta = _float(w) - _float(b)
        products = tl.join(tl.join(delta * q0, delta * q1), tl.join(delta * q2, delta * q3))
        y01, y23 = tl.split(tl.sum(products, 1))  # one reduction across the program for all columns
        y0, y1 = tl.split(y01)
        y2, y3 = tl.split(y23)
        if STATISTICS:
            more = tl.join(delta * delta, (delta != 0).to(tl.float32))
            squares, changes = tl.split(tl.sum(more, 1))
            square += squares
            changed += changes
        tl.store(y + row, y0, mask=row < end)
        tl.store(y + all_rows + row, y1, mask=row < end)
        tl.store(y + 2 * all_rows + row, y2, mask=row < end)
        tl.store(y + 3 * all_rows + row, y3, mask=row < end)
        z0 += tl.sum(delta * y0[:, None], 0)
        z1 += tl.sum(delta * y1[:, None], 0)
        z2 += tl.sum(delta * y2[:, None], 0)
        z3 += tl.sum(delta * y3[:, None], 0)
    partial += tl.load(module_row + PARTIAL) + slot * 4 * n
    tl.store(partial + column, z0, mask=column < n)
    tl.store(partial + n + column, z1, mask=column < n)
    tl.store(partial + 2 * n + column, z2, mask=column < n)
    tl.store(partial + 3 * n + column, z3, mask=column < n)
    if STATISTICS:
        stats += 2 * (tl.load(module_row + STATS) + slot)
        tl.store(stats, tl.sum(square.to(tl.float64)))
        tl.store(stats + 1, tl.sum(changed.to(tl.float64)))


@triton.jit(do_not_specialize=["first"])
def _times_kernel(
    weights, bases, modules, active, q, y, stats, first, all_rows, all_columns,
    ALIGNED: tl.constexpr, STATISTICS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute Y = D Q for rows too long for ``_rows_kernel``. Program (block of rows, module of the launch)."""
    module = first + tl.program_id(1)
    if tl.load(active + module) == 0:
        return
    module_row, m, n = _load_module(modules, module, ALIGNED)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0).to(tl.int64) * ROWS >= m:
        return
    weight, base, weight_stride, base_stride = _matrices(module_row, weights, bases, ALIGNED)
    four = tl.arange(0, 4)[:, None]
    offset = tl.load(module_row + Q)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    q += offset
    sums = tl.zeros([4, ROWS, COLUMNS], tl.float32)
    square = tl.zeros([ROWS, COLUMNS], tl.float32)
    changed = square
    for start in tl.range(0, n, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        w = _raw(weight, weight_stride, row, m, column, n)
        delta = _float(w) - _float(_raw(base, base_stride, row, m, column, n))
        qs = tl.load(q + four * all_columns + column[None, :], mask=(column < n)[None, :], other=0.0)
        sums += delta[None, :, :] * qs[:, None, :]
        if STATISTICS:
            square += delta * delta
            changed += (delta != 0).to(tl.float32)
    y = _vectors(y, module_row, Y)
    tl.store(y + four * all_rows + row[None, :], tl.sum(sums, 2), mask=(row < m)[None, :])
    if STATISTICS:
        stats += 2 * (tl.load(module_row + STATS) + tl.program_id(0))
        tl.store(stats, tl.sum(tl.sum(square, 1).to(tl.float64)))
        tl.store(stats + 1, tl.sum(tl.sum(changed, 1).to(tl.float64)))


@triton.jit(do_not_specialize=["first"])
def _transpose_kernel(
    weights, bases, modules, active, y, partial, first, all_rows,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the slot's part of D^T Y after ``_times_kernel``. Program (strip of columns, slot, module)."""
    module = first + tl.program_id(2)
    if tl.load(active + module) == 0:
        return
    module_row, m, n = _load_module(modules, module, ALIGNED)
    slot, height = tl.program_id(1), tl.load(module_row + HEIGHT)
    if (slot * height >= m) | (tl.program_id(0) * COLUMNS >= n):
        return
    weight, base, weight_stride, base_stride = _matrices(module_row, weights, bases, ALIGNED)
    end = tl.minimum((slot + 1) * height, m)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    y = _vectors(y, module_row, Y)
    four = tl.arange(0, 4)[:, None]
    sums = tl.zeros([4, ROWS, COLUMNS], tl.float32)
    for start in tl.range(slot * height, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        w = _raw(weight, weight_stride, row, end, column, n)
        delta = _float(w) - _float(_raw(base, base_stride, row, end, column, n))
        ys = tl.load(y + four * all_rows + row[None, :], mask=(row < end)[None, :], other=0.0)
        sums += ys[:, :, None] * delta[None, :, :]
    partial += tl.load(module_row + PARTIAL) + slot * 4 * n
    tl.store(partial + four * n + column[None, :], tl.sum(sums, 1), mask=(column < n)[None, :])


@triton.jit
def _sum_kernel(modules, active, partial, z, work, all_columns, SLOTS_AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr):
    """Set z and work to the sum of the partial Z. Program (four times stretch of columns + column of the block,
    module)."""
    module = tl.program_id(1)
    if tl.load(active + module) == 0:
        return
    module_row, _, n = _load_module(modules, module, False)
    first, c = tl.program_id(0) // 4 * COLUMNS, tl.program_id(0) % 4
    if first >= n:
        return
    column = first + tl.arange(0, COLUMNS)
    partial += tl.load(module_row + PARTIAL) + c * n
    slots = tl.load(module_row + SLOTS)
    total = tl.zeros([SLOTS_AT_ONCE, COLUMNS], tl.float32)
    for start in range(0, slots, SLOTS_AT_ONCE):
        slot = start + tl.arange(0, SLOTS_AT_ONCE)
        mask = (slot < slots)[:, None] & (column < n)[None, :]
        total += tl.load(partial + slot[:, None] * 4 * n + column[None, :], mask=mask, other=0.0)
    at, total = tl.load(module_row + Q) + c.to(tl.int64) * all_columns + column, tl.sum(total, 0)
    tl.store(z + at, total, mask=column < n)
    tl.store(work + at, total.to(tl.float64), mask=column < n)


def stored(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix as the kernels take it: bfloat16 as its bits."""
    return matrix.view(torch.int16) if matrix.dtype == torch.bfloat16 else matrix
