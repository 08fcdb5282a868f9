"""The division of the Triton solver's work: a table that describes the modules, and the launches that read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton.compiler.compiler import max_shared_mem

from rlkernels.backend import next_power_of_2
from rlkernels.rank1.reference import KRYLOV_COLUMNS
from rlkernels.rank1.triton_kernels import Module

Pair = tuple[torch.Tensor, torch.Tensor]
SCRATCH = 2048  # most bytes of shared memory for sums over a program
ALIGN = 16  # elements: alignment of a module's vectors


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles; they depend on the module's shape only, so its result does not depend on other modules."""

    max_register_columns: int = (
        4096  # most columns of a row in one program's registers; wider matrices are read in tiles
    )
    rows_in_registers: int = 4  # rows in registers
    slots: int = 128  # most programs for a module in registers: about the multiprocessors of a large GPU
    min_slot_rows: int = 32  # fewest rows of such a program
    rows: int = 16  # of a tile
    columns: int = 256  # of a tile
    programs: int = 512  # most programs for D^T Y of a module in tiles

    def slot_rows(self, m: int, n: int) -> int:
        """Return the rows of a slot, which holds one partial Z [4, n]."""
        if n <= self.max_register_columns:
            rows = self.rows_in_registers
            slots = self.slots
        else:
            rows = self.rows
            slots = max(self.programs // -(-n // self.columns), 1)
        height = max(-(-m // slots), self.min_slot_rows)
        return -(-height // rows) * rows

    def block(self, columns: int, sizes: tuple[int, int], aligned: bool, shared: int, major: int) -> tuple[int, int]:
        """Return the rows of a block in registers, and the stages, all but one in ``shared`` bytes of memory.

        Args:
            columns: of a row in registers.
            sizes: bytes of an element of each matrix.
            aligned: whether rows are copied by 16 bytes.
            shared: bytes of shared memory for a program.
            major: the GPU's generation.
        """
        rows, row_bytes = self.rows_in_registers, columns * sum(sizes)
        stages = 3 if rows * row_bytes <= 2**16 else 2
        while rows * row_bytes * (stages - 1) > shared - SCRATCH:
            rows = rows if stages > 2 else rows // 2
            stages = 2
        # 16 warps have 128 registers a thread: four rows spill some; on Hopper they were measured so, and lead. Two
        # spill where rows pass through registers, or where two sizes want two layouts
        if columns > 2048 and major != 9:
            rows, stages = (min(rows, 2), stages) if aligned and sizes[0] == sizes[1] else (1, 3)
        return rows, stages


def shared_bytes(device: torch.device) -> int:
    """Return the most bytes of shared memory for a program: 99 KiB on many GPUs, unlimited in the interpreter."""
    return max_shared_mem(device.index) if device.type == "cuda" else 2**40


def padded(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


def distance(to: torch.Tensor, start: torch.Tensor) -> int:
    """Return the distance in elements."""
    return (to.data_ptr() - start.data_ptr()) // to.element_size()


@dataclass(frozen=True)
class Group:
    """The modules of one launch, of the same dtypes, alignment and width class."""

    pair: Pair  # of the first module; the others are addressed from there
    aligned: bool
    register_columns: int  # of a row; 0: it is too long for registers
    first: int  # first row in the table
    shapes: list[torch.Size]

    @property
    def longest(self) -> tuple[int, int]:
        """Return the most rows and columns."""
        heights, widths = zip(*self.shapes)
        return max(heights), max(widths)


def _is_aligned(matrix: torch.Tensor) -> bool:
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) % 16 == 0 and matrix.shape[1] % 16 == 0


class Layout:
    """The modules in the order of their groups, and their table."""

    def __init__(self, pairs: Sequence[Pair], given: Sequence[bool], outs: Sequence[torch.Tensor],
                 tiling: Tiling) -> None:  # fmt: skip
        groups: dict[tuple[torch.dtype, torch.dtype, bool, int], list[int]] = {}
        for i, (weight, base) in enumerate(pairs):
            columns = next_power_of_2(weight.shape[1])
            register_columns = max(columns, 1024) if columns <= tiling.max_register_columns else 0
            key = weight.dtype, base.dtype, _is_aligned(weight) and _is_aligned(base), register_columns
            groups.setdefault(key, []).append(i)
        self.order = [i for members in groups.values() for i in members]
        self.groups: list[Group] = []
        self.rows = self.columns = self.partial = self.stats = 0
        table: list[list[int]] = []
        for (_, _, aligned, register_columns), members in groups.items():
            first = pairs[members[0]]
            self.groups.append(
                Group(first, aligned, register_columns, len(table), [pairs[i][0].shape for i in members])
            )
            for i in members:
                weight, base = pairs[i]
                m, n = weight.shape
                height = tiling.slot_rows(m, n)
                slots = -(-m // height)
                items = slots if register_columns else -(-m // tiling.rows)
                row = {
                    Module.WEIGHT: distance(weight, first[0]), Module.BASE: distance(base, first[1]),
                    Module.WEIGHT_STRIDE: weight.stride(0), Module.BASE_STRIDE: base.stride(0),
                    Module.M: m, Module.N: n, Module.Y: self.rows, Module.Q: self.columns,
                    Module.PARTIAL: self.partial, Module.SLOTS: slots, Module.HEIGHT: height,
                    Module.STATS: self.stats, Module.ITEMS: items, Module.GIVEN: int(given[i]),
                    Module.OUT: distance(outs[i], outs[0]),
                }  # fmt: skip
                table.append([row[column] for column in Module])
                self.rows += padded(m)
                self.columns += padded(n)
                self.partial += KRYLOV_COLUMNS * slots * n
                self.stats += items
        self.table = torch.tensor(table, device="cpu").to(pairs[0][0].device, non_blocking=True)
