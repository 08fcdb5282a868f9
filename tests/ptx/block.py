"""A thread block: its registers, and its threads side by side through a program."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from ptx.memory import BITS, Fault, Global, Shared
from ptx.program import TYPES, Program, Statement

Mask = np.ndarray | None  # the threads that take part; None: all
Action = Callable[[Mask], None]
Values = Callable[[], np.ndarray]
# name of an instruction -> (block, statement) -> what it does; the files of this folder fill it
INSTRUCTIONS: dict[str, Callable[["Block", Statement], Action]] = {}
MOST_STEPS = 10**7
AXES = "xyz"


def instruction(*names: str) -> Callable:
    def register(build: Callable[["Block", Statement], Action]) -> Callable:
        INSTRUCTIONS.update(dict.fromkeys(names, build))
        return build

    return register


class Block:
    """Threads of the least program counter run together, which also brings together again what went separate ways."""

    def __init__(self, program: Program, memory: Global, threads: int, shared: int) -> None:
        self.program, self.memory, self.threads = program, memory, threads
        self.shared = Shared(shared)
        self.thread = np.arange(threads)
        self.warp, self.lane = self.thread // 32, self.thread % 32
        self.warps = threads // 32
        self.parameters = np.zeros(4096, np.uint8)
        self.places = {f"%{what}.{axis}": np.zeros(threads, np.uint32) for what in ("ctaid", "nctaid") for axis in AXES}
        self.registers = {"%tid.x": self.thread.astype(np.uint32), **self.places}
        self.fixed = {*self.registers}
        # groups of asynchronous copies and of products; the last one is open
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.products: list[list[Callable[[], None]]] = [[]]
        self.running: dict[str, np.ndarray] = {}  # register -> the sum that a product under way gives it
        self.issued: Counter[str] = Counter()  # warps times statements, by the name of the instruction
        # blocks that ran; bytes between them and global memory; operations of tensor cores
        self.runs, self.moved, self.flops = 0, 0, 0
        self.guards = [self.read(s.guard, "pred") if s.guard else None for s in program.statements]
        self.actions = [self._action(s) for s in program.statements]

    def _action(self, s: Statement) -> Action | None:
        try:
            return None if s.name in CONTROL else INSTRUCTIONS[s.name](self, s)
        except KeyError as missing:
            raise NotImplementedError(f"{missing} in {s.text}") from missing

    def launch(self, arguments: Sequence[bytes], grid: tuple[int, int, int]) -> None:
        """Make ready for the blocks of one grid."""
        for (start, size), value in zip(self.program.parameters.values(), arguments, strict=True):
            self.parameters[start : start + size] = np.frombuffer(value, np.uint8)[:size]
        for axis, size in zip(AXES, grid):
            self.places[f"%nctaid.{axis}"].fill(size)

    # registers

    def register(self, name: str) -> np.ndarray:
        """Its values, one per thread."""
        if name not in self.registers:
            kind = self.program.register_type(name)
            if kind is None:
                raise NotImplementedError(f"the operand {name}")
            self.registers[name] = np.zeros(self.threads, bool if kind == "pred" else BITS[TYPES[kind].itemsize])
        return self.registers[name]

    def read(self, operand: str, kind: str) -> Values:
        """A function -> the operand's values as of this type; bfloat16 as float32."""
        if kind == "bf16":
            bits = self.read(operand, "b16")
            return lambda: from_bfloat16(bits())
        if operand.startswith("!"):
            negated = self.register(operand[1:])
            return lambda: ~negated
        if kind == "pred" and not operand.startswith("%"):
            constant = np.full(self.threads, operand != "0")
            return lambda: constant
        if operand[0] != "%" and not self.program.register_type(operand):
            constant = np.full(self.threads, number(operand, kind))
            return lambda: constant
        held = self.register(operand)
        if kind == "pred":
            return lambda: held
        element = TYPES[kind]
        if held.dtype.itemsize == element.itemsize:
            view = held.view(element)
            return lambda: view
        return lambda: held.astype(BITS[element.itemsize]).view(element)  # low bits, or zeros before them

    def write(self, name: str, values: np.ndarray, on: Mask) -> None:
        """Extend integers by their own sign, or cut them."""
        if name == "_":
            return
        if values.dtype.kind == "f":
            values = values.view(BITS[values.dtype.itemsize])
        if on is None:
            self.register(name)[:] = values
        else:
            np.copyto(self.register(name), values, where=on, casting="unsafe")

    def address(self, operand: str, kind: str) -> Values:
        """``[%rd1 + 16]`` -> int64."""
        match = re.match(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        assert match, operand
        base, offset = self.read(match[1], kind), int(match[2] or "0", 0)
        return lambda: base().astype(np.int64) + offset

    def chosen(self, on: Mask) -> np.ndarray:
        """The numbers of the threads that take part."""
        return self.thread if on is None else np.flatnonzero(on)

    def whole_warps(self, on: Mask, text: str) -> None:
        if on is not None and not np.isin(on.reshape(-1, 32).sum(1), (0, 32)).all():
            raise Fault(f"lanes are missing: {text}")

    # running

    def run(self, place: tuple[int, int, int]) -> None:
        """Runs the block at this place of the grid."""
        self.runs += 1
        for name, values in self.registers.items():
            if name not in self.fixed:
                values.view(np.uint8).fill(0 if values.dtype == bool else 0xA5)
        for axis, index in zip(AXES, place):
            self.places[f"%ctaid.{axis}"].fill(index)
        self.shared.begin()
        self.copies, self.products, self.running = [[]], [[]], {}
        self._loop()
        if any(self.copies):
            raise Fault("a block ended before its asynchronous copies")
        self.land(self.products, 0)
        if any(self.products):
            raise Fault("a block ended before its asynchronous products")

    def _loop(self) -> None:
        statements, end = self.program.statements, len(self.program.statements)
        counter, waiting, steps = np.zeros(self.threads, np.int64), np.zeros(self.threads, bool), 0
        while True:
            ready = (counter < end) & ~waiting
            if not ready.any():
                if not waiting.any():
                    return
                waiting[:] = False
                self.shared.interval += 1
                continue
            at = int(counter[ready].min())
            on = ready & (counter == at)
            mask, warps = (None, self.warps) if on.all() else (on, count_warps(on))
            behind = counter[ready & ~on]
            stop = int(behind.min()) if len(behind) else end  # where others wait to go on together
            while at < stop:
                steps += 1
                if steps > MOST_STEPS:
                    raise Fault("does not end")
                statement, action, guard = statements[at], self.actions[at], self.guards[at]
                at += 1
                taking, taking_warps = mask, warps
                if guard is not None:
                    taking = guard() if mask is None else guard() & on
                    many = np.count_nonzero(taking)
                    taking, taking_warps = (None, warps) if many == self.threads else (taking, count_warps(taking))
                    if many == 0:
                        continue
                self.issued[statement.name] += taking_warps
                if action is not None:
                    action(taking if taking is None or guard is None else taking.copy())
                    continue
                if statement.name == "bra":
                    counter[on] = at
                    counter[on if taking is None else taking] = self.program.labels[statement.operands[0]]
                elif statement.name == "bar" and statement.parts[1] != "warp":
                    counter[on], waiting[on] = at, True
                elif statement.name == "ret":
                    counter[on] = at
                    counter[on if taking is None else taking] = end
                else:
                    continue
                break
            else:
                counter[on] = at

    def land(self, groups: list, left: int) -> None:
        """End all but the last ``left`` of the closed groups, the oldest first."""
        while len(groups) - 1 > left:
            for finish in groups.pop(0):
                finish()


CONTROL = ("bra", "bar", "ret")


def count_warps(on: np.ndarray) -> int:
    return int(np.count_nonzero(on.reshape(-1, 32).any(1)))


def number(text: str, kind: str) -> np.generic:
    element = TYPES[kind]
    if text.startswith(("0f", "0d")):
        bits = int(text[2:], 16)
        return np.array(bits, BITS[4 if text[1] == "f" else 8]).view("f4" if text[1] == "f" else "f8")[()]
    if not re.match(r"-?(0x[0-9a-fA-F]+|\d+)U?$", text):  # a symbol: memory of its own begins at 0
        return element.type(0)
    value = int(text.rstrip("U"), 0)
    if element.kind == "f":
        return element.type(value)
    return np.array(value % 2 ** (8 * element.itemsize), BITS[element.itemsize]).view(element)[()]


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> bits, to the nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)
