"""How the Triton solver cuts up its work: tables that describe modules and work items."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from triton.compiler.compiler import max_shared_mem

from rlkernels.rank1.reference import BLOCK
from rlkernels.rank1.triton_kernels import Module, places

Pair = tuple[torch.Tensor, torch.Tensor]
SCRATCH = 2048  # bytes of shared memory that sums over a program take at most


@dataclass(frozen=True)
class Tiling:
    """How work is cut up; depends on the shape of a module alone, so its result does not depend on its company."""

    widest: int = 4096  # columns of a row that fits in one program's registers
    held: int = 4  # rows there
    chunk: int = 1024  # columns of a product with Q in the panel kernel
    strip: int = 256  # columns of a product with Y there
    rows: int = 16  # rows of a block there
    panel_bytes: int = 2**23  # of both matrices: with those under way it stays in the second-level cache

    def slot_rows(self, m: int, n: int) -> int:
        """Return the rows of a slot, which holds one partial Z [4, n]."""
        return 256 if m * n >= 2**25 else 64

    def block(self, row_bytes: int, shared: int) -> tuple[int, int]:
        """Return the rows of a block in registers, and the stages, all but one in ``shared`` bytes of memory."""
        rows = self.held
        stages = 3 if rows * row_bytes <= 2**16 else 2
        while rows * row_bytes * (stages - 1) > shared - SCRATCH:
            rows, stages = (rows if stages > 2 else rows // 2), 2
        return rows, stages

    def panel_rows(self, n: int, entry_bytes: int) -> int:
        return max(self.panel_bytes // (n * entry_bytes) // self.rows, 1) * self.rows


def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a program may have: 99 KiB on many GPUs, unlimited in the interpreter."""
    return max_shared_mem(device.index) if device.type == "cuda" else 2**40


@dataclass
class Group:
    """Modules that one launch reads: of the same dtypes, alignment and width class."""

    pair: Pair  # its first; the others are addressed from there
    aligned: bool
    wide: int  # columns held in registers; 0: the panel kernel
    items: list[list[int]] = field(default_factory=list)
    late: list[list[int]] = field(default_factory=list)  # second uses of the panel before
    chunks: int = 1
    counters: int = 1  # the first is the ticket
    y_partial: int = 0
    table: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def _is_aligned(matrix: torch.Tensor) -> bool:
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) % 16 == 0 and matrix.shape[1] % 16 == 0


def _distance(to: torch.Tensor, start: torch.Tensor) -> int:
    """Return the distance in elements."""
    return (to.data_ptr() - start.data_ptr()) // to.element_size()


class Layout:
    """Tables that describe the modules and the work."""

    def __init__(self, pairs: Sequence[Pair], given: Sequence[bool], tiling: Tiling) -> None:
        self.tiling, self.groups = tiling, dict[tuple[object, ...], Group]()
        self.rows = self.columns = self.partial = self.stats = 0
        device, table = pairs[0][0].device, []
        for i, (weight, base) in enumerate(pairs):
            m, n = weight.shape
            wide = max(16, 1 << (n - 1).bit_length())
            key = (weight.dtype, base.dtype, _is_aligned(weight) and _is_aligned(base),
                   (1024 if wide <= 1024 else wide) if wide <= tiling.widest else 0)  # fmt: skip
            group = self.groups.setdefault(key, Group((weight, base), key[2], key[3]))
            row = {
                Module.WEIGHT: _distance(weight, group.pair[0]), Module.BASE: _distance(base, group.pair[1]),
                Module.WEIGHT_STRIDE: weight.stride(0), Module.BASE_STRIDE: base.stride(0), Module.M: m, Module.N: n,
                Module.Y: self.rows, Module.Q: self.columns, Module.PARTIAL: self.partial, Module.STATS: self.stats,
                Module.GIVEN: int(given[i]), Module.Y_PARTIAL: group.y_partial, Module.COUNTER: group.counters,
            }  # fmt: skip
            if group.wide:
                self._add_slots(group, i, m, n, row)
            else:
                self._add_panels(group, i, m, n, weight.element_size() + base.element_size(), row)
            self.rows += m
            self.columns += n
            table.append([row[column] for column in Module])
        self.table = torch.tensor(table, dtype=torch.int64, device=device)
        for group in self.groups.values():
            group.table = torch.tensor([*group.items, *group.late], dtype=torch.int64, device=device)
        self.places = places([w.shape[1] for w, _ in pairs], device)
        self.row_places = places([w.shape[0] for w, _ in pairs], device)

    def _add_slots(self, group: Group, i: int, m: int, n: int, row: dict[Module, int]) -> None:
        height = self.tiling.slot_rows(m, n)
        for first in range(0, m, height):
            group.items.append([i, first, min(first + height, m), self.partial, self.stats])
            self.partial += BLOCK * n
            self.stats += 1
        row |= {Module.SLOTS: -(-m // height), Module.ITEMS: -(-m // height), Module.CHUNKS: 0}

    def _add_panels(self, group: Group, i: int, m: int, n: int, entry_bytes: int, row: dict[Module, int]) -> None:
        """Multiply one panel with Q before the second use of the panel before it."""
        t = self.tiling
        height, chunks = t.panel_rows(n, entry_bytes), -(-n // t.chunk)
        for top in range(0, m, height):
            bottom = min(top + height, m)
            for first in range(top, bottom, t.rows):
                for chunk in range(chunks):
                    group.items.append([0, i, first, min(first + t.rows, bottom), chunk, 0, self.stats])
                    self.stats += 1
            group.items += group.late
            group.late = [[1, i, top, bottom, strip, self.partial, 0] for strip in range(-(-n // t.strip))]
            self.partial += BLOCK * n
        group.counters += -(-m // t.rows)
        group.y_partial += BLOCK * chunks * m
        group.chunks = max(group.chunks, chunks)
        row |= {Module.SLOTS: -(-m // height), Module.ITEMS: -(-m // t.rows) * chunks, Module.CHUNKS: chunks}
