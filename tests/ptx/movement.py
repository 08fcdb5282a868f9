"""Instructions that move values: loads and stores, asynchronous copies, and those between lanes of a warp."""

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np

from ptx.block import Action, Block, Mask, instruction
from ptx.memory import BITS
from ptx.program import TYPES, Statement, unbrace

# Triton before 3.7 sets no fence between copies that have landed and the products that read them
COPIES_COUNT_AS_FENCED = find_spec("triton") is not None and version("triton") < "3.7"


@instruction("ld", "st")
def _access(block: Block, s: Statement) -> Action:
    space = next(part for part in ("param", "global", "shared") if part in s.parts)
    storing = s.name == "st"
    place, values = s.operands if storing else s.operands[::-1]
    registers, size = unbrace(values), TYPES[s.kind].itemsize
    bits, signed = BITS[size], TYPES[s.kind] if s.kind[0] == "s" else BITS[size]
    if space == "param":
        name, _, offset = place.strip("[] ").partition("+")
        start = block.program.parameters[name.strip()][0] + int(offset or 0)
        value = block.parameters[start : start + size].view(bits)
        return lambda on: block.write(registers[0], value, on)
    address = block.address(place, "u64" if space == "global" else "b32")
    reads = [block.read(register, f"b{8 * size}") for register in registers] if storing else []
    count = len(registers)

    def run(on: Mask) -> None:
        chosen = block.chosen(on)
        at, warps = address()[chosen], block.warp[chosen]
        block.moved += len(at) * size * count if space == "global" else 0
        if storing:
            stored = np.stack([read()[chosen] for read in reads], 1)
            if space == "global":
                block.memory.write(at, stored, s.text)
            else:
                block.shared.write(at, warps, stored, s.text)
            return
        if space == "global":
            data = block.memory.read(at, size, count, s.text)
        else:
            data = block.shared.read(at, warps, size, count, s.text)
        values = np.zeros((count, block.threads), signed)
        values[:, chosen] = data.view(signed).T
        for register, loaded in zip(registers, values):
            block.write(register, loaded, on)

    return run


@instruction("cp")
def _copy(block: Block, s: Statement) -> Action:
    """cp.async: a copy lands where its group is waited for; until then nobody else may touch where it goes."""
    if s.parts[2] == "commit_group":
        return lambda on: block.copies.append([])
    if s.parts[2] == "wait_group":
        return lambda on: block.land(block.copies, int(s.operands[0]))
    if s.parts[2] not in ("ca", "cg"):
        raise NotImplementedError(s.text)
    to, source, size = block.address(s.operands[0], "b32"), block.address(s.operands[1], "u64"), int(s.operands[2], 0)
    taken = block.read(s.operands[3], "u32") if len(s.operands) > 3 else lambda: np.full(block.threads, size)

    def run(on: Mask) -> None:
        chosen = block.chosen(on)
        at, warps, whole = to()[chosen], block.warp[chosen], taken()[chosen] == size
        if (taken()[chosen][~whole] != 0).any():
            raise NotImplementedError(f"part of a copy: {s.text}")
        data = np.zeros((len(chosen), size // 4), np.uint32)
        block.moved += size * int(whole.sum())
        if whole.any():
            data[whole] = block.memory.read(source()[chosen][whole], 4, size // 4, s.text)
        block.shared.note_write(at, warps, size, s.text)
        block.copies[-1].append(lambda: block.shared.write(at, warps, data, s.text, fenced=COPIES_COUNT_AS_FENCED))

    return run


@instruction("shfl")
def _shuffle(block: Block, s: Statement) -> Action:
    """Every lane gets the value of another lane of its segment, or keeps its own where there is none."""
    to, _, predicate = s.operands[0].partition("|")
    value, count, bounds = (block.read(operand, "u32") for operand in s.operands[1:4])
    source: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] = {
        "up": lambda lane, n, segment: lane - n,
        "bfly": lambda lane, n, segment: lane ^ n,
        "idx": lambda lane, n, segment: lane & segment | n & ~segment & 31,
    }[s.parts[2]]

    def run(on: Mask) -> None:
        block.whole_warps(on, s.text)
        limits = bounds().astype(np.int64)
        segment = limits >> 8 & 31
        last = block.lane & segment | limits & ~segment & 31
        lane = source(block.lane, count().astype(np.int64), segment)
        exists = lane >= last if s.parts[2] == "up" else lane <= last
        values = value()[block.warp * 32 + np.where(exists, lane, block.lane)]
        block.write(to, values, on)
        if predicate:
            block.write(predicate, exists, on)

    return run


@instruction("redux")
def _reduce(block: Block, s: Statement) -> Action:
    function = {"max": np.max, "min": np.min, "add": np.sum}[s.parts[2]]
    value = block.read(s.operands[1], s.kind)

    def run(on: Mask) -> None:
        block.whole_warps(on, s.text)
        over_warp = function(value().reshape(-1, 32), 1).astype(TYPES[s.kind])
        block.write(s.operands[0], np.repeat(over_warp, 32), on)

    return run
