"""A GPU that is not here: launches of Triton kernels, and kernels that nvcc compiles, run through the interpreter.

    with Gpu(90) as gpu:
        out, lse = triton_grouped.forward(query, key, value, layout, scale)  # tensors on the CPU

Launchers, specialisation and compiler are those of a GPU. What ``torch.empty`` made counts as unwritten until a kernel
writes it.
"""

import random
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ptx import arithmetic, movement, tensor_cores  # noqa: F401, they fill the table of instructions
from ptx.block import Block
from ptx.memory import Global
from ptx.program import Program, parse

ROOT = Path(__file__).parents[2]
ORDERS: dict[str, Callable[[list], list]] = {
    "forward": lambda blocks: blocks,
    "reversed": lambda blocks: blocks[::-1],
    "shuffled": lambda blocks: random.Random(0).sample(blocks, len(blocks)),
}
ARGUMENTS = {"i32": "<i4", "i64": "<i8", "fp32": "<f4", "fp64": "<f8", "u1": "<i1", "i1": "<i1"}


@dataclass
class Launch:
    """What ran: the kernel's name, what it was compiled with, and what its blocks did."""

    name: str
    constants: dict[str, Any]
    options: dict[str, Any]
    program: Program
    executed: np.ndarray  # by statement
    issued: Counter[str]  # statements times warps, by instruction


class Gpu:
    def __init__(self, arch: int, order: str = "forward", change: Callable[[str], str] = lambda ptx: ptx) -> None:
        self.arch, self.order, self.change = arch, ORDERS[order], change
        self.memory, self.launches = Global(), list[Launch]()
        self._compiled: dict[Any, Any] = {}
        self._patches = ExitStack()

    def __enter__(self) -> "Gpu":
        from triton.runtime.jit import JITFunction

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._launch(kernel, grid, args, kwargs)

        self._patches.enter_context(patch.object(JITFunction, "run", run))
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            self._patches.enter_context(patch.object(owner, name, self._noting(getattr(owner, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _noting(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            if made.device.type == "cpu":
                self.memory.know(made, written=False)
            return made

        return noting

    def _launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """As ``JITFunction.run``, but that the kernel does not go to a driver."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.runtime.jit import create_function_from_signature

        target = GPUTarget("cuda", self.arch, 32)
        backend = make_backend(target)
        bound, special, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
            *args, **kwargs
        )
        options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, special, options)
        place = (kernel, str(special), str(options))
        if place not in self._compiled:
            source = ASTSource(kernel, signature, constants, attributes)
            self._compiled[place] = triton.compile(source, target=target, options=options.__dict__)
        built = self._compiled[place]
        given = [self._argument(bound[name], kind) for name, kind in signature.items() if kind != "constexpr"]
        name, threads = f"{kernel.__module__}:{kernel.__name__}", 32 * built.metadata.num_warps
        self.run(built.asm["ptx"], kernel.__name__, [*given, bytes(8), bytes(8)], grid, threads, built.metadata.shared,
                 name, {kernel.arg_names[path[0]]: value for path, value in constants.items()}, options.__dict__)  # fmt: skip

    def _argument(self, value: Any, kind: str) -> bytes:
        if not isinstance(value, torch.Tensor):
            return np.array(value, ARGUMENTS[kind]).tobytes()
        self.memory.know(value)
        return np.uint64(value.data_ptr()).tobytes()

    def run(self, ptx: str, entry: str, arguments: Sequence[bytes], grid: Sequence[int], threads: int, shared: int = 0,
            name: str = "", constants: dict[str, Any] | None = None, options: dict[str, Any] | None = None) -> None:  # fmt: skip
        """Runs all blocks of a kernel, one after the other."""
        program = parse(self.change(ptx), entry)
        size = (*grid, 1, 1)[:3]
        block = Block(program, self.memory, arguments, threads, shared, size)
        for z, y, x in self.order(list(product(*map(range, size[::-1])))):
            block.run((x, y, z))
        self.launches.append(
            Launch(name or entry, constants or {}, options or {}, program, block.executed, block.issued)
        )


def compile_cuda(source: str, arch: int) -> str:
    """The PTX of a file in csrc/cuda."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out.ptx"
        command = ["nvcc", "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc/include'}", "-ptx"]
        subprocess.run([*command, f"-arch=compute_{arch}", str(ROOT / "csrc/cuda" / source), "-o", str(target)],
                       check=True)  # fmt: skip
        return target.read_text()


def has_nvcc() -> bool:
    return shutil.which("nvcc") is not None
