"""Every large kernel, compiled for GPUs that are not here as it is launched: spills, tensor cores, copies, blocks."""

import importlib.util
import os
import shutil
from pathlib import Path

import aot_kernels as aot
import pytest
from aot_kernels import KERNELS, OTHER, TARGETS, Kernel, compile_for, cuda_kernels
from support import lacks

# bytes of stack that a kernel may have there: known, the larger number of the two tritons. The key kernel takes 32 on
# sm_90, and on an H100 half of the time that it takes without them, with eight warps. Heads of 128 are not the default
# with four warps on sm_80; heads of 64 are, and triton 3.6 alone spills there
SPILLED = {
    ("grouped attention, key, heads of 128", 90): 32,
    ("grouped attention, forward, heads of 128", 80): 72,
    ("grouped attention, query, heads of 128", 80): 16,
    ("grouped attention, key, heads of 128", 80): 48,
    ("paged attention, prefill, heads of 128", 80): 64,
    ("grouped attention, query, heads of 64", 80): 16,  # by triton 3.6
    ("grouped attention, key, heads of 64", 80): 40,  # by triton 3.6
    ("rank-1, rows of up to 4,096", 90): 64,  # by triton 3.7
}
# beginning of the name -> fewest programs on a multiprocessor of sm_80 and sm_90
BLOCKS = {
    "paged attention, decode": (3, 4), "paged attention, prefill": (1, 1), "shared prefix": (2, 3),
    "grouped attention": (1, 1), "merging": (16, 16), "writing": (12, 12), "sampling": (2, 2),
    "token log-probabilities, forward": (2, 2), "token log-probabilities, backward": (8, 8),
    "rank-1, rows": (1, 1), "rank-1, longer": (2, 2), "rank-1, step": (1, 1), "dtw": (23, 28),
}  # fmt: skip
# asynchronous matrix products want tiles of 64 rows at least: decoding has fewer
WGMMA = ("paged attention, prefill", "grouped attention")
COPIES = ("paged attention", "shared prefix", "grouped attention", "rank-1, rows", "rank-1, longer rows")
# a program of dtw reads one number a row and step; a step of rank-1 reads vectors of any length
NO_WIDE_ACCESS = ("dtw", "rank-1, step")
KIB = 1024
# kernels at other settings -> most bytes of stack on sm_80 and sm_90, and of shared memory
OTHER_SETTINGS: dict[str, tuple[Kernel, tuple[int, int], int]] = {
    **{f"paged attention, {name}": (kernel, (64, 0), 100 * KIB) for name, kernel in {
        "decode, group of 6": aot.attend(128, 16, group=6),
        "shared prefix": aot.attend(128, 128, causal=False, group=6),
        "heads of 80 in float16": aot.attend(80, 64, group=6, dtype="*fp16", warps=8),
        "heads of 256": aot.attend(256, 64, group=6, block_n=32, warps=8),
        "float32": aot.attend(128, 16, group=6, block_n=32, dtype="*fp32", warps=8),
    }.items()},
    "merging heads of 80": (aot.merge(80), (0, 0), 100 * KIB),
    "writing float32 into bfloat16": (aot.write(80, "*fp32", aligned_strides=False), (0, 0), 100 * KIB),
    "dtw in a band": (aot.dtw(False, band=True), (0, 0), 100 * KIB),
    "dtw of any number of features": (aot.dtw(True, rows=64, dims=None), (0, 0), 100 * KIB),
    "sampling, one token": (aot.sample(True, one_token=True), (0, 0), 100 * KIB),
    **{f"log-probabilities {part}, one token": (aot.logprobs(part, one_token=True), (0, 0), 100 * KIB)
       for part in ("forward", "backward")},
    "rank-1, rows with statistics": (aot.rank1("rows", statistics=True), (64, 64), 160 * KIB),
    "rank-1, rows of float32": (aot.rank1("rows", "*fp32", "*fp32", stages=2), (128, 128), 160 * KIB),
    "rank-1, rows of float16": (aot.rank1("rows", "*fp16", statistics=True, wide=1024), (128, 128), 160 * KIB),
    "rank-1, longer rows with statistics": (aot.rank1("times", statistics=True), (0, 0), 99 * KIB),
    "rank-1, longer rows of float32": (aot.rank1("times", "*fp32"), (0, 0), 99 * KIB),
    "rank-1, longer rows of float32, transpose": (aot.rank1("transpose", "*fp32"), (0, 0), 99 * KIB),
    "rank-1, unaligned rows": (aot.rank1("rows", statistics=True, aligned=False), (384, 384), 99 * KIB),
    **{f"rank-1, unaligned longer rows, {part}": (aot.rank1(part, statistics=True, aligned=False), (0, 0), 99 * KIB)
       for part in ("times", "transpose")},
    "rank-1, step of 32 columns": (aot.rank1_step(32), (0, 0), 99 * KIB),
    "rank-1, step of 64 columns": (aot.rank1_step(64), (512, 512), 99 * KIB),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def triton():
    if importlib.util.find_spec("triton") is None:
        lacks("triton")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["installed", "other"])
def test_kernels_are_what_they_are_meant_to_be(compiler):
    """By the triton that is installed, and by another version of it. ``tests/ptx`` runs what they compile to."""
    if compiler == "other" and not (Path(OTHER or os.devnull) / "triton").is_dir():
        lacks("a second triton: pip install --no-deps --target FOLDER triton==3.6.0, RLKERNELS_OTHER_TRITON=FOLDER")
    found = iter(compile_for(list(KERNELS.values()), TARGETS, triton=OTHER if compiler == "other" else ""))
    for name, kernel in ((name, next(found)) for name in KERNELS for _ in TARGETS):
        assert kernel.stack_bytes <= SPILLED.get((name, kernel.arch), 0), (name, kernel)
        (fewest,) = (counts for beginning, counts in BLOCKS.items() if name.startswith(beginning))
        assert kernel.blocks >= fewest[TARGETS.index(kernel.arch)], (name, kernel)
        tensor_cores = "attention" in name or "prefix" in name
        assert (kernel.wgmma + kernel.mma > 0) == tensor_cores, (name, kernel)
        assert (kernel.wgmma > 0) == (kernel.arch >= 90 and name.startswith(WGMMA)), (name, kernel)
        assert (kernel.wide_copies > 0) == name.startswith(COPIES), (name, kernel)
        assert kernel.wide_copies + kernel.wide_loads > 0 or name.startswith(NO_WIDE_ACCESS), (name, kernel)


@pytest.mark.slow
def test_kernels_compile_for_blackwell():
    kernels = [kernel for name, kernel in KERNELS.items() if not name.endswith("before Hopper")]
    assert all(kernel.blocks >= 1 for kernel in compile_for(kernels, [100]))


@pytest.mark.slow
def test_other_settings_compile():
    """Odd heads and dtypes, a vocabulary of one token, rows that are not aligned."""
    built = iter(compile_for([kernel for kernel, *_ in OTHER_SETTINGS.values()]))
    for name, (_, stack, shared) in OTHER_SETTINGS.items():
        for most in stack:
            kernel = next(built)
            assert kernel.stack_bytes <= most and kernel.shared_bytes <= shared, (name, kernel)
            # a block of rows arrives by asynchronous copies to shared memory: had the loads not been seen to be
            # aligned, none
            copies = name.startswith("rank-1, rows")
            assert not copies or kernel.shared_bytes >= 32 * KIB, (name, kernel)


@pytest.mark.slow
def test_rows_fit_gpus_with_little_shared_memory():
    """99 KiB for a program on an A10, L4 or RTX; an A100 has 163 KiB, for which nothing is cut down."""
    from rlkernels.rank1.layout import Tiling

    small, large, kernels = 99 * KIB, 163 * KIB, []
    sizes = {"*i16": 2, "*fp32": 4}
    for weight, base in (("*i16", "*i16"), ("*fp32", "*i16"), ("*fp32", "*fp32")):
        for wide in (2048, 4096):
            row_bytes = wide * (sizes[weight] + sizes[base])
            assert Tiling().block(row_bytes, large) == (4, 3 if 4 * row_bytes <= 2**16 else 2)
            held, stages = Tiling().block(row_bytes, small)
            kernels.append(aot.rank1("rows", weight, base, statistics=True, wide=wide, held=held, stages=stages))
    built = compile_for(kernels, targets=[80])
    assert len(built) == 6 and all(32 * KIB <= b.shared_bytes <= small for b in built), built


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_cuda_kernels_keep_their_rows_in_registers(arch):
    if shutil.which("nvcc") is None:
        lacks("nvcc")
    found = list(cuda_kernels("dtw.cu", arch, warps=4))
    assert len(found) == 14 and all(kernel.blocks >= 5 and kernel.stack_bytes == 0 for kernel in found), found
