"""Countdown: reach a target with all of three to five numbers and ``+ - *``, by trying.

Prompt ``3 7 15>25:``, answer ``3*7=21,21-15=6\\n3+7=10,10+15=25\\nA:3+7+15``. A line is an attempt: a chain from left
to right that takes up one number a step. The last line says the expression found. Only that line is judged. Numbers
are from 1 to 20; what a chain passes through lies in 0 to 99, and so does the target.

How hard a prompt is for blind search is known: of all chains that stay in range, the share that end at the target.
Prompts are drawn by it, in strata, so that some are nearly always found and others nearly never.
"""

import ast
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice, product
from typing import Annotated

import numpy
from pydantic import Field, field_validator

from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.tasks.base import Task
from python_trainer.tasks.settings import TaskSettings

NUMBERS = range(1, 21)
HIGHEST = 99  # of results and targets; the lowest is 0
OPERATORS = "+-*"
SIZES = {"train": 192, "gate": 512, "test": 4096}
PATIENCE = 1 << 14  # sets of numbers without a new prompt; of three numbers there are 1,540
FINAL_ANSWER = re.compile(r"(?:\A|\n)A:([0-9()+*-]{1,400})\Z")


@dataclass(frozen=True)
class Stratum:
    """Prompts alike in the chance that one random chain ends at the target."""

    share: float  # of all prompts
    count: int  # how many numbers they have
    low: float  # a random chain's chance is above this ...
    high: float  # ... and at most this


STRATA = {
    "easy": Stratum(0.30, 3, 0.17, 1.0),
    "rare": Stratum(0.15, 3, 0.03, 0.06),
    "middle": Stratum(0.25, 4, 0.02, 0.06),
    "hard": Stratum(0.30, 5, 0.0, 0.0015),
}


@dataclass(frozen=True)
class Chain:
    """An attempt: ``numbers[0]``, then an operator and the next number, from left to right."""

    numbers: tuple[int, ...]  # n
    operators: tuple[str, ...]  # n - 1
    results: tuple[int, ...]  # n - 1, after each step

    @property
    def line(self) -> str:
        """``3+7=10,10+15=25``."""
        before = (self.numbers[0], *self.results)
        steps = zip(before, self.operators, self.numbers[1:], self.results)
        return ",".join(f"{left}{operator}{right}={result}" for left, operator, right, result in steps)

    @property
    def expression(self) -> str:
        """The same with the usual precedence: ``3+7+15``, ``(3+7)*15``."""
        text, loose = str(self.numbers[0]), False  # loose: its last operation binds less than a product
        for operator, number in zip(self.operators, self.numbers[1:]):
            if operator == "*":
                text, loose = f"({text})" if loose else text, False
            else:
                loose = True
            text += f"{operator}{number}"
        return text


def apply(left: int, operator: str, right: int) -> int:
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def chain(numbers: Sequence[int], operators: Sequence[str]) -> Chain | None:
    """The chain, or None where a result is out of range."""
    value, results = numbers[0], []
    for operator, number in zip(operators, numbers[1:], strict=True):
        value = apply(value, operator, number)
        if not 0 <= value <= HIGHEST:
            return None
        results.append(value)
    return Chain(tuple(numbers), tuple(operators), tuple(results))


@cache
def origins() -> numpy.ndarray:
    """int64 [21, 100, 3]: for a number and a result, what a step with each operator starts from; 100: from nothing."""
    found = numpy.full((NUMBERS.stop, HIGHEST + 1, len(OPERATORS)), HIGHEST + 1)
    for number, before, (i, operator) in product(NUMBERS, range(HIGHEST + 1), enumerate(OPERATORS)):
        result = apply(before, operator, number)
        if 0 <= result <= HIGHEST:
            found[number, result, i] = before
    return found


def count_chains(numbers: Sequence[Sequence[int]]) -> numpy.ndarray:
    """Of all chains that stay in range, how many end at each result.

    Args:
        numbers: B times n numbers; each chain takes up all n.

    Returns:
        int64 [B, 100].
    """
    given = numpy.asarray(numbers)  # [B, n]
    batch, n = given.shape
    sources = origins()[given].reshape(batch, n, -1)  # [B, n, 300]
    ends: dict[frozenset[int], numpy.ndarray] = {}  # positions taken -> [B, 101], the last column zero
    for i in range(n):
        ends[frozenset([i])] = (given[:, i, None] == numpy.arange(HIGHEST + 2)).astype(numpy.int64)
    for size in range(2, n + 1):
        for taken in map(frozenset, combinations(range(n), size)):
            ends[taken] = numpy.zeros((batch, HIGHEST + 2), dtype=numpy.int64)
            for last in taken:
                ways = numpy.take_along_axis(ends[taken - {last}], sources[:, last], axis=1)
                ends[taken][:, :-1] += ways.reshape(batch, HIGHEST + 1, -1).sum(axis=2)
    return ends[frozenset(range(n))][:, :-1]


def prompt_of(numbers: Sequence[int], target: int) -> str:
    """``3 7 15>36:``."""
    return f"{' '.join(map(str, numbers))}>{target}:"


def value_of(node: ast.expr) -> int | None:
    """What a tree of sums, differences, products and whole numbers comes to; None where it has anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else None
    if not isinstance(node, ast.BinOp):
        return None
    signs: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
    operator, left, right = signs.get(type(node.op)), value_of(node.left), value_of(node.right)
    return None if operator is None or left is None or right is None else apply(left, operator, right)


def correct(numbers: Sequence[int], target: int, text: str) -> bool:
    """Whether the text ends with a line ``A:`` and an expression that uses each number exactly once and is the target.

    Digits, ``+ - *`` and parentheses, with the usual precedence; no sign before a number, no spaces. The lines before,
    and what the expression passes through, are not looked at.
    """
    match = FINAL_ANSWER.search(text)
    if match is None or sorted(re.findall("[0-9]+", match[1])) != sorted(map(str, numbers)):
        return False
    try:
        tree = ast.parse(match[1], mode="eval")
    except SyntaxError:
        return False
    return value_of(tree.body) == target


def accuracy(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    **_: object,
) -> list[float | None]:
    """1 for every completion whose last line is right, else 0."""
    return [float(correct(*row)) for row in zip(numbers, target, completions, strict=True)]


def for_pretraining(prompt: str) -> bool:
    """A quarter of all prompts is for pretraining alone, whatever the strata are; the task never shows one of them."""
    return zlib.crc32(prompt.encode()) % 4 == 0


def draw_numbers(rng: random.Random, count: int) -> Iterator[tuple[list[int], numpy.ndarray]]:
    """Endless sets of so many numbers, each with the chance [100] that a random chain ends at a result."""
    while True:
        batch = [sorted(rng.choices(NUMBERS, k=count)) for _ in range(256)]
        ends = count_chains(batch)
        yield from zip(batch, ends / ends.sum(axis=1, keepdims=True))


def draw_examples(seed: int, sizes: Sequence[int], counts: Sequence[int]) -> list[list[Example]]:
    """One list of examples for each size, as many numbers as ``counts`` allows; no prompt occurs twice.

    A stratum that has no more prompts leaves its share to the others.

    Raises:
        UserError: none of them has.
    """
    rng = random.Random(f"countdown/{seed}")
    pools = {count: draw_numbers(random.Random(f"countdown/{seed}/{count}"), count) for count in counts}
    strata = {name: stratum for name, stratum in STRATA.items() if stratum.count in counts}
    seen: set[str] = set()
    splits = []
    for size in sizes:
        examples: list[Example] = []
        while len(examples) < size:
            (name,) = rng.choices(list(strata), [stratum.share for stratum in strata.values()])
            example = draw_example(rng, name, pools[strata[name].count], seen)
            if example is None:
                del strata[name]
                if not strata:
                    raise UserError(
                        f"task.numbers {list(counts)} leaves {len(seen)} prompts, fewer than train_size, gate_size and "
                        f"test_size together, {sum(sizes)}"
                    )
                continue
            seen.add(str(example.prompt))
            examples.append(example)
        splits.append(examples)
    return splits


def draw_example(
    rng: random.Random, name: str, pool: Iterator[tuple[list[int], numpy.ndarray]], seen: set[str]
) -> Example | None:
    """A prompt of a stratum that was not seen; None: there seems to be none."""
    stratum = STRATA[name]
    for numbers, chances in islice(pool, PATIENCE):
        targets = numpy.flatnonzero((chances > stratum.low) & (chances <= stratum.high)).tolist()
        prompts = {target: prompt_of(numbers, target) for target in targets}
        unseen = [target for target, prompt in prompts.items() if not for_pretraining(prompt) and prompt not in seen]
        if unseen:
            target = rng.choice(unseen)
            columns = {"numbers": numbers, "target": target, "stratum": name, "chance": float(chances[target])}
            return Example(prompts[target], columns)
    return None


class CountdownSettings(TaskSettings):
    """Settings of the task; by default it has 192 training, 512 gate and 4,096 test examples."""

    name: str = "countdown"
    numbers: list[Annotated[int, Field(ge=3, le=5)]] = Field(default=[3, 4, 5])
    """How many numbers a prompt may have; each count has strata of difficulty of its own."""

    @field_validator("numbers")
    @classmethod
    def _some(cls, numbers: list[int]) -> list[int]:
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(f"must be some of 3, 4 and 5, each once, got {numbers}")
        return numbers

    def load(self) -> Task:
        """The task; its training, gate and test prompts are disjoint, and a seed always gives the same ones."""
        chosen = {split: getattr(self, f"{split}_size") for split in SIZES}
        sizes = [SIZES[split] if size is None else size for split, size in chosen.items()]
        train, gate, test = draw_examples(self.seed, sizes, self.numbers)
        return Task("countdown", train, test, {"accuracy": accuracy}, gate)
