"""The Triton kernels of the rank-1 solver compile for GPUs that are not here, with wide loads and next to no spills."""

import importlib.util

from support import lacks
from triton_aot import Kernel, compile_for

KERNELS = "rlkernels.rank1.triton_kernels:"
TABLES = {"modules": "*i64", "items": "*i64", "active": "*i1"}
SIZES = {"all_rows": "i32", "all_columns": "i32"}
READ = {**TABLES, "q": "*fp32", "y": "*fp32", "partial": "*fp32", "stats": "*fp64", **SIZES}
WORK = {**READ, "y_partial": "*fp32", "counters": "*i32"}


def rows(weight: str, base: str, stages: int, statistics: bool, wide: int = 4096, held: int = 4,
         aligned: bool = True) -> Kernel:  # fmt: skip
    constants = {"ALIGNED": aligned, "STATISTICS": statistics, "ROWS": held, "WIDE": wide, "STAGES": stages}
    return Kernel(f"{KERNELS}_rows_kernel", {"weights": weight, "bases": base, **READ}, constants,
                  num_warps=wide // 256)  # fmt: skip


def panel(statistics: bool, weight: str = "*i16", aligned: bool = True) -> Kernel:
    constants = {"ALIGNED": aligned, "STATISTICS": statistics, "ROWS": 16, "CHUNK": 1024, "STRIP": 256,
                 "MOST_CHUNKS": 32}  # fmt: skip
    return Kernel(f"{KERNELS}_panel_kernel", {"weights": weight, "bases": "*i16", **WORK}, constants)


def test_reads_compile_ahead_of_time():
    if importlib.util.find_spec("triton") is None:
        lacks("triton")
    kernels = [rows("*i16", "*i16", 3, True), rows("*i16", "*i16", 3, False), rows("*fp32", "*fp32", 2, False),
               rows("*fp16", "*i16", 3, True, wide=1024), panel(True), panel(False, "*fp32")]  # fmt: skip
    built = compile_for(kernels)
    # a block of rows arrives by asynchronous copies to shared memory: had the loads not been seen to be aligned, none
    assert all(b.shared_bytes >= 32 * 1024 for b in built if "rows" in b.name), built
    assert all(b.shared_bytes <= 160 * 1024 and b.stack_bytes <= 128 for b in built), built
    assert all(b.stack_bytes <= 64 for b in built[:4]), built  # bfloat16


def test_rows_fit_gpus_with_little_shared_memory():
    """99 KiB for a program on an A10, L4 or RTX; an A100 has 163 KiB, for which nothing is cut down."""
    if importlib.util.find_spec("triton") is None:
        lacks("triton")
    from rlkernels.rank1.layout import Tiling

    small, large, kernels = 99 * 1024, 163 * 1024, []
    sizes = {"*i16": 2, "*fp32": 4}
    for weight, base in (("*i16", "*i16"), ("*fp32", "*i16"), ("*fp32", "*fp32")):
        for wide in (2048, 4096):
            row_bytes = wide * (sizes[weight] + sizes[base])
            assert Tiling().block(row_bytes, large) == (4, 3 if 4 * row_bytes <= 2**16 else 2)
            held, stages = Tiling().block(row_bytes, small)
            kernels.append(rows(weight, base, stages, True, wide, held))
    built = compile_for(kernels, targets=[80])
    assert len(built) == 6 and all(32 * 1024 <= b.shared_bytes <= small for b in built), built


def test_unaligned_matrices_compile_ahead_of_time():
    if importlib.util.find_spec("triton") is None:
        lacks("triton")
    built = compile_for([rows("*i16", "*i16", 3, True, aligned=False), panel(True, aligned=False)])
    assert len(built) == 4 and all(b.shared_bytes <= 99 * 1024 and b.stack_bytes <= 384 for b in built), built
