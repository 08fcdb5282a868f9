"""PTX as text -> the statements of a kernel, its parameters and registers."""

import re
from dataclasses import dataclass

import numpy as np

# as numpy computes with them; a bfloat16 lies in 16 bits and is computed with in float32
TYPES = {
    **{f"u{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)}, **{f"b{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    **{f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)}, **{f"f{8 * n}": np.dtype(f"f{n}") for n in (2, 4, 8)},
    "bf16": np.dtype("u2"),
}  # fmt: skip
OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,{\[\s][^,{\[]*)")


@dataclass(frozen=True)
class Statement:
    """``@%p1 add.rn.f32 %r1, %r2, %r3`` -> guard "%p1", name "add", parts (add, rn, f32), three operands."""

    text: str
    guard: str
    name: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The type: the last part."""
        return self.parts[-1]


@dataclass(frozen=True)
class Program:
    parameters: dict[str, tuple[int, int]]  # name -> first byte, bytes
    registers: dict[str, str]  # "%r" for all of %r0, %r1, ..., or a whole name -> type
    labels: dict[str, int]  # -> index of a statement
    statements: list[Statement]

    def register_type(self, name: str) -> str | None:
        return self.registers.get(name) or self.registers.get(name.rstrip("0123456789"))


def unbrace(operand: str) -> list[str]:
    """``{%r1, %r2}`` -> its registers; one register -> itself alone."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def entries(text: str) -> list[str]:
    """The names of the kernels."""
    return re.findall(r"\.entry\s+(\w+)", text)


def parse(text: str, entry: str) -> Program:
    text = re.sub(r"//[^\n]*", "", text)
    match = re.search(rf"\.entry\s+{entry}\s*\((.*?)\)[^{{]*\{{", text, re.DOTALL)
    assert match, f"no kernel {entry} among {entries(text)}"
    depth, end = 1, match.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    body = re.sub(r"^\s*\.(loc|file|pragma|section)\b[^\n]*", "", text[match.end() : end - 1], flags=re.MULTILINE)
    registers, labels, statements = {}, {}, []
    for piece in body.split(";"):
        line = " ".join(piece.split()).lstrip("{} ")  # scopes of inline code name no registers twice
        while label := re.match(r"(\$\w+):\s*[{} ]*", line):
            labels[label[1]] = len(statements)
            line = line[label.end() :]
        if one := re.match(r"\.reg \.(\w+) (%?\w+)(<\d+>)?$", line):
            registers[one[2]] = one[1]
        elif line and not line.startswith("."):
            statements.append(statement(line))
    return Program(_parameters(match[1]), registers, labels, statements)


def statement(line: str) -> Statement:
    match = re.match(r"(?:@(!?%\w+) )?([\w.:]+)\s*(.*)$", line)
    assert match, f"no statement: {line}"
    operands = tuple(operand.strip() for operand in OPERAND.findall(match[3]))
    parts = tuple(match[2].replace("shared::cta", "shared").replace("::", "_").split("."))  # Triton 3.9 adds the first
    return Statement(line, match[1] or "", parts[0], parts, operands)


def _parameters(text: str) -> dict[str, tuple[int, int]]:
    places, end = {}, 0
    for line in filter(None, map(str.strip, text.split(","))):
        if struct := re.match(r"\.param \.align (\d+) \.b8 (\w+)\[(\d+)\]", line):
            align, name, size = int(struct[1]), struct[2], int(struct[3])
        else:
            name, kind = line.split()[-1], line.split()[1][1:]
            size = align = TYPES[kind].itemsize
        end = -(-end // align) * align
        places[name] = (end, size)
        end += size
    return places
