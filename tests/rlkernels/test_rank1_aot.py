"""The Triton kernels of the rank-1 solver compile for GPUs that are not here, with wide loads and next to no spills."""

import importlib.util

from support import lacks
from triton_aot import Kernel, compile_for

KERNELS, VECTORS, UPDATE = (f"rlkernels.rank1.triton_{part}:" for part in ("kernels", "vectors", "update"))
TABLES = {"modules": "*i64", "items": "*i64", "active": "*i1"}
SIZES = {"all_rows": "i32", "all_columns": "i32"}
READ = {**TABLES, "q": "*fp32", "y": "*fp32", "partial": "*fp32", "stats": "*fp64", **SIZES}
WORK = {**READ, "y_partial": "*fp32", "counters": "*i32"}
PLACES = {"modules": "*i64", "places": "*i64", "active": "*i1"}


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


def test_small_kernels_compile_ahead_of_time():
    if importlib.util.find_spec("triton") is None:
        lacks("triton")
    stretch = {"LENGTH": 4, "OFFSET": 6}
    dots = {"modules": "*i64", "active": "*i1", "x": "*fp32", "w": "*fp64", "out": "*fp64", "x_stride": "i32",
            "w_stride": "i32", "k": "i32"}  # fmt: skip
    combine = {**PLACES, "x": "*fp32", "coefficients": "*fp64", "w": "*fp64", "out": "*fp64", "x_stride": "i32",
               "w_stride": "i32", "k": "i32"}  # fmt: skip
    residual = {"modules": "*i64", "active": "*i1", "q": "*fp32", "z": "*fp32", "coordinates": "*fp64",
                "theta": "*fp64", "out": "*fp64", "all_columns": "i32", "k": "i32"}  # fmt: skip
    matvec = {"weight": "*i16", "base": "*fp32", "v": "*fp32", "out": "*fp32", "m": "i32", "n": "i32",
              "weight_stride": "i32", "base_stride": "i32"}  # fmt: skip
    add = {"u": "*fp32", "v": "*fp32", "m": "i32", "n": "i32", "stride": "i32", "scale": "fp32", "seed": "i64"}
    kernels = [
        Kernel(f"{VECTORS}_dots_kernel", dots, {**stretch, "BLOCK": 512}, num_warps=8),
        Kernel(f"{VECTORS}_combine_kernel", combine, {**stretch, "ADD": True, "WANTED": 4, "BLOCK": 1024}),
        Kernel(f"{VECTORS}_residual_kernel", residual, {"BLOCK": 1024}),
        Kernel(
            f"{KERNELS}_sum_slots_kernel",
            {**PLACES, "partial": "*fp32", "z": "*fp32", "all_columns": "i32"},
            {"COLUMNS": 1024},
        ),
        Kernel(f"{KERNELS}_sum_stats_kernel", {"modules": "*i64", "stats": "*fp64", "out": "*fp64"}, {"BLOCK": 256}),
        Kernel(
            f"{VECTORS}_start_kernel",
            {"modules": "*i64", "places": "*i64", "starts": "*fp32", "out": "*fp64", "all_columns": "i32",
             "seed": "i64"},
            {"COLUMNS": 1024},
        ),
        Kernel(f"{UPDATE}_matvec_kernel", matvec, {"ROWS": 4, "BLOCK": 1024}),
        *(
            Kernel(f"{UPDATE}_add_kernel", {"weight": weight, **add}, {"STOCHASTIC": weight != "*fp32", "ROWS": 4,
                                                                        "BLOCK": 1024})
            for weight in ("*i16", "*fp16", "*fp32")
        ),
    ]  # fmt: skip
    built = compile_for(kernels)
    assert len(built) == 2 * len(kernels) and all(b.stack_bytes == 0 for b in built), built
