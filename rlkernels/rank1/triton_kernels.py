"""The solver's reads in Triton: both matrices once per application of D^T D, for many modules in one launch.

Modules are described by rows of an int64 table (``MODULE``), so that one launch covers matrices anywhere in memory;
work items by rows of another. Partial results have a place of their own and are added up in a fixed order. bfloat16
is handled as its 16 bits, in Triton's interpreter as on a GPU.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # of a work item of the dense kernels


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
    STATS = 10  # its first partial statistics
    ITEMS = 11  # how many of them
    GIVEN = 12  # 1 when the first column of the first block is given
    Y_PARTIAL = 13  # its partial Y, [4, chunks, m], and
    CHUNKS = 14  # the number of its column chunks: for the panel kernel
    COUNTER = 15  # its first counter of finished chunks, one per block of rows


WIDTH = tl.constexpr(len(Module))
WEIGHT, BASE, WEIGHT_STRIDE, BASE_STRIDE = (tl.constexpr(int(c)) for c in list(Module)[:4])
M, N, Y, Q, PARTIAL, SLOTS = (tl.constexpr(int(c)) for c in list(Module)[4:10])
STATS, ITEMS, GIVEN, Y_PARTIAL, CHUNKS, COUNTER = (tl.constexpr(int(c)) for c in list(Module)[10:])


@triton.jit
def _float(x):
    if x.dtype == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _shape(modules, module, ALIGNED: tl.constexpr):
    """Load the row of the module in the table, m, n."""
    facts = modules + module * WIDTH
    m, n = tl.load(facts + M), tl.load(facts + N)
    if ALIGNED:
        n = tl.multiple_of(n, 16)
    return facts, m, n


@triton.jit
def _matrices(facts, weights, bases, ALIGNED: tl.constexpr):
    """Return where weight and base start, and their strides."""
    weight, base = tl.load(facts + WEIGHT), tl.load(facts + BASE)
    weight_stride, base_stride = tl.load(facts + WEIGHT_STRIDE), tl.load(facts + BASE_STRIDE)
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
def _times(delta, q, stride, column, n):
    """Multiply delta [rows, columns] times a column of the block -> [rows]."""
    return tl.sum(delta * tl.load(q + stride + column, mask=column < n, other=0.0)[None, :], 1)


@triton.jit
def _rows_kernel(
    weights, bases, modules, items, active, q, y, partial, stats, all_rows, all_columns,
    ALIGNED: tl.constexpr, STATISTICS: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute Y = D Q and the slot's part of D^T Y. A row of the delta and the sums for Z lie in registers; the next
    block of rows is on its way while one is multiplied. items [P, 5]: module, first row, end, partial Z, statistics."""
    item = items + tl.program_id(0) * 5
    module = tl.load(item)
    if tl.load(active + module) == 0:
        return
    facts, _, n = _shape(modules, module, ALIGNED)
    weight, base, weight_stride, base_stride = _matrices(facts, weights, bases, ALIGNED)
    first, end = tl.load(item + 1), tl.load(item + 2)
    q += tl.load(facts + Q)
    y += tl.load(facts + Y)
    column = tl.arange(0, WIDE)
    inside = column < n
    q0 = tl.load(q + column, mask=inside, other=0.0)[None, :]
    q1 = tl.load(q + all_columns + column, mask=inside, other=0.0)[None, :]
    q2 = tl.load(q + 2 * all_columns + column, mask=inside, other=0.0)[None, :]
    q3 = tl.load(q + 3 * all_columns + column, mask=inside, other=0.0)[None, :]
    z0 = tl.zeros([WIDE], tl.float32)
    z1, z2, z3 = z0, z0, z0
    square = tl.zeros([ROWS], tl.float32)
    changed = tl.zeros([ROWS], tl.float32)
    for start in tl.range(first, end, ROWS, num_stages=STAGES):
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
    partial += tl.load(item + 3)
    tl.store(partial + column, z0, mask=column < n)
    tl.store(partial + n + column, z1, mask=column < n)
    tl.store(partial + 2 * n + column, z2, mask=column < n)
    tl.store(partial + 3 * n + column, z3, mask=column < n)
    if STATISTICS:
        stats += 2 * tl.load(item + 4)
        tl.store(stats, tl.sum(square.to(tl.float64)))
        tl.store(stats + 1, tl.sum(changed.to(tl.float64)))


@triton.jit
def _panel_times(
    weights, bases, facts, item, q, y, y_partial, stats, counters, all_rows, all_columns, m, n,
    ALIGNED: tl.constexpr, STATISTICS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows with one chunk of Q; the program that finds all chunks there adds them up."""
    weight, base, weight_stride, base_stride = _matrices(facts, weights, bases, ALIGNED)
    first, end, chunk = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    row = first + tl.arange(0, ROWS)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    w = _raw(weight, weight_stride, row, end, column, n)
    delta = _float(w) - _float(_raw(base, base_stride, row, end, column, n))
    q += tl.load(facts + Q)
    chunks = tl.load(facts + CHUNKS)
    y_partial += tl.load(facts + Y_PARTIAL)
    mine = y_partial + chunk * m + row
    for c in tl.static_range(4):
        tl.store(mine + c * chunks * m, _times(delta, q, c * all_columns, column, n), mask=row < end)
    if STATISTICS:
        stats += 2 * tl.load(item + 6)
        tl.store(stats, tl.sum(tl.sum(delta * delta, 1).to(tl.float64)))
        tl.store(stats + 1, tl.sum(tl.sum((delta != 0).to(tl.float32), 1).to(tl.float64)))
    tl.debug_barrier()  # every thread has stored its part
    counter = counters + tl.load(facts + COUNTER) + first // ROWS
    if tl.atomic_add(counter, 1, sem="acq_rel") == chunks - 1:
        some = tl.arange(0, MOST_CHUNKS)
        mask = (some < chunks)[:, None] & (row < end)[None, :]
        ready = y + tl.load(facts + Y) + row
        for c in tl.static_range(4):
            parts = y_partial + (c * chunks + some[:, None]) * m + row[None, :]
            tl.store(
                ready + c * all_rows,
                tl.sum(tl.load(parts, mask=mask, other=0.0, cache_modifier=".cg"), 0),
                mask=row < end,
            )
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release")  # chunks + 1: the rows are ready


@triton.jit
def _panel_transpose(
    weights, bases, facts, item, y, partial, counters, all_rows, n,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Compute a strip of the panel's part of D^T Y; the panel comes from the L2 cache."""
    weight, base, weight_stride, base_stride = _matrices(facts, weights, bases, ALIGNED)
    first, end = tl.load(item + 2), tl.load(item + 3)
    column = tl.load(item + 4) * STRIP + tl.arange(0, STRIP)
    y += tl.load(facts + Y)
    counters += tl.load(facts + COUNTER)
    ready = tl.load(facts + CHUNKS) + 1
    z0 = tl.zeros([STRIP], tl.float32)
    z1, z2, z3 = z0, z0, z0
    for start in range(first, end, ROWS):
        # its items have lower tickets, so they run or have run: this ends
        while tl.atomic_add(counters + start // ROWS, 0, sem="acquire") < ready:
            pass
        row = start + tl.arange(0, ROWS)
        w = _raw(weight, weight_stride, row, end, column, n)
        delta = _float(w) - _float(_raw(base, base_stride, row, end, column, n))
        here = row < end
        z0 += tl.sum(delta * tl.load(y + row, mask=here, other=0.0, cache_modifier=".cg")[:, None], 0)
        z1 += tl.sum(delta * tl.load(y + all_rows + row, mask=here, other=0.0, cache_modifier=".cg")[:, None], 0)
        z2 += tl.sum(delta * tl.load(y + 2 * all_rows + row, mask=here, other=0.0, cache_modifier=".cg")[:, None], 0)
        z3 += tl.sum(delta * tl.load(y + 3 * all_rows + row, mask=here, other=0.0, cache_modifier=".cg")[:, None], 0)
    partial += tl.load(item + 5)
    tl.store(partial + column, z0, mask=column < n)
    tl.store(partial + n + column, z1, mask=column < n)
    tl.store(partial + 2 * n + column, z2, mask=column < n)
    tl.store(partial + 3 * n + column, z3, mask=column < n)


@triton.jit
def _panel_kernel(
    weights, bases, modules, items, active, q, y, partial, stats, y_partial, counters, all_rows, all_columns,
    ALIGNED: tl.constexpr, STATISTICS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, STRIP: tl.constexpr, MOST_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Do the work of ``_rows_kernel`` for rows too long for one program. Panels of rows that fit into the L2 cache
    are multiplied by Q, then, from there, by Y. Programs take items in order by a ticket (the first counter).
    items [P, 7]: transpose?, module, first row, end, chunk or strip, partial Z, statistics."""
    item = items + tl.atomic_add(counters, 1, sem="relaxed") * 7
    module = tl.load(item + 1)
    if tl.load(active + module) == 0:
        return
    facts, m, n = _shape(modules, module, ALIGNED)
    if tl.load(item) == 0:
        _panel_times(
            weights, bases, facts, item, q, y, y_partial, stats, counters, all_rows, all_columns, m, n,
            ALIGNED, STATISTICS, ROWS, CHUNK, MOST_CHUNKS,
        )  # fmt: skip
    else:
        _panel_transpose(weights, bases, facts, item, y, partial, counters, all_rows, n, ALIGNED, ROWS, STRIP)


@triton.jit
def _sum_slots_kernel(modules, places, active, partial, z, all_columns, COLUMNS: tl.constexpr):
    """Set z = the partial Z added up, slot by slot. places [P, 2]: module, first column."""
    place = places + tl.program_id(0) * 2
    module = tl.load(place)
    if tl.load(active + module) == 0:
        return
    facts, _, n = _shape(modules, module, False)
    column = tl.load(place + 1) + tl.arange(0, COLUMNS)
    partial += tl.load(facts + PARTIAL)
    z += tl.load(facts + Q) + column
    slots = tl.load(facts + SLOTS)
    for c in tl.static_range(4):
        total = tl.zeros([COLUMNS], tl.float32)
        for slot in range(slots):
            total += tl.load(partial + (slot * 4 + c) * n + column, mask=column < n, other=0.0)
        tl.store(z + c * all_columns, total, mask=column < n)


@triton.jit
def _sum_stats_kernel(modules, stats, out, BLOCK: tl.constexpr):
    """Set out [modules, 2] = the partial statistics added up."""
    module = tl.program_id(0)
    facts = modules + module * WIDTH
    first, count = tl.load(facts + STATS), tl.load(facts + ITEMS)
    square = tl.zeros([BLOCK], tl.float64)
    changed = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        square += tl.load(stats + 2 * (first + i), mask=i < count, other=0.0)
        changed += tl.load(stats + 2 * (first + i) + 1, mask=i < count, other=0.0)
    tl.store(out + 2 * module, tl.sum(square))
    tl.store(out + 2 * module + 1, tl.sum(changed))


def stored(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix as the kernels take it: bfloat16 as its bits."""
    return matrix.view(torch.int16) if matrix.dtype == torch.bfloat16 else matrix


def places(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return [P, 2] of (module, first entry): every module's stretch in pieces of ``COLUMNS``."""
    rows = [(i, first) for i, length in enumerate(lengths) for first in range(0, length, COLUMNS)]
    return torch.tensor(rows, dtype=torch.int64, device=device)
