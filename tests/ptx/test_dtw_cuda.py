"""The twelve kernels of csrc/cuda/dtw.cu, as nvcc compiles them, against plain torch."""

import ctypes
import functools
import re

import pytest
import torch
from support import lacks

from ptx.gpu import Gpu, compile_cuda, has_nvcc
from ptx.program import entries
from rlkernels.similarity import reference

NO_BAND = 1 << 40
POINTERS, SIZES = ("x", "y", "x_lengths", "y_lengths"), ("n", "m", "rows", "columns", "dims", "radius")


class Problem(ctypes.Structure):
    """``DtwProblem`` of csrc/include/dtw_cuda.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS), *((name, ctypes.c_int64) for name in SIZES),
        ("subsequence", ctypes.c_bool), *((name, ctypes.c_void_p) for name in ("cost", "start", "end", "scratch")),
    ]  # fmt: skip


@functools.cache
def compiled(arch):
    if not has_nvcc():
        lacks("nvcc")
    return compile_cuda("dtw.cu", arch)


def run(arch, x, y, x_lengths, y_lengths, band, subsequence, warps=5, change=lambda ptx: ptx):
    """As ``dtw`` of csrc/cuda launches it, by ``warps`` warps -> the kernel's name, cost, start and end."""
    (n, rows, dims), (m, columns) = x.shape, y.shape[:2]
    radius = NO_BAND if band is None else band
    per_lane = 4 if dims > 1 else 2 if rows <= 64 else 4 if rows <= 128 else 8
    flags = (dims == 1, not subsequence and (radius < rows or radius < columns), subsequence)
    pattern = f"dtw_kernelILi{per_lane}E" + "".join(f"Lb{int(flag)}E" for flag in flags)
    (entry,) = (name for name in entries(compiled(arch)) if re.search(pattern, name))
    with Gpu(arch, change=change) as gpu:
        border = warps * columns * (2 if subsequence else 1) if rows > 32 * per_lane else 0
        scratch, cost = torch.empty(border), torch.full((n, m), -7.0)
        start, end = torch.empty(2, n, m, dtype=torch.int64)
        tensors = dict(zip((*POINTERS, "cost", "start", "end", "scratch"),
                           (x, y, x_lengths, y_lengths, cost, start, end, scratch)))  # fmt: skip
        for tensor in tensors.values():
            gpu.pointer(tensor)
        problem = Problem(**{name: t.data_ptr() for name, t in tensors.items()}, n=n, m=m, rows=rows, columns=columns,
                          dims=dims, radius=radius, subsequence=subsequence)  # fmt: skip
        gpu.run(compiled(arch), entry, [bytes(problem), warps.to_bytes(8, "little")], (-(-warps // 4),), 128)
    return entry, cost, start, end


# up to 64 rows: two a lane; up to 128: four; above, and so in several strips: eight; several features: four
QUICK = [(40, 7, 1), (65, 6, 1), (257, 6, 1), (130, 6, 2)]
SHAPES = [
    *QUICK,
    (1, 1, 1),
    (63, 3, 1),
    (65, 40, 1),
    (128, 17, 1),
    (130, 97, 1),
    (257, 60, 1),
    (20, 31, 3),
    (130, 40, 2),
]


def check(arch, rows, columns, dims):
    """More pairs than warps, an empty trajectory, shorter ones; whole numbers, for which all orders of sums agree."""
    x, y = torch.randint(0, 4, (3, rows, dims)).float(), torch.randint(0, 4, (3, columns, dims)).float()
    x_lengths, y_lengths = torch.tensor([rows, max(1, rows - 9), 0]), torch.tensor([columns, max(1, columns - 5), 1])
    ran = set()
    for band, subsequence in ((None, False), (rows % 5, False), (None, True)):
        name, cost, *places = run(arch, x, y, x_lengths, y_lengths, band, subsequence)
        ran.add(name)
        for i in range(2):
            for j in range(3):
                pair = x[i : i + 1, : x_lengths[i]], y[j : j + 1, : y_lengths[j]]
                mode = "subsequence" if subsequence else "full"
                wanted = reference.dtw(*pair, mode=mode, **({} if subsequence else {"band": band}))
                found = [t[i, j] for t in (cost, *places)] if subsequence else [cost[i, j]]
                assert found == [t.squeeze() for t in (wanted if subsequence else [wanted])], (band, mode, i, j)
        assert (cost[2] == -7).all()  # nobody asks for an empty trajectory
    return ran


@pytest.mark.parametrize(("arch", "shapes"), [
    (90, QUICK), *(pytest.param(arch, SHAPES, marks=pytest.mark.slow) for arch in (80, 90))
], ids=str)  # fmt: skip
def test_every_kernel_equals_plain_torch(arch, shapes):
    ran = set().union(*(check(arch, *shape) for shape in shapes))
    assert ran == set(entries(compiled(arch))) and len(ran) == 12
