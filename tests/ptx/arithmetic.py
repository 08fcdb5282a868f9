"""Instructions of one thread that touch no memory: numbers, comparisons, conversions, moves."""

from collections.abc import Callable

import numpy as np

from ptx.block import Action, Block, Mask, instruction, to_bfloat16
from ptx.memory import BITS
from ptx.program import TYPES, Statement, unbrace

np.seterr(all="ignore")
FLOATS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "ex2": np.exp2, "rcp": np.reciprocal, "sqrt": np.sqrt, "min": np.fmin, "max": np.fmax,
    "fma": lambda a, b, c: _fused(a, b, c),
}  # fmt: skip
INTEGERS = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not, "neg": np.negative, "abs": np.abs,
    "div": lambda a, b: _divide(a, b), "rem": lambda a, b: a - b * _divide(a, b),
    "shl": lambda a, n: _shift(np.left_shift, a, n), "shr": lambda a, n: _shift(np.right_shift, a, n),
    "bfe": lambda a, first, length: _field(a, first, length), "popc": np.bitwise_count,
    "prmt": lambda a, b, choice: _permute(a, b, choice),
}  # fmt: skip
# those that our kernels use; false where a number is missing, but for those that end in u
COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~_missing(a, b),
    "neu": np.not_equal, "leu": lambda a, b: ~(a > b), "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: _missing(a, b), "num": lambda a, b: ~_missing(a, b),
}  # fmt: skip
ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _missing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != a) | (b != b)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once, nearly: a product of float32 is exact in float64; of float64, in the long double of the CPU."""
    wide = {2: np.float64, 4: np.float64, 8: np.longdouble}[a.dtype.itemsize]
    return (a.astype(wide) * b + c).astype(a.dtype)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Round towards zero; a division by zero sets all bits."""
    divisor = np.where(b == 0, 1, b).astype(a.dtype)
    down = a // divisor
    quotient = down + ((down < 0) & (down * divisor != a)).astype(a.dtype)
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def _shift(shift: np.ufunc, a: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Beyond all bits nothing is left but the sign."""
    most = 8 * a.dtype.itemsize - 1
    shifted = shift(a, np.minimum(count, most).astype(a.dtype))
    return np.where(count > most, shift(shifted, np.array(1, a.dtype)), shifted)


def _field(a: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``length`` bits from the bit ``first`` on, of 32."""
    value = (a.astype(np.int64) & 0xFFFFFFFF) >> first.astype(np.int64) & (1 << length.astype(np.int64)) - 1
    sign = value >> np.maximum(length.astype(np.int64) - 1, 0) & 1 if a.dtype.kind == "i" else 0
    return (value - (sign << length.astype(np.int64))).astype(a.dtype)


def _permute(a: np.ndarray, b: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """Four bytes out of eight, those of a and b, by four bits each; the highest takes the byte's sign alone."""
    both, out = b.astype(np.int64) << 32 | a.astype(np.int64), np.zeros(np.shape(a), np.int64)
    for place in range(4):
        number = choice.astype(np.int64) >> 4 * place & 15
        byte = both >> 8 * (number & 7) & 255
        out |= np.where(number & 8, (byte >> 7) * 255, byte) << 8 * place
    return out.astype(a.dtype)


def _apply(block: Block, s: Statement, function: Callable[..., np.ndarray], kinds: list[str]) -> Action:
    """The first operand becomes this function of the others, which are read as of these types."""
    reads = [block.read(operand, kind) for operand, kind in zip(s.operands[1:], kinds, strict=True)]
    return lambda on: block.write(s.operands[0], function(*[read() for read in reads]), on)


@instruction("add", "sub", "min", "max", "and", "or", "xor", "not", "neg", "abs", "div", "rem", "shl", "shr", "bfe",
             "popc", "prmt", "fma", "ex2", "rcp", "sqrt")  # fmt: skip
def _compute(block: Block, s: Statement) -> Action:
    function = (FLOATS if s.kind[0] == "f" else INTEGERS)[s.name]
    if "NaN" in s.parts:
        function = {"min": np.minimum, "max": np.maximum}[s.name]
    if s.kind in ("bf16", "bf16x2"):
        return _extremes(block, s, function if "NaN" in s.parts else FLOATS[s.name])
    # a count of bits is of 32 bits whatever is shifted
    kinds = [s.kind if i == 0 or s.name not in ("shl", "shr", "bfe") else "u32" for i in range(len(s.operands) - 1)]
    return _apply(block, s, function, kinds)


def _extremes(block: Block, s: Statement, function: Callable[..., np.ndarray]) -> Action:
    """Minima or maxima of bfloat16, one or two in 32 bits, which need no rounding."""
    assert s.name in ("min", "max"), s.text
    if s.kind == "bf16":
        return _apply(block, s, lambda *numbers: to_bfloat16(function(*numbers)), [s.kind] * 2)

    def both(*pairs: np.ndarray) -> np.ndarray:
        low = to_bfloat16(function(*[(pair << 16).view(np.float32) for pair in pairs]))
        high = to_bfloat16(function(*[(pair & 0xFFFF0000).view(np.float32) for pair in pairs]))
        return high.astype(np.uint32) << 16 | low

    return _apply(block, s, both, ["u32"] * 2)


@instruction("mul", "mad")
def _multiply(block: Block, s: Statement) -> Action:
    """mul.lo, mul.hi and mul.wide of integers, with a sum after it or without; mul of floats."""
    if s.kind[0] == "f":
        return _compute(block, s)
    half, size = s.parts[1], TYPES[s.kind].itemsize
    wide = f"{s.kind[0]}{16 * size}"

    def multiply(a: np.ndarray, b: np.ndarray, *more: np.ndarray) -> np.ndarray:
        if half == "lo":
            product = a * b
        else:
            product = a.astype(TYPES[wide]) * b.astype(TYPES[wide])
            product = (product >> np.array(8 * size, product.dtype)).astype(a.dtype) if half == "hi" else product
        return sum(more, product)

    kinds = [s.kind, s.kind, wide if half == "wide" else s.kind]
    return _apply(block, s, multiply, kinds[: len(s.operands) - 1])


@instruction("setp")
def _compare(block: Block, s: Statement) -> Action:
    return _apply(block, s, COMPARISONS[s.parts[1]], [s.kind] * 2)


@instruction("selp")
def _select(block: Block, s: Statement) -> Action:
    return _apply(block, s, lambda a, b, first: np.where(first, a, b), [s.kind, s.kind, "pred"])


@instruction("mov", "cvta")
def _move(block: Block, s: Statement) -> Action:
    """A register, or one of several parts taken apart or put together."""
    to, source = s.operands
    if not to.startswith("{") and not source.startswith("{"):
        return _apply(block, s, lambda value: value, [s.kind])
    parts = unbrace(to if to.startswith("{") else source)
    bits = 8 * TYPES[s.kind].itemsize // len(parts)
    if to.startswith("{"):
        read, small = block.read(source, f"u{bits * len(parts)}"), BITS[bits // 8]

        def take_apart(on: Mask) -> None:
            values = read().copy()
            for i, part in enumerate(parts):
                block.write(part, (values >> np.array(bits * i, values.dtype)).astype(small), on)

        return take_apart
    reads, large = [block.read(part, f"u{bits}") for part in parts], TYPES[s.kind]

    def put_together(on: Mask) -> None:
        block.write(to, sum(read().astype(large) << np.array(bits * i, large) for i, read in enumerate(reads)), on)

    return put_together


@instruction("cvt")
def _convert(block: Block, s: Statement) -> Action:
    to, source = s.parts[-2:]
    if to.endswith("x2"):  # the first operand becomes the high half
        narrow = to_bfloat16 if to == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)
        return _apply(
            block, s, lambda high, low: narrow(high).astype(np.uint32) << np.uint32(16) | narrow(low), [source] * 2
        )
    if to == "bf16":
        return _apply(block, s, to_bfloat16, [source])
    rounding = next((ROUNDINGS[part] for part in s.parts if part in ROUNDINGS), None)
    target, from_float = TYPES[to], source[0] == "f" or source == "bf16"
    if not from_float or to[0] == "f":
        return _apply(block, s, lambda value: (rounding(value) if rounding else value).astype(target), [source])
    least, most = np.iinfo(target).min, np.iinfo(target).max

    def to_whole(value: np.ndarray) -> np.ndarray:
        """Beyond the range its end; 0 where a number is missing."""
        value = rounding(value.astype(np.float64))
        inside = (value > float(least)) & (value < float(most))
        whole = np.where(inside, value, 0).astype(target)
        ends = np.where(value > 0, np.array(most, target), np.array(least, target))
        return np.where(inside | np.isnan(value), whole, ends)

    return _apply(block, s, to_whole, [source])
