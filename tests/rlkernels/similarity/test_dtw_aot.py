"""The Triton kernel compiled for GPUs that are not here."""

import importlib.util

from support import lacks
from triton_aot import Kernel, compile_for

SIGNATURE = {
    **dict.fromkeys(["x", "y", "cost", "border"], "*fp32"),
    **dict.fromkeys(["x_lengths", "y_lengths", "start", "end"], "*i64"),
    "border_start": "*i32",
    **dict.fromkeys(["pairs", "m", "columns", "x_stride", "y_stride", "radius", "dims"], "i32"),
}


def test_compiles_ahead_of_time():
    if importlib.util.find_spec("triton") is None:
        lacks("triton")
    kernels = [
        Kernel(
            "rlkernels.similarity.triton_kernels:_dtw_kernel",
            {name: kind for name, kind in SIGNATURE.items() if name not in constants},
            {**constants, "ROWS": rows, "BAND": band, "SUBSEQUENCE": subsequence},
            varying=["pairs", "m", "columns"],
            num_warps=1,
        )
        for constants, rows, band, subsequence in [({"dims": 1}, 128, True, False), ({}, 64, False, True)]
    ]
    assert all(built.stack_bytes == 0 for built in compile_for(kernels))
