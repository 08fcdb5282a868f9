"""What the compilers make of every large kernel, as it is launched: spills, tensor cores, copies, blocks. As a table:

PYTHONPATH=.:tests python -m ptx.test_resources           # for sm_80 and sm_90; needs no GPU
PYTHONPATH=FOLDER:.:tests python -m ptx.test_resources    # by the triton in that folder
"""

import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from support import lacks

from ptx import test_kernels as run
from ptx.gpu import SHARED_KIB, Gpu, Launch
from ptx.test_kernels import BF16, CASES, Kernel, compiled, expected, launches_of, named  # noqa: F401
from rlkernels.proof.compiled import NVCC_FLAGS, ROOT

Case = Callable[[Gpu], None]
TARGETS = (80, 90)  # sm_80 (A100), sm_90 (H100, H200)
SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024}  # of a multiprocessor
OTHER_TARGETS = (86, 89, 100, 120)  # A10 and RTX 30, L4 and RTX 40, B200, RTX 50
CUDA_PROPERTIES = re.compile(r"(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)

# in the machine code: what Built counts
INSTRUCTIONS = {
    "wgmma": r"\bHGMMA\.",
    "mma": r"\bHMMA\.",
    "wide_copies": r"\bLDGSTS\.\S*128\b",
    "wide_loads": r"\bLDG\.\S*128\b",
}


# ptxas spills up to so many bytes for one program more on a multiprocessor. Launches that avoid it have another price:
# half of the keys leave warps idle at heads of 256, a single stage waits for every load
TRADED = 32


@dataclass(frozen=True)
class Built:
    """What came out.

    Attributes:
        stack_bytes: per thread; above 0 means that registers were spilled.
        blocks: how many programs fit on a multiprocessor.
        wgmma, mma: asynchronous matrix products of sm_90 in the machine code, and those of one warp.
        wide_copies: asynchronous copies of 16 bytes from global to shared memory.
        wide_loads: loads of 16 bytes from global memory.
    """

    name: str
    arch: int
    warps: int
    shared_bytes: int
    registers: int
    stack_bytes: int
    wgmma: int = 0
    mma: int = 0
    wide_copies: int = 0
    wide_loads: int = 0

    @property
    def blocks(self) -> int:
        """By the registers (in pieces of 256 a warp), shared memory (1 KiB a block is the system's) and threads."""
        by_memory = SHARED_BYTES[self.arch] // (self.shared_bytes + 1024)
        return min(programs(self.registers, self.warps), by_memory, 64 // self.warps, 32)

    @property
    def keeps_registers(self) -> bool:
        """Whether nothing is spilled but a few registers without which one program more fits on a multiprocessor."""
        kept = programs(self.registers + self.stack_bytes // 4, self.warps)
        return self.stack_bytes == 0 or (self.stack_bytes <= TRADED and kept < programs(self.registers, self.warps))


def programs(registers: int, warps: int) -> int:
    """How many programs the registers of a multiprocessor hold."""
    return 65536 // (-(-registers * 32 // 256) * 256) // warps


@cache
def listing(cubin: bytes, *options: str) -> str:
    """What the cuobjdump that comes with Triton prints."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True)
    return printed.stdout + printed.stderr


def resources(name: str, launch: Launch, arch: int, **counts: int) -> Built:
    """Read registers and stack."""
    built = launch.built
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", listing(built.asm["cubin"], "-res-usage")))
    return Built(name, arch, built.metadata.num_warps, built.metadata.shared, int(usage["REG"]), int(usage["STACK"]),
                 **counts)  # fmt: skip


def measure(name: str, launch: Launch, arch: int) -> Built:
    """Read registers, stack and machine code."""
    code = listing(launch.built.asm["cubin"], "-sass")
    counts = {name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()}
    return resources(name, launch, arch, **counts)


def launched(case: Case, arch: int) -> list[Launch]:
    """What a case launches there, compiled and not run."""
    with Gpu(arch, execute=False) as gpu:
        case(gpu)
    for launch in gpu.launches:
        never_special = {parameter.name for parameter in launch.kernel.params if parameter.do_not_specialize}
        assert never_special >= VARYING.get(launch.kernel.__name__, set()), f"they vary: {launch.kernel}"
    return gpu.launches


def large(case: str, arch: int) -> list[Built]:
    """The large kernels that a case launches there."""
    builds = {id(launch.built): launch for launch in launched(CASES[case][0], arch)}
    measurements = [measure(name, launch, arch) for launch in builds.values() if (name := named(launch))]
    assert {kernel.name for kernel in measurements} == expected(case, arch)
    return measurements


def cuda_name(source: str, mangled: str) -> str:
    rows, *chosen = re.findall(r"L[ib](\d+)E", mangled) or [""]
    flags = [flag for flag, on in zip(("one feature", "band", "subsequence"), chosen) if on == "1"]
    subject = f"{rows} rows a lane" if rows else "bounds" if "bound_kernel" in mangled else "boxes"
    return ", ".join([f"{source.removesuffix('.cu')} in CUDA, {subject}", *flags])


def cuda_kernels(source: str, arch: int, warps: int) -> Iterator[Built]:
    """What nvcc makes of the kernels of a file in csrc/cuda."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", *NVCC_FLAGS, "-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", str(ROOT / "csrc/cuda" / source),
                   "-o", str(Path(folder) / "out.cubin")]  # fmt: skip
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for part in report.split("Compiling entry function ")[1:]:
        match = CUDA_PROPERTIES.search(part)
        assert match, part
        shared = re.search(r"(\d+) bytes smem", part)
        name = cuda_name(source, part.split("'")[1])
        yield Built(name, arch, warps, int(shared[1]) if shared else 0, int(match[2]), int(match[1]))


def table(rows: dict[str, list[Built]]) -> str:
    """A Markdown table; a column holds the value of sm_80, then that of sm_90, where they differ."""
    columns = {"registers": "registers", "stack_bytes": "spilled bytes", "shared_bytes": "shared bytes",
               "blocks": "blocks per SM", "warps": "warps", "wgmma": "wgmma", "mma": "mma",
               "wide_copies": "16-byte copies", "wide_loads": "16-byte loads"}  # fmt: skip
    lines = [f"| kernel | {' | '.join(columns.values())} |", f"| --- |{' --- |' * len(columns)}"]
    for name, built in rows.items():
        cells = (dict.fromkeys(f"{getattr(b, column):,}" for b in built) for column in columns)
        lines.append(f"| {name} | {' | '.join(' / '.join(cell) for cell in cells)} |")
    return "\n".join(lines)


# bytes of stack that a kernel may have there: known, the larger number of the two tritons. On sm_90 the key kernel
# spills outside its loops. It has no stack with eight warps, but an H100 takes twice as long; and none with half of the
# queries a step, but its loops issue 19 to 44 % more instructions
SPILLED = {
    ("grouped attention, key, heads of 128", 90): 64,
    ("crossing tree attention, key, heads of 128", 90): 80,
    ("crossing tree attention, key, heads of 64", 80): 40,  # by triton 3.6
    ("paged attention, decode, heads of 64", 90): 8,  # by triton 3.6
    ("rank-1, rows of up to 4,096", 90): 64,  # by triton 3.7; its verdict holds for four rows at a time
}
# beginning of the name -> fewest programs on a multiprocessor of sm_80 and sm_90
BLOCKS = {
    "paged attention, decode": (3, 4), "paged attention, prefill": (1, 1), "shared prefix": (2, 3),
    "grouped attention, forward, heads of 64": (3, 3), "grouped attention, forward, heads of 128": (1, 3),
    "grouped attention, query": (1, 2), "grouped attention, key": (1, 2),
    "tree attention, forward, heads of 64": (3, 3), "tree attention, forward, heads of 128": (1, 2),
    "tree attention, query": (1, 2),
    "crossing tree attention, forward, heads of 64": (2, 4), "crossing tree attention, forward, heads of 128": (1, 2),
    "crossing tree attention, query, heads of 64": (2, 4), "crossing tree attention, query, heads of 128": (1, 2),
    "crossing tree attention, key": (1, 2),
    "sums": (8, 8), "merging": (16, 16), "writing": (12, 12), "sampling": (2, 2),
    "token log-probabilities, forward": (2, 2), "token log-probabilities, backward": (8, 8),
    "rank-1, rows": (1, 1), "rank-1, longer": (2, 2), "rank-1, step": (1, 1), "dtw": (23, 28),
}  # fmt: skip
# asynchronous matrix products want tiles of 64 rows at least: decoding has fewer
TRAINING = ("grouped attention", "tree attention", "crossing tree attention")
WGMMA = ("paged attention, prefill", *TRAINING)
COPIES = ("paged attention", "shared prefix", *TRAINING, "rank-1, rows", "rank-1, longer rows")
# a program of dtw reads one number a row and step; a step of rank-1 reads vectors of any length
NO_WIDE_ACCESS = ("dtw", "rank-1, step")
KIB = 1024
VARYING = {  # arguments that differ from launch to launch; specialising on one would compile the kernel again
    "_attend_kernel": {"sources", "part_rows", "table_width"}, "_merge_kernel": {"rows", "rest"},
    "_write_kernel": {"count", "total"}, "_step_kernel": {"k", "capacity", "rank", "least"},
    "_rows_kernel": {"first"}, "_times_kernel": {"first"}, "_transpose_kernel": {"first"},
    "_dtw_kernel": {"pairs", "m", "columns"},
}  # fmt: skip
F16, F32 = torch.float16, torch.float32
STATISTICS = {"STATISTICS": True}


def solving(shape: tuple[int, int], *dtypes: torch.dtype, passes: int = 2) -> Case:
    return partial(run.solve, shapes=[shape], dtypes=dtypes or (BF16, BF16), passes=passes)


# what runs, a kernel of it at other settings -> most bytes of stack on sm_80 and sm_90, and of shared memory
OTHER_SETTINGS: dict[str, tuple[Case, Kernel, tuple[int, int], int]] = {
    **{f"paged attention, {name}": (case, ("_attend_kernel", {"BLOCK_M": rows, "num_warps": warps}), (0, 0), 100 * KIB)
       for name, case, rows, warps in (
        ("decode, group of 6", lambda _: run.attend([530, 65], [1, 1], 128, group=6), 16, 4),
        ("shared prefix", lambda _: run.attend_shared(128, [(70, [20], [20])], group=6), 128, 8),
        ("heads of 80 in float16", lambda _: run.attend([530], [9], 80, group=6, dtype=F16), 64, 8),
        ("heads of 256", lambda _: run.attend([530], [9], 256, group=6), 64, 8),
        ("float32", lambda _: run.attend([530], [1], 128, group=6, dtype=F32), 16, 8),
    )},
    "merging heads of 80": (lambda _: run.attend([530], [9], 80), ("_merge_kernel", {"DIM": 80}), (0, 0), 100 * KIB),
    "writing float32 into bfloat16": (lambda _: run.write(80, F32, spare=1), ("_write_kernel", {"DIM": 80}), (0, 0),
                                      100 * KIB),
    "dtw in a band": (lambda _: run.warp(), ("_dtw_kernel", {"BAND": True}), (0, 0), 100 * KIB),
    "dtw of any number of features": (lambda _: run.warp(60, dims=3), ("_dtw_kernel", {"SUBSEQUENCE": True}), (0, 0),
                                      100 * KIB),
    "sampling, one token": (lambda _: run.sample(True, vocab=1), ("_sample_kernel", {"BLOCK": 128}), (0, 0), 100 * KIB),
    **{f"log-probabilities {part}, one token": (lambda _: run.score(vocab=1), (f"_{part}_kernel", {"BLOCK": 1}), (0, 0),
                                                100 * KIB) for part in ("forward", "backward")},
    "rank-1, rows with statistics": (solving((9, 4096)), ("_rows_kernel", STATISTICS), (0, 64), 160 * KIB),
    "rank-1, rows of float32": (solving((9, 4096), F32, F32), ("_rows_kernel", {}), (0, 128), 160 * KIB),
    "rank-1, rows of float16": (solving((9, 1024), F16, BF16), ("_rows_kernel", {"REGISTER_COLUMNS": 1024}), (128, 128),
                                160 * KIB),
    "rank-1, longer rows with statistics": (solving((17, 4112)), ("_times_kernel", STATISTICS), (0, 0), 99 * KIB),
    **{f"rank-1, longer rows of float32, {part}": (solving((17, 4112), F32, BF16), (f"_{part}_kernel", {}), (0, 0),
                                                   99 * KIB) for part in ("times", "transpose")},
    "rank-1, unaligned rows": (solving((9, 4095)), ("_rows_kernel", {"ALIGNED": False}), (0, 384), 99 * KIB),
    **{f"rank-1, unaligned longer rows, {part}": (solving((17, 4111)), (f"_{part}_kernel", {"ALIGNED": False}), (0, 0),
                                                  99 * KIB) for part in ("times", "transpose")},
    **{f"rank-1, step of {k} columns": (solving((9, 1024), passes=k // 4), ("_step_kernel", {"KP": k}), (stack, stack),
                                        99 * KIB) for k, stack in ((32, 0), (64, 512))},
}  # fmt: skip
# whole launches that are held to other cards than Hopper
VARIANTS: dict[str, Case] = {
    **{name: case for name, (case, *_) in OTHER_SETTINGS.items()},
    **{f"grouped attention, heads of {dim}": partial(lambda dim, _: run.train(dim), dim) for dim in (256, 512)},
    **{f"crossing tree attention, heads of {dim}": partial(lambda dim, _: run.train_tree(dim, "triton/crossing"), dim)
       for dim in (80, 256)},
    "tree attention, heads of 256": lambda _: run.train_tree(256, "triton"),
    "grouped attention in float16": lambda _: run.train(128, dtype=F16),
    "grouped attention in float32": lambda _: run.train(64, dtype=F32),
    "crossing tree attention in float32, heads of 32": lambda _: run.train_tree(32, "triton/crossing", F32),
    "paged attention, prefill in float32": lambda _: run.attend([150], [40], 64, dtype=F32),
    "paged attention, heads of 512": lambda _: run.attend([530], [1], 512),
    "sampling from float32": lambda _: run.sample(True, dtype=F32),
    "log-probabilities of float32": lambda _: run.score(dtype=F32),
    **{f"rank-1, {columns:,} columns in float32 and bfloat16": solving((9, columns), F32, BF16)
       for columns in (4096, 4095)},
    **{f"rank-1, {columns:,} columns of float32": solving((9, columns), F32, F32) for columns in (4095, 2047)},
    "rank-1, 1,024 columns": solving((9, 1024)),
}  # fmt: skip
# most bytes of stack of the step after eight passes, with matrices of 64 x 64 in float64; 16 warps leave 336 to 464
STEP_SPILLED = {80: 368, 86: 360, 100: 664, 120: 664}
VARIANT_TARGETS = tuple(STEP_SPILLED)  # sm_89 has the PTX and the registers of sm_86


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_what_they_are_meant_to_be(case, arch):
    for kernel in large(case, arch):
        name = kernel.name
        assert kernel.stack_bytes <= SPILLED.get((name, arch), 0), kernel
        (fewest,) = (counts for beginning, counts in BLOCKS.items() if name.startswith(beginning))
        assert kernel.blocks >= fewest[TARGETS.index(arch)], kernel
        tensor_cores = "attention" in name or "prefix" in name
        assert (kernel.wgmma + kernel.mma > 0) == tensor_cores, kernel
        assert (kernel.wgmma > 0) == (arch >= 90 and name.startswith(WGMMA)), kernel
        assert (kernel.wide_copies > 0) == name.startswith(COPIES), kernel
        assert kernel.wide_copies + kernel.wide_loads > 0 or name.startswith(NO_WIDE_ACCESS), kernel


@pytest.mark.slow
def test_kernels_of_another_triton_are_what_they_are_meant_to_be():
    run.by_another_triton(run.OTHERS[0], "-m", "slow", "-k", "test_kernels_are_what", __file__)


@pytest.mark.slow
@pytest.mark.parametrize("arch", OTHER_TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_kernels_fit_other_cards(case, arch):
    for launch in {id(launch.built): launch for launch in launched(CASES[case][0], arch)}.values():
        kernel = resources(launch.kernel.__name__, launch, arch)
        assert kernel.stack_bytes == 0, kernel
        assert kernel.shared_bytes <= SHARED_KIB[arch] * KIB, kernel


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_other_settings_compile(name, arch):
    """Odd heads and dtypes, a vocabulary of one token, rows that are not aligned."""
    case, kernel, stack, most_shared = OTHER_SETTINGS[name]
    measurements = [measure(name, launch, arch) for launch in launches_of(kernel, launched(case, arch))]
    assert measurements
    for built in measurements:
        assert built.stack_bytes <= stack[TARGETS.index(arch)] and built.shared_bytes <= most_shared, built
        # a block of rows arrives by asynchronous copies to shared memory: had the loads not been seen to be
        # aligned, none
        assert not name.startswith("rank-1, rows") or built.shared_bytes >= 32 * KIB, built


@pytest.mark.slow
@pytest.mark.parametrize("arch", VARIANT_TARGETS)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_fit_other_cards(name, arch):
    for launch in launched(VARIANTS[name], arch):
        kernel = resources(launch.kernel.__name__, launch, arch)
        assert kernel.shared_bytes <= SHARED_KIB[arch] * KIB, kernel
        if launch.constants.get("KP") == 64:
            assert kernel.stack_bytes <= STEP_SPILLED[arch], kernel
        else:
            assert kernel.keeps_registers, kernel


@pytest.mark.slow
@pytest.mark.parametrize("wide", [2048, 4096])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F32, BF16), (F32, F32)])
def test_rows_fit_gpus_with_little_shared_memory(dtypes, wide):
    """99 KiB for a program on an A10, L4 or RTX; an A100 has 163 KiB, for which nothing is cut down."""
    from rlkernels.rank1.layout import Tiling

    small, sizes = 99 * KIB, tuple(dtype.itemsize for dtype in dtypes)
    stages = 3 if 4 * wide * sum(sizes) <= 2**16 else 2
    uncut = (4, stages) if wide == 2048 else (2, stages) if sizes[0] == sizes[1] else (1, 3)
    for major, block in ((8, uncut), (9, (4, stages))):
        assert Tiling().block(wide, sizes, True, 163 * KIB, major) == block
    launches = launches_of(("_rows_kernel", {"REGISTER_COLUMNS": wide}), launched(solving((9, wide), *dtypes), 86))
    assert len(launches) == 2
    for launch in launches:
        kernel = measure("rows", launch, 86)
        assert 32 * KIB <= kernel.shared_bytes <= small and kernel.stack_bytes == 0, kernel


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_cuda_kernels_keep_their_rows_in_registers(arch):
    if shutil.which("nvcc") is None:
        lacks("nvcc")
    measurements = list(cuda_kernels("dtw.cu", arch, warps=4))
    assert len(measurements) == 14 and all(kernel.blocks >= 5 and kernel.stack_bytes == 0 for kernel in measurements), (
        measurements
    )


def main() -> None:
    warnings.simplefilter("ignore")
    rows: dict[str, dict[int, Built]] = {}
    for arch in TARGETS:
        kernels = [kernel for case in CASES for kernel in large(case, arch)]
        if shutil.which("nvcc"):
            kernels += cuda_kernels("dtw.cu", arch, warps=4)
        for kernel in kernels:
            rows.setdefault(kernel.name, {})[arch] = kernel
    print(table({name: list(built.values()) for name, built in rows.items()}))


if __name__ == "__main__":
    main()
