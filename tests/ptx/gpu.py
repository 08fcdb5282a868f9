"""A GPU that is not here: launches of Triton kernels, and kernels that nvcc compiles, run through the interpreter.

    with Gpu(90) as gpu:
        out = rlkernels.tree_attention(query, key, value, layout, scale=0.1, backend="triton")  # tensors of the CPU

Launchers, specialisation and compiler are those of a GPU. What ``torch.empty`` made counts as unwritten until a kernel
writes it. ``Gpu(90, execute=False)`` compiles the kernels and runs none, for any architecture that Triton knows; there
``torch.empty`` gives zeros. ``torch_fills``: operations of torch may write what kernels read.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import rlkernels.backend
from ptx import arithmetic, movement, tensor_cores  # noqa: F401, they fill the table of instructions
from ptx.block import Block
from ptx.memory import Global
from ptx.program import parse

ORDERS: dict[str, Callable[[list], list]] = {
    "forward": lambda blocks: blocks,
    "reversed": lambda blocks: blocks[::-1],
    "shuffled": lambda blocks: random.Random(0).sample(blocks, len(blocks)),
}
# KiB that a program may have
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
NUMBERS = {"i32": "<i4", "i64": "<i8", "fp32": "<f4", "fp64": "<f8", "u1": "<i1", "i1": "<i1"}


COMPILED: dict[Any, Any] = {}  # by kernel, architecture and specialisation


@dataclass
class Launch:
    """A kernel, its constants and options, what it was compiled to, and what ran its blocks."""

    kernel: Any
    constants: dict[str, Any]
    built: Any
    block: Block | None = None


class Gpu:
    def __init__(self, arch: int, order: str = "forward", change: Callable[[str], str] = lambda ptx: ptx, *,
                 execute: bool = True, torch_fills: bool = False) -> None:  # fmt: skip
        self.arch, self.order, self.change, self.execute = arch, ORDERS[order], change, execute
        self.torch_fills = torch_fills
        self.memory, self.launches = Global(), list[Launch]()
        self._blocks: dict[Any, Block] = {}
        self._patches = ExitStack()

    def __enter__(self) -> "Gpu":
        from triton.runtime.jit import JITFunction

        from rlkernels.prefix_cache import triton_kernels, triton_tree
        from rlkernels.rank1 import grouped

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return self._launch(kernel, grid, args, kwargs)

        replaced = {
            (JITFunction, "run"): run,
            (rlkernels.backend, "unavailable"): lambda *_: None,  # for tensors on the CPU
            (triton_kernels, "processors"): lambda _: 132,
            (grouped, "shared_bytes"): lambda _: SHARED_KIB[self.arch] * 1024,
            **{(owner, "generation"): lambda _: self.arch // 10 for owner in (triton_kernels, triton_tree, grouped)},
        }
        for (owner, name), function in replaced.items():
            self._patches.enter_context(patch.object(owner, name, function))
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            self._patches.enter_context(patch.object(owner, name, self._noting(getattr(owner, name))))
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> bool:
        self._patches.close()
        return not self.execute and error is AssertionError  # about results that no kernel wrote

    def _noting(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            if not self.execute:
                getattr(made, "numbers", made).zero_()
            elif made.device.type == "cpu":
                self.memory.know(made, written=self.torch_fills)
            return made

        return noting

    def _launch(self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """As ``JITFunction.run``, but that the kernel does not go to a driver."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.runtime.jit import create_function_from_signature

        target = GPUTarget("cuda", self.arch, 32)
        backend = make_backend(target)
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, special, options = bind(*args, **kwargs)
        options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, special, options)
        place = (kernel.fn, self.arch, str(special), str(options))
        if place not in COMPILED:
            source = ASTSource(kernel, signature, constants, attributes)
            COMPILED[place] = triton.compile(source, target=target, options=options.__dict__)
        built = COMPILED[place]
        named = {kernel.arg_names[path[0]]: value for path, value in constants.items()}
        launch = Launch(kernel, named | options.__dict__, built)
        self.launches.append(launch)
        if not self.execute:
            return built
        given = [self._argument(bound[name], kind) for name, kind in signature.items() if kind != "constexpr"]
        scratch = [bytes(8)] * 2  # which the compiler may ask for, and no kernel of ours does
        launch.block = self.run(built.asm["ptx"], kernel.__name__, [*given, *scratch], grid, 32 * options.num_warps,
                                built.metadata.shared)  # fmt: skip
        return built

    def _argument(self, value: Any, kind: str) -> bytes:
        return self.pointer(value) if isinstance(value, torch.Tensor) else np.array(value, NUMBERS[kind]).tobytes()

    def pointer(self, tensor: torch.Tensor) -> bytes:
        """An argument of a kernel, which may use all of the tensor's storage."""
        self.memory.know(tensor)
        return np.uint64(tensor.data_ptr()).tobytes()

    def run(self, ptx: str, entry: str, arguments: Sequence[bytes], grid: Sequence[int], threads: int,
            shared: int = 0) -> Block:  # fmt: skip
        """Run all blocks of a kernel in turn; return what ran them, with the counts of all launches so far."""
        place = (entry, ptx, threads, shared)
        if place not in self._blocks:
            self._blocks[place] = Block(parse(self.change(ptx), entry), self.memory, threads, shared)
        block, size = self._blocks[place], (*grid, 1, 1)[:3]
        block.launch(arguments, size)
        for z, y, x in self.order(list(product(*map(range, size[::-1])))):
            block.run((x, y, z))
        return block
