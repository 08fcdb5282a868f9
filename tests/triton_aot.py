"""Compiles Triton kernels for GPUs that are not here: type errors, shared memory and registers show without one.

    from triton_aot import Kernel, compile_for

    def test_compiles_ahead_of_time():
        kernel = Kernel("rlkernels.sampling.triton_kernels:_sample_kernel",
                        {"logits": "*bf16", "out": "*i64", "rows": "i32", "scale": "fp32"}, {"BLOCK": 1024})
        for built in compile_for([kernel]):
            assert built.shared_bytes <= 160 * 1024 and built.stack_bytes == 0, built

The compiler runs in a process of its own without TRITON_INTERPRET, so this works in any test file.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TARGETS = (80, 90)  # sm_80 (A100), sm_90 (H100, H200)
SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # of a multiprocessor
ROOT = Path(__file__).parents[1]


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
    command = [sys.executable, __file__]
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


# in the machine code: what Built counts
INSTRUCTIONS = {
    "wgmma": r"\bHGMMA\.",
    "mma": r"\bHMMA\.",
    "wide_copies": r"\bLDGSTS\.\S*128\b",
    "wide_loads": r"\bLDG\.\S*128\b",
}


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


if __name__ == "__main__":
    order = json.load(sys.stdin)
    results = [_compile(Kernel(**k), arch) for k in order["kernels"] for arch in order["targets"]]
    print(json.dumps([asdict(r) for r in results]))
