"""The kernels of csrc/cuda/dtw.cu, as nvcc compiles them, against plain torch."""

import ctypes
import functools
import re
import shutil
from itertools import product

import pytest
import torch
from support import lacks

from ptx.gpu import Gpu
from ptx.program import entries
from rlkernels.proof.compiled import compile_cuda
from rlkernels.similarity import reference

NO_BAND = 1 << 40
POINTERS, SIZES = ("x", "y", "x_lengths", "y_lengths"), ("n", "m", "rows", "columns", "radius")


class Problem(ctypes.Structure):
    """``DtwProblem`` of csrc/include/dtw_cuda.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS), *((name, ctypes.c_int64) for name in SIZES),
        ("dims", ctypes.c_int), ("subsequence", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("cost", "start", "end", "scratch", "pairs")), ("count", ctypes.c_int64),
    ]  # fmt: skip


@functools.cache
def compiled(arch):
    if shutil.which("nvcc") is None:
        lacks("nvcc")
    return compile_cuda("dtw.cu", arch)


def launch(arch, tensors, radius, subsequence, kernels):
    """Launch kernels, named by patterns, as (pattern, last argument, blocks) -> what ran them, by their whole names."""
    (n, rows, dims), (m, columns) = tensors["x"].shape, tensors["y"].shape[:2]
    count = tensors["pairs"].numel() if "pairs" in tensors else n * m
    ran = {}
    with Gpu(arch) as gpu:
        for tensor in tensors.values():
            gpu.pointer(tensor)
        gpu.memory.know(tensors["scratch"], written=False)
        problem = Problem(**{name: t.data_ptr() for name, t in tensors.items()}, n=n, m=m, rows=rows, columns=columns,
                          dims=dims, radius=radius, subsequence=subsequence, count=count)  # fmt: skip
        for pattern, last, blocks in kernels:
            entry = entry_of(arch, pattern)
            ran[entry] = gpu.run(compiled(arch), entry, [bytes(problem), last.to_bytes(8, "little")], (blocks,), 128)
    return ran


def entry_of(arch, pattern):
    (entry,) = (name for name in entries(compiled(arch)) if re.search(pattern, name))
    return entry


def rows_per_lane(rows, dims):
    return 4 if dims > 1 else 2 if rows <= 64 else 4 if rows <= 128 else 8


def pattern_of(rows, columns, dims, radius, subsequence):
    """The kernel that ``pick`` of csrc/cuda takes."""
    flags = (dims == 1, not subsequence and (radius < rows or radius < columns), subsequence)
    return f"dtw_kernelILi{rows_per_lane(rows, dims)}E" + "".join(f"Lb{int(flag)}E" for flag in flags)


def run(arch, x, y, x_lengths, y_lengths, band, subsequence, *, warps=5, cost=None, pairs=None):
    """As ``dtw`` of csrc/cuda launches it, by ``warps`` warps -> what ran it, by its name; cost, start and end."""
    (n, rows, dims), (m, columns) = x.shape, y.shape[:2]
    radius = NO_BAND if band is None else band
    pattern = pattern_of(rows, columns, dims, radius, subsequence)
    border = warps * columns * (2 if subsequence else 1) if rows > 32 * rows_per_lane(rows, dims) else 0
    cost = torch.full((n, m), -7.0) if cost is None else cost
    start, end = torch.empty(2, n, m, dtype=torch.int64)
    tensors = dict(zip((*POINTERS, "cost", "start", "end", "scratch"),
                       (x, y, x_lengths, y_lengths, cost, start, end, torch.empty(border))))  # fmt: skip
    if pairs is not None:
        tensors["pairs"] = pairs
    return launch(arch, tensors, radius, subsequence, [(pattern, warps, -(-warps // 4))]), cost, start, end


def lower_bounds(arch, x, y, x_lengths, y_lengths, band):
    """As ``dtw_bounds`` of csrc/cuda launches them -> the kernels' names and bounds [N, M]."""
    (n, rows, dims), (m, columns) = x.shape, y.shape[:2]
    radius = NO_BAND if band is None else band
    windows = columns if radius < rows or radius < columns else 0
    bounds, boxes = torch.full((n, m), -7.0), torch.empty(n, 2, windows + 1, dims)
    tensors = dict(zip((*POINTERS, "cost", "scratch"), (x, y, x_lengths, y_lengths, bounds, boxes)))
    names = launch(arch, tensors, radius, False, [("box_kernel", windows, n), ("bound_kernel", windows, 2)])
    return names, bounds


# up to 64 rows: two a lane; up to 128: four; above, and so in several strips: eight; several features: four
QUICK = [(40, 7, 1), (65, 6, 1), (257, 6, 1), (130, 6, 2)]
SHAPES = [*QUICK, (1, 1, 1), (63, 3, 1), (65, 40, 1), (128, 17, 1), (130, 97, 1), (257, 60, 1), (20, 31, 3),
          (130, 40, 2)]  # fmt: skip


def check(arch, rows, columns, dims):
    """More pairs than warps, an empty trajectory, shorter ones; whole numbers, for which all orders of sums agree."""
    x, y = torch.randint(0, 4, (3, rows, dims)).float(), torch.randint(0, 4, (3, columns, dims)).float()
    x_lengths, y_lengths = torch.tensor([rows, max(1, rows - 9), 0]), torch.tensor([columns, max(1, columns - 5), 1])
    ran = set()
    for band, subsequence in ((None, False), (rows % 5, False), (None, True)):
        kernels, cost, *places = run(arch, x, y, x_lengths, y_lengths, band, subsequence)
        ran |= kernels.keys()
        for i in range(2):
            for j in range(3):
                pair = x[i : i + 1, : x_lengths[i]], y[j : j + 1, : y_lengths[j]]
                mode = "subsequence" if subsequence else "full"
                expected = reference.dtw(*pair, mode=mode, **({} if subsequence else {"band": band}))
                actual = [t[i, j] for t in (cost, *places)] if subsequence else [cost[i, j]]
                assert actual == [t.squeeze() for t in (expected if subsequence else [expected])], (band, mode, i, j)
        assert (cost[2] == -7).all()  # nobody asks for an empty trajectory
    return ran


@pytest.mark.parametrize(("arch", "shapes"), [
    (90, QUICK), *(pytest.param(arch, SHAPES, marks=pytest.mark.slow) for arch in (80, 90))
], ids=str)  # fmt: skip
def test_every_kernel_equals_plain_torch(arch, shapes):
    ran = set().union(*(check(arch, *shape) for shape in shapes))
    assert ran == {name for name in entries(compiled(arch)) if "dtw_kernel" in name} and len(ran) == 12


def bound_of(x, y, band):
    """Both ends of x [L, D] and y [K, D], and how far the other y lie from the box of the x within their band."""
    ends = [(x[0] - y[0]).square().sum(), (x[-1] - y[-1]).square().sum()]
    wide = band is None or abs(len(x) - len(y)) > band
    boxes = [x if wide else x[max(0, j - band) : j + band + 1] for j in range(1, len(y) - 1)]
    outside = [(v - v.clamp(box.amin(0), box.amax(0))).square().sum() for v, box in zip(y[1:-1], boxes)]
    return sum((ends if len(x) + len(y) > 2 else ends[:1]) + outside)


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rows", "columns", "dims"), [
    (1, 1, 1), (1, 5, 1), (70, 3, 1), (3, 70, 1), (40, 44, 1), (9, 7, 35)
])  # fmt: skip
def test_bounds_are_below_the_costs(arch, rows, columns, dims):
    """More pairs than warps, an empty trajectory, shorter ones, costs from the smallest to the largest of float32."""
    torch.manual_seed(0)
    x, y = torch.randn(3, rows, dims), torch.randn(5, columns, dims) + 1
    x_lengths = torch.tensor([rows, max(1, rows - 4), 0])
    y_lengths = torch.tensor([columns, max(1, columns - 3), columns, columns, 1])
    y[2], x[:, 0] = x[0].mean(), 1
    y[3, 0] = 1
    for size in (1e-22, 1.0, 3e18, 3e38):
        scaled = (x * size).clamp(-3e38, 3e38), (y * size).clamp(-3e38, 3e38)
        for band in (None, 0, 2, max(rows, columns)):
            names, bounds = lower_bounds(arch, *scaled, x_lengths, y_lengths, band)
            assert len(names) == 2 and (bounds[2] == -7).all()
            settings = {"x_lengths": x_lengths, "y_lengths": y_lengths, "band": band}
            exact = reference.dtw(*(t.double() for t in scaled), **settings)[:2]
            _, costs, *_ = run(arch, *scaled, x_lengths, y_lengths, band, False)
            assert (bounds[:2] >= 0).all() and (bounds[:2] <= costs[:2]).all() and (bounds[:2].double() <= exact).all()
            for i, j in product(range(2), range(5)) if size == 1 else ():
                pair = scaled[0][i, : x_lengths[i]].double(), scaled[1][j, : y_lengths[j]].double()
                torch.testing.assert_close(bounds[i, j].double(), bound_of(*pair, band), rtol=1e-3, atol=0)


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rows", "dims"), [(9, 1), (70, 1), (260, 1), (6, 3)])
def test_listed_pairs_have_the_costs_of_all_pairs(arch, rows, dims):
    torch.manual_seed(0)
    x, y, x_lengths = torch.randn(3, rows, dims), torch.randn(4, 5, dims), torch.tensor([rows, 0, rows - 2])
    series = x, y, x_lengths, torch.tensor([5, 4, 0, 3])
    for band in (None, 1):
        ran, expected, *_ = run(arch, *series, band, False)
        for pairs in ([], [-1, -1], [11, 4, 0, 2, 3, -1, -1]):
            listed = torch.full((3, 4), -7.0)
            listing = torch.tensor(pairs, dtype=torch.int64)
            same, *_ = run(arch, *series, band, False, warps=2, cost=listed, pairs=listing)
            assert same.keys() == ran.keys()
            assert all(listed.flatten()[i] == (expected.flatten()[i] if i in pairs else -7) for i in range(12))
