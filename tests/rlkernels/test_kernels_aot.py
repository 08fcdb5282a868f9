"""Every large kernel, as it is launched, for GPUs that are not here: spills, tensor cores, wide copies, occupancy."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from aot_kernels import KERNELS, OTHER, cuda_kernels
from support import lacks
from triton_aot import TARGETS, compile_for

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
    "grouped attention": (1, 1), "merging": (16, 16), "writing": (12, 12), "sampling": (1, 1),
    "token log-probabilities, forward": (2, 2), "token log-probabilities, backward": (8, 8),
    "rank-1, rows": (1, 1), "rank-1, panels": (2, 2), "dtw": (23, 28),
}  # fmt: skip
# asynchronous matrix products want tiles of 64 rows at least: decoding has fewer
WGMMA = ("paged attention, prefill", "grouped attention")
COPIES = ("paged attention", "shared prefix", "grouped attention", "rank-1, rows")
# a program of dtw reads one number a row and step
NO_WIDE_ACCESS = ("dtw",)


@pytest.fixture(scope="module", params=["installed", "other"])
def built(request):
    """(name, what came out) of all kernels, by the triton that is installed and by another version of it."""
    if importlib.util.find_spec("triton") is None:
        lacks("triton")
    if request.param == "other" and not (Path(OTHER or os.devnull) / "triton").is_dir():
        lacks("a second triton: pip install --no-deps --target FOLDER triton==3.6.0, RLKERNELS_OTHER_TRITON=FOLDER")
    found = iter(compile_for(list(KERNELS.values()), triton=OTHER if request.param == "other" else ""))
    return [(name, next(found)) for name in KERNELS for _ in TARGETS]


def test_kernels_are_what_they_are_meant_to_be(built):
    for name, kernel in built:
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
    if importlib.util.find_spec("triton") is None:
        lacks("triton")
    kernels = [kernel for name, kernel in KERNELS.items() if not name.endswith("before Hopper")]
    assert all(kernel.blocks >= 1 for kernel in compile_for(kernels, [100]))


@pytest.mark.parametrize("arch", TARGETS)
def test_cuda_kernels_keep_their_rows_in_registers(arch):
    if shutil.which("nvcc") is None:
        lacks("nvcc")
    found = list(cuda_kernels("dtw.cu", arch, warps=4))
    assert len(found) == 12 and all(kernel.blocks >= 5 and kernel.stack_bytes == 0 for kernel in found), found
    for kernel in found:
        assert kernel.stack_bytes <= SPILLED.get((kernel.name, arch), 0), kernel
