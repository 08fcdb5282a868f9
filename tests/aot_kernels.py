"""Every large Triton kernel as its launcher starts it on a GPU, and the CUDA kernels: what the compilers make of them.

python tests/aot_kernels.py                 # a table of all of them, for sm_80 and sm_90; needs no GPU
RLKERNELS_OTHER_TRITON=FOLDER python ...    # by the triton installed in that folder

Type errors, shared memory and registers show without a GPU. The compiler of Triton runs in a process of its own without
TRITON_INTERPRET, so this works in any test file.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TARGETS = (80, 90)  # sm_80 (A100), sm_90 (H100, H200)
SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # of a multiprocessor
ROOT = Path(__file__).parents[1]
# `pip install --no-deps --target FOLDER triton==3.6.0`; of several folders, joined as in PATH, the first is compiled by
OTHERS = os.environ.get("RLKERNELS_OTHER_TRITON", "").split(os.pathsep)
OTHER = OTHERS[0]
CUDA_PROPERTIES = re.compile(r"(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)

PAGED, GROUPED = "rlkernels.prefix_cache.triton_kernels:", "rlkernels.prefix_cache.triton_grouped:"
FLOATS = ("query", "key_cache", "value_cache", "out")
STRIDES = {
    f"{name}_{part}": "i32"
    for name, parts in (("query", ("token", "head")), *((n, ("block", "slot", "head")) for n in ("key", "value")))
    for part in parts
}
ATTEND = {
    **dict.fromkeys(FLOATS, "*bf16"), **dict.fromkeys(("tables", "lens", "bounds"), "*i32"), "lse": "*fp32",
    **dict.fromkeys(("sources", "heads", "part_rows", "split_keys", "table_width"), "i32"), "scale": "fp32", **STRIDES,
}  # fmt: skip
UNIT = dict.fromkeys(("query_dim", "key_dim", "value_dim"), 1)  # launches specialise on strides of 1
BACKWARD = ("grad", "delta")
ALL_SIZES = ("all_rows", "all_columns")  # of rank-1
# in the machine code: what Built counts
INSTRUCTIONS = {
    "wgmma": r"\bHGMMA\.",
    "mma": r"\bHMMA\.",
    "wide_copies": r"\bLDGSTS\.\S*128\b",
    "wide_loads": r"\bLDG\.\S*128\b",
}


@dataclass(frozen=True)
class Kernel:
    """What to compile.

    Attributes:
        name: ``"module:function"``; decorators such as ``triton.autotune`` are looked through.
        signature: type of every argument that is not constexpr: ``"*fp32"``, ``"*bf16"``, ``"i32"``, ``"fp32"``.
        constexprs: value of every constexpr argument.
        aligned: arguments known to be multiples of 16, besides pointers, which count as such in real launches.
        varying: arguments that differ from launch to launch; specialising on one would compile the kernel again.
    """

    name: str
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    aligned: Sequence[str] = ()
    varying: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = True


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
        by_registers = 65536 // (-(-self.registers * 32 // 256) * 256) // self.warps
        by_memory = SHARED_BYTES[self.arch] // (self.shared_bytes + 1024)
        return min(by_registers, by_memory, 64 // self.warps, 32)


def compile_for(kernels: Sequence[Kernel], targets: Sequence[int] = TARGETS, triton: str = "") -> list[Built]:
    """Compiles every kernel for every target. Fails with the compiler's message when one does not compile.
    ``triton``: a folder with another version of it."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([triton, str(ROOT), str(ROOT / "tests"), env.get("PYTHONPATH", "")]).lstrip(":")
    order = json.dumps({"kernels": [asdict(k) for k in kernels], "targets": list(targets)})
    command = [sys.executable, __file__, "--ordered"]
    done = subprocess.run(command, input=order, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Built(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def _compile(kernel: Kernel, arch: int) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    module, _, function = kernel.name.partition(":")
    jit = getattr(importlib.import_module(module), function)
    while not isinstance(jit, JITFunction):
        jit = jit.fn
    order = jit.arg_names
    unknown = sorted((kernel.signature.keys() | kernel.constexprs.keys()) ^ set(order))
    if unknown:
        raise TypeError(f"{kernel.name}({', '.join(order)}): {', '.join(unknown)} must be in both or in neither")
    special = sorted(set(kernel.varying) - {p.name for p in jit.params if p.do_not_specialize})
    if special:
        raise TypeError(f"{kernel.name} must have do_not_specialize={special}: they vary")
    aligned = [name for name, kind in kernel.signature.items() if kind.startswith("*") or name in kernel.aligned]
    source = ASTSource(
        jit,
        signature={name: kernel.signature.get(name, "constexpr") for name in order},
        constexprs={(order.index(name),): value for name, value in kernel.constexprs.items()},
        attrs={(order.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {name: getattr(kernel, name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    try:
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        raise RuntimeError(f"{kernel.name} does not compile for sm_{arch}: {error}") from error
    registers, stack, code = _resources(built.asm["cubin"])
    counts = {name: len(re.findall(pattern, code)) for name, pattern in INSTRUCTIONS.items()}
    return Built(kernel.name, arch, built.metadata.num_warps, built.metadata.shared, registers, stack, **counts)


def _resources(cubin: bytes) -> tuple[int, int, str]:
    """Registers and bytes of stack per thread, and the machine code, read by the cuobjdump that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([tool, "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", listing.stdout + listing.stderr))
    return int(usage["REG"]), int(usage["STACK"]), listing.stdout


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def attend(dim: int, block_m: int, causal: bool = True, group: int = 4, *, block_n: int = 64, dtype: str = "*bf16",
           warps: int | None = None) -> Kernel:  # fmt: skip
    """As ``_Launch`` chooses for bfloat16."""
    tile = {"DIM": dim, "BLOCK_D": next_power_of_two(dim), "BLOCK_M": block_m, "BLOCK_N": block_n, "GROUP": group}
    constexprs = {"CAUSAL": causal, "BLOCK_SIZE": 16, "UPCAST": False, **tile, **UNIT}
    kinds = ATTEND | dict.fromkeys(FLOATS, dtype)
    return Kernel(f"{PAGED}_attend_kernel", kinds, constexprs, [*STRIDES], ["sources", "part_rows", "table_width"],
                  num_warps=warps or (8 if block_m * dim >= 8192 else 4),
                  num_stages=3 if block_m <= 64 else 2)  # fmt: skip


def grouped(name: str, dim: int, warps: int = 4) -> Kernel:
    """As ``_blocks`` and ``backward`` choose for bfloat16; before Hopper heads of 128 get eight warps."""
    pointers = dict.fromkeys(("query", "key", "value", "grad", "grad_query", "grad_key", "grad_value", "out"), "*bf16")
    kinds = {**pointers, **dict.fromkeys(("lse", "delta", "parts"), "*fp32"), "tiles": "*i32", "heads": "i32",
             "kv_heads": "i32", "scale": "fp32"}  # fmt: skip
    own = {"forward": ("out",), "query": (*BACKWARD, "grad_query"),
           "key": (*BACKWARD, "grad_key", "grad_value", "parts")}  # fmt: skip
    arguments = ("query", "key", "value", "lse", "tiles", "heads", "kv_heads", "scale", *own[name])
    block_m = 32 if name == "key" else 64
    tile = {"GROUP": 4, "DIM": dim, "BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_D": dim, "UPCAST": False}
    return Kernel(f"{GROUPED}_{name}_kernel", {a: kinds[a] for a in arguments}, tile, num_warps=warps,
                  num_stages=2)  # fmt: skip


def merge(dim: int) -> Kernel:
    floats = dict.fromkeys(("first_out", "rest_out", "first_lse", "rest_lse", "lse"), "*fp32")
    kinds, block_d = {**floats, "out": "*bf16", "rows": "i32", "rest": "i32"}, next_power_of_two(dim)
    return Kernel(f"{PAGED}_merge_kernel", kinds, {"DIM": dim, "BLOCK_R": 1024 // block_d, "BLOCK_D": block_d},
                  varying=["rows", "rest"])  # fmt: skip


def write(dim: int, dtype: str = "*bf16", aligned_strides: bool = True) -> Kernel:
    strides = [f"{name}_{part}" for name in ("key", "value") for part in ("token", "head")]
    strides += [f"{name}_{part}" for name in ("keys", "values") for part in ("block", "slot", "head")]
    kinds = {"key": dtype, "value": dtype, "key_cache": "*bf16", "value_cache": "*bf16", "slots": "*i64",
             **dict.fromkeys(("count", "heads", "total", *strides), "i32")}  # fmt: skip
    units = dict.fromkeys(("key_dim", "value_dim", "keys_dim", "values_dim"), 1)
    block_d = next_power_of_two(dim)
    constexprs = {"DIM": dim, "BLOCK_SIZE": 16, "BLOCK_R": 2048 // block_d, "BLOCK_D": block_d, **units}
    return Kernel(f"{PAGED}_write_kernel", kinds, constexprs, strides if aligned_strides else (), ["count", "total"])


def over_rows(name: str, kinds: dict[str, str], one_token: bool, least: int = 1, num_warps: int = 8,
              **options: Any) -> Kernel:  # fmt: skip
    """A kernel that goes over rows of logits, in blocks of ``least`` or more. A launch makes a constant of a 1."""
    constexprs, kinds = options.pop("constexprs"), {**kinds, "vocab": "i32", "row_stride": "i32"}
    if one_token:
        kinds = {name: kind for name, kind in kinds.items() if name not in ("vocab", "row_stride")}
        constexprs |= {"vocab": 1, "row_stride": 1, "BLOCK": least}
    return Kernel(name, kinds, constexprs, ["row_stride", "vocab"], num_warps=num_warps, **options)


def sample(filtered: bool, one_token: bool = False) -> Kernel:
    kinds = {"logits": "*bf16", "uniforms": "*fp32", "temperatures": "*fp32", "top_ps": "*fp32", "top_ks": "*i64",
             "out_ids": "*i64", "out_logprobs": "*fp32"}  # fmt: skip
    constexprs: dict[str, Any] = {"BLOCK": 4096}
    if filtered:
        kinds["groups"] = "*i32"
    else:
        constexprs["groups"] = None
    return over_rows("rlkernels.sampling.triton_kernels:_sample_kernel", kinds, one_token, least=128,
                     num_warps=4 if one_token else 8, constexprs=constexprs, enable_fp_fusion=False)  # fmt: skip


def logprobs(name: str, one_token: bool = False) -> Kernel:
    kinds = {"logits": "*bf16", "ids": "*i64", "stats": "*fp32", "entropies": "*fp32", "inverse": "fp32"}
    own = {"grad_logprobs": "*fp32", "grad_entropies": "*fp32", "grad": "*bf16"}
    kinds |= {"logprobs": "*fp32"} if name == "forward" else own
    return over_rows(f"rlkernels.logprobs.triton_kernels:_{name}_kernel", kinds, one_token,
                     constexprs={"ENTROPY": True, "BLOCK": 4096})  # fmt: skip


def rank1(name: str, weight: str = "*i16", base: str = "*i16", *, statistics: bool = False, aligned: bool = True,
          wide: int = 4096, held: int = 4, stages: int = 3) -> Kernel:  # fmt: skip
    """The kernels that read the matrices, bfloat16 as its 16 bits."""
    kinds = {"weights": weight, "bases": base, "modules": "*i64", "active": "*i1", "q": "*fp32", "y": "*fp32",
             "partial": "*fp32", "stats": "*fp64", "first": "i32", "all_rows": "i32", "all_columns": "i32"}  # fmt: skip
    constexprs = {"ALIGNED": aligned, "STATISTICS": statistics, "ROWS": held, "WIDE": wide, "STAGES": stages}
    if name != "rows":
        constexprs |= {"ROWS": 16, "COLUMNS": 256, "STAGES": 3}
    others = {"rows": ["COLUMNS"], "times": ["WIDE", "partial"],
              "transpose": ["WIDE", "STATISTICS", "q", "stats", "all_columns"]}[name]  # fmt: skip
    kinds = {argument: kind for argument, kind in kinds.items() if argument not in others}
    return Kernel(f"rlkernels.rank1.triton_kernels:_{name}_kernel", kinds,
                  {c: value for c, value in constexprs.items() if c not in others}, ALL_SIZES, ["first"],
                  num_warps=wide // 256 if name == "rows" else 8)  # fmt: skip


def rank1_step(k: int) -> Kernel:
    kinds = {"modules": "*i64", **dict.fromkeys(("facts", "work", "stats", "state"), "*fp64"), "active": "*i1",
             **dict.fromkeys("qzy", "*fp32"), **dict.fromkeys(ALL_SIZES, "i32"),
             **dict.fromkeys(("k", "capacity", "rank", "least"), "i32")}  # fmt: skip
    return Kernel("rlkernels.rank1.triton_vectors:_step_kernel", kinds, {"BLOCK": 512, "KP": k}, ALL_SIZES,
                  ["k", "capacity", "rank", "least"], num_warps=8)  # fmt: skip


def dtw(subsequence: bool, rows: int = 128, band: bool = False, dims: int | None = 1) -> Kernel:
    kinds = {**dict.fromkeys(("x", "y", "cost", "border"), "*fp32"), "border_start": "*i32"}
    kinds |= dict.fromkeys(("x_lengths", "y_lengths", "start", "end"), "*i64")
    kinds |= dict.fromkeys(("pairs", "m", "columns", "x_stride", "y_stride", "radius"), "i32")
    constexprs: dict[str, Any] = {"ROWS": rows, "BAND": band, "SUBSEQUENCE": subsequence}
    if dims is None:
        kinds["dims"] = "i32"
    else:
        constexprs["dims"] = dims
    return Kernel("rlkernels.similarity.triton_kernels:_dtw_kernel", kinds, constexprs,
                  varying=["pairs", "m", "columns"], num_warps=1)  # fmt: skip


KERNELS: dict[str, Kernel] = {
    **{f"paged attention, decode, heads of {d}": attend(d, 16) for d in (64, 128)},
    **{f"paged attention, prefill, heads of {d}": attend(d, 128) for d in (64, 128)},
    **{f"shared prefix of 8, heads of {d}": attend(d, 32, causal=False) for d in (64, 128)},
    **{f"grouped attention, {n}, heads of {d}": grouped(n, d) for n in ("forward", "query", "key") for d in (64, 128)},
    **{f"grouped attention, {n}, heads of 128, before Hopper": grouped(n, 128, 8) for n in ("forward", "query", "key")},
    "merging parts, heads of 128": merge(128),
    "writing keys and values, heads of 128": write(128),
    "sampling, with filters": sample(True),
    "sampling, without": sample(False),
    "token log-probabilities, forward": logprobs("forward"),
    "token log-probabilities, backward": logprobs("backward"),
    "rank-1, rows of up to 4,096": rank1("rows"),
    "rank-1, longer rows, times": rank1("times"),
    "rank-1, longer rows, transpose": rank1("transpose"),
    "rank-1, step": rank1_step(16),
    "dtw": dtw(False),
    "dtw, subsequence": dtw(True),
}


def cuda_kernels(source: str, arch: int, warps: int) -> Iterator[Built]:
    """What nvcc makes of the kernels of a file in csrc/cuda."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc/include'}", "-cubin",
                   f"-arch=sm_{arch}", "-Xptxas", "-v", str(ROOT / "csrc/cuda" / source), "-o",
                   str(Path(folder) / "out.cubin")]  # fmt: skip
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for part in said.split("Compiling entry function ")[1:]:
        found = CUDA_PROPERTIES.search(part)
        assert found, part
        mangled = part.split("'")[1]
        rows, *chosen = re.findall(r"L[ib](\d+)E", mangled) or [""]
        flags = [flag for flag, on in zip(("one feature", "band", "subsequence"), chosen) if on == "1"]
        shared = re.search(r"(\d+) bytes smem", part)
        subject = f"{rows} rows a lane" if rows else "bounds" if "bound_kernel" in mangled else "boxes"
        name = ", ".join([f"{source.removesuffix('.cu')} in CUDA, {subject}", *flags])
        yield Built(name, arch, warps, int(shared[1]) if shared else 0, int(found[2]), int(found[1]))


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


def main() -> None:
    built = iter(compile_for(list(KERNELS.values()), triton=OTHER))
    rows = {name: [next(built) for _ in TARGETS] for name in KERNELS}
    if shutil.which("nvcc"):
        for arch in TARGETS:
            for kernel in cuda_kernels("dtw.cu", arch, warps=4):
                rows.setdefault(kernel.name, []).append(kernel)
    print(table(rows))


if __name__ == "__main__":
    if "--ordered" in sys.argv:
        order = json.load(sys.stdin)
        results = [_compile(Kernel(**k), arch) for k in order["kernels"] for arch in order["targets"]]
        print(json.dumps([asdict(r) for r in results]))
    else:
        main()
