"""Matrices in registers: ldmatrix, stmatrix, mma.sync, and the asynchronous products of sm_90, wgmma.

A product is exact in float64 and is rounded to float32 once. Lane l of a warp holds entries of row l // 4 of eight, in
the columns 2 (l % 4) and the next one.
"""

import functools
import re
from collections.abc import Callable

import numpy as np

from ptx.block import Action, Block, Mask, from_bfloat16, instruction
from ptx.memory import SEVERAL, Fault
from ptx.program import Statement, unbrace

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, 2 * (LANE % 4)
UNKNOWN = np.float32(np.nan)
FLOAT16 = {"bf16": from_bfloat16, "f16": lambda bits: bits.astype(np.uint16).view(np.float16)}


def _everybody(on: Mask, text: str) -> None:
    if on is not None:
        raise Fault(f"threads are missing: {text}")


@instruction("ldmatrix", "stmatrix")
def _move_matrices(block: Block, s: Statement) -> Action:
    """8 x 8 matrices of 16 bits; lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i."""
    loading, turned = s.name == "ldmatrix", "trans" in s.parts
    place, registers = (s.operands[1], unbrace(s.operands[0])) if loading else (s.operands[0], unbrace(s.operands[1]))
    address, reads = block.address(place, "b32"), [] if loading else [block.read(r, "b32") for r in registers]

    def run(on: Mask) -> None:
        _everybody(on, s.text)
        at, warps = address().reshape(-1, 32), np.repeat(np.arange(block.warps), 8)
        for i, register in enumerate(registers):
            rows = at[:, 8 * i : 8 * i + 8].ravel()
            if loading:
                matrix = block.shared.read(rows, warps, 4, 4, s.text).view(np.uint16).reshape(-1, 8, 8)
            else:
                matrix = reads[i]().copy().view(np.uint16).reshape(-1, 8, 8)
            matrix = np.ascontiguousarray(matrix.transpose(0, 2, 1) if turned else matrix)
            if loading:
                block.write(register, matrix.view(np.uint32).ravel(), on)
            else:
                block.shared.write(rows, warps, matrix.view(np.uint32).reshape(-1, 4), s.text)

    return run


def _left_operand(block: Block, registers: list[str], kind: str) -> Callable[[], np.ndarray]:
    """The [16, 16] of every warp that lie in four registers a lane."""
    reads = [block.read(register, "b32") for register in registers]

    def fill() -> np.ndarray:
        out = np.zeros((block.warps, 16, 16))
        for i, read in enumerate(reads):
            _place(out, ROW + 8 * (i & 1), COLUMN + 8 * (i >> 1), read().reshape(-1, 32), kind)
        return out

    return fill


def _place(out: np.ndarray, row: np.ndarray, column: np.ndarray, pairs: np.ndarray, kind: str) -> None:
    """Two neighbours in a row, the first one in the low half."""
    out[:, row, column] = FLOAT16[kind](pairs & 0xFFFF)
    out[:, row, column + 1] = FLOAT16[kind](pairs >> 16)


def _totals(out: np.ndarray, held: list[np.ndarray], keep: np.ndarray | bool) -> np.ndarray:
    """The product ``out`` [warps, 16, 8 n] and what registers held where it is kept -> [registers, threads]."""
    before = np.stack([values.reshape(-1, 32) for values in held], 1)
    i = np.arange(len(held))[:, None]
    product = out[:, ROW + 8 * (i >> 1 & 1), COLUMN + (i & 1) + 8 * (i >> 2)]  # [warps, registers, lanes]
    totals = (product + np.where(keep, before, 0)).astype(np.float32)
    return np.ascontiguousarray(totals.transpose(1, 0, 2)).reshape(len(held), -1)


@instruction("mma")
def _multiply(block: Block, s: Statement) -> Action:
    """[16, 16] x [16, 8] of every warp."""
    kind = s.parts[7]
    if s.parts[3] != "m16n8k16" or s.parts[6] != "f32" or kind not in FLOAT16:
        raise NotImplementedError(s.text)
    results = unbrace(s.operands[0])
    left = _left_operand(block, unbrace(s.operands[1]), kind)
    right = [block.read(register, "b32") for register in unbrace(s.operands[2])]
    sums = [block.read(register, "f32") for register in unbrace(s.operands[3])]

    def run(on: Mask) -> None:
        _everybody(on, s.text)
        b = np.zeros((block.warps, 8, 16))  # its columns as rows
        for i, read in enumerate(right):
            _place(b, ROW, COLUMN + 8 * i, read().reshape(-1, 32), kind)
        out = left() @ b.transpose(0, 2, 1)
        block.flops += 2 * 16 * out.size
        totals = _totals(out, [read() for read in sums], True)
        for register, values in zip(results, totals):
            block.write(register, values, on)

    return run


@instruction("wgmma")
def _asynchronous(block: Block, s: Statement) -> Action:
    """[64, 16] x [16, n] of every four warps. Operands in shared memory may be read until their group is waited for."""
    if s.parts[1] == "fence":
        return lambda on: None
    if s.parts[1] == "commit_group":
        return lambda on: block.products.append([])
    if s.parts[1] == "wait_group":
        return lambda on: block.land(block.products, int(s.operands[0]))
    columns, kind = int(re.fullmatch(r"m64n(\d+)k16", s.parts[4])[1]), s.parts[6]
    results, groups = unbrace(s.operands[0]), block.threads // 128
    # after the descriptors: keep the sums, two signs, and which operands are turned; the left one only if in memory
    flags = [int(operand) for operand in s.operands[4:]]
    in_registers = s.operands[1].startswith("{")
    if flags[:2] != [1, 1] or s.parts[5] != "f32" or kind not in FLOAT16:
        raise NotImplementedError(s.text)
    left = _left_operand(block, unbrace(s.operands[1]), kind) if in_registers else block.read(s.operands[1], "u64")
    right, sums = block.read(s.operands[2], "u64"), [block.read(register, "f32") for register in results]
    keep = block.read(s.operands[3], "pred")

    def matrices(descriptors: np.ndarray, rows: int, turned: int, own: int = 0) -> np.ndarray:
        """The [rows, 16] of every group, by its descriptor; ``own`` rows are read by one warp alone, 0: all by all."""
        out = np.zeros((groups, rows, 16))
        for group, given in enumerate(descriptors.reshape(groups, 128)):
            if (given != given[0]).any():
                raise Fault(f"threads differ in a descriptor: {s.text}")
            at = places(int(given[0]), rows, turned)
            bits = _read_asynchronously(block, at, 4 * group, s.text, own)
            out[group] = FLOAT16[kind](bits)
        return out

    def run(on: Mask) -> None:
        _everybody(on, s.text)
        b = matrices(right(), columns, flags[-1])
        a = left().reshape(groups, 64, 16) if in_registers else matrices(left(), 64, flags[2], own=16)
        out = (a @ b.transpose(0, 2, 1)).reshape(-1, 16, columns)
        block.flops += 2 * 16 * out.size
        # until its group is waited for, nobody but a later product has the sums
        held = [block.running.get(register, read()) for register, read in zip(results, sums)]
        totals = dict(zip(results, _totals(out, held, keep().reshape(-1, 1, 32))))
        for register in results:
            block.write(register, UNKNOWN, on)
        block.running |= totals

        def finish() -> None:
            for register, values in totals.items():
                if block.running.get(register) is values:  # and no later product has taken it over
                    block.write(register, block.running.pop(register), None)

        block.products[-1].append(finish)

    return run


@functools.cache
def places(descriptor: int, rows: int, turned: int) -> np.ndarray:
    """Where the entries of [rows, 16] lie, of 16 bits each. Bits 0 to 13 of a descriptor hold the start, 16 to 29 the
    step between blocks along the row, 32 to 45 that between blocks of eight rows, all in 16 bytes; the last two bits
    the width of a block, whose 16-byte pieces lie in an order of their own in each row (128: as by exclusive or)."""
    start, along, down = (((descriptor >> bit) & 0x3FFF) << 4 for bit in (0, 16, 32))
    if descriptor >> 62 == 0:
        raise NotImplementedError("operands whose rows do not lie in blocks of 32, 64 or 128 bytes")
    pitch = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
    row, k = np.arange(rows)[:, None], np.arange(16)[None]
    if turned:
        per_block = pitch // 2
        at = start + row // per_block * along + k // 8 * down + k % 8 * pitch + 2 * (row % per_block)
    else:
        at = start + row // 8 * down + row % 8 * pitch + 2 * k
    return at ^ ((at >> 7 & (pitch // 16 - 1)) << 4)


def _read_asynchronously(block: Block, at: np.ndarray, first_warp: int, text: str, own: int) -> np.ndarray:
    shared = block.shared
    row = np.arange(len(at))[:, None]
    warps = np.broadcast_to(first_warp + (row // own if own else 0), at.shape).ravel()
    index, _ = shared.marks(at.ravel(), warps, 2, text)
    if shared.unfenced[index].any():
        raise Fault(f"race: reads past a fence of the asynchronous proxy that is missing: {text}")
    readers = warps if own else np.full_like(warps, SEVERAL)  # the right operand is read by all four
    shared.note_read(index, readers, text)
    shared.in_flight[index] += 1  # once, however often a product reads a place

    def finish() -> None:
        """The read lasts until here: who writes next must have met the other warps at a barrier since."""
        shared.in_flight[index] -= 1
        shared.note_read(index, readers, text)

    block.products[-1].append(finish)
    return shared.bytes.read(at.ravel(), 2, 1, text).reshape(at.shape).astype(np.uint32)


@instruction("fence")
def _fence(block: Block, s: Statement) -> Action:
    """Of the proxies: what was written is there for asynchronous products."""
    if s.parts[1] == "proxy":
        return lambda on: block.shared.unfenced.fill(False)
    return lambda on: None
