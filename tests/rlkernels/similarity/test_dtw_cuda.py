"""The warp algorithm of the CUDA kernel, run lane by lane on the host."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support import lacks

from rlkernels.similarity import reference

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def warp(tmp_path_factory):
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        lacks("a C++ compiler")
    target = tmp_path_factory.mktemp("warp") / "dtw_warp.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{ROOT / 'csrc/include'}"]
    subprocess.run([*command, str(Path(__file__).with_name("dtw_warp.cpp")), "-o", str(target)], check=True)
    function = ctypes.CDLL(str(target)).dtw_warp
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int] * 6 + [ctypes.c_void_p] * 3
    function.restype = None

    def run(x, y, radius, rows_per_lane, subsequence):
        cost, place = torch.zeros(1), torch.zeros(2, dtype=torch.int32)
        dims = x.shape[1] if x.ndim == 2 else 1
        sizes = (len(x), len(y), dims, radius, rows_per_lane, int(subsequence))
        function(x.data_ptr(), y.data_ptr(), *sizes, cost.data_ptr(), place.data_ptr(), place.data_ptr() + 4)
        return (cost.item(), *place.tolist())

    return run


# K = 2: strips of 64 rows; K = 8: of 256
@pytest.mark.parametrize("rows_per_lane", [2, 8])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 40), (40, 1), (63, 65), (130, 97), (97, 260), (520, 530)])
@pytest.mark.parametrize("dims", [1, 3])
def test_warp_equals_reference(warp, rows_per_lane, rows, columns, dims):
    shape = [dims] if dims > 1 else []
    x, y = torch.randint(0, 4, (rows, *shape)).float(), torch.randint(0, 4, (columns, *shape)).float()
    for band in (None, 0, 5, 70):
        radius = 2**31 - 1 if band is None else max(band, abs(rows - columns))
        ours = warp(x, y, radius, rows_per_lane, False)[0]
        assert ours == reference.dtw(x[None], y[None], band=band).item(), band
    expected = reference.dtw(x[None], y[None], mode="subsequence")
    assert warp(x, y, 2**31 - 1, rows_per_lane, True) == tuple(t.item() for t in expected)
