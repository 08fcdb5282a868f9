"""Sums of two-digit numbers with every partial sum written out.

Prompt ``12+34+56=``, answer ``12+34=46\\n46+56=102\\nA:102``. The terms of a prompt are distinct.

The base policy ``sums`` slips in single steps and later steps build on the slip, so its chance of a right answer falls
with the number of terms, from 0.9 to 0. The base policy ``small`` knows the short variant.
"""

import random
import re
from collections.abc import Sequence
from typing import Literal

from python_trainer.data import Example
from python_trainer.tasks.base import Task
from python_trainer.tasks.settings import TaskSettings

Variant = Literal["all", "short", "longest"]

# Number of terms -> weight.
TERMS: dict[Variant, dict[int, float]] = {
    "all": {2: 0.28, 3: 0.08, 4: 0.04}
    | {n: 0.2 / 8 for n in range(5, 13)}
    | {n: 0.14 / 12 for n in range(13, 25)}
    | {n: 0.26 / 6 for n in range(25, 31)},
    "short": {2: 0.34, 3: 0.26, 4: 0.16, 5: 0.10, 6: 0.06, 7: 0.03, 8: 0.02, 9: 0.015, 10: 0.015},
    "longest": {n: 1.0 for n in range(40, 49)},
}
SIZES = {"train": 192, "gate": 512, "test": 4096}

FINAL_ANSWER = re.compile(r"(?:\A|\n)A:(0|[1-9][0-9]*)\Z")


def draw_terms(rng: random.Random, weights: dict[int, float]) -> list[int]:
    """Draw distinct two-digit terms; ``weights`` decides how many."""
    count = rng.choices(list(weights), list(weights.values()))[0]
    return rng.sample(range(10, 100), count)


def prompt_of(terms: Sequence[int]) -> str:
    """Return ``12+34+56=``."""
    return "+".join(map(str, terms)) + "="


def solution(terms: Sequence[int], slip_step: int | None = None, slip: int = 0) -> str:
    """Return the answer with its partial sums; step ``slip_step`` is off by ``slip``, and later steps build on it."""
    partial, lines = terms[0], []
    for step, term in enumerate(terms[1:]):
        result = partial + term + (slip if step == slip_step else 0)
        lines.append(f"{partial}+{term}={result}")
        partial = result
    return "\n".join([*lines, f"A:{partial}"])


def final_answer(text: str) -> int | None:
    """Return the number after ``A:`` if the text has exactly one ``A:`` and ends with that line, else None."""
    match = FINAL_ANSWER.search(text)
    return int(match[1]) if match and text.count("A:") == 1 and len(match[1]) < 20 else None


def accuracy(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[int],
    **_: object,
) -> list[float | None]:
    """Return 1 for every completion whose final answer is the sum, else 0. The steps do not count."""
    return [float(final_answer(text) == gold) for text, gold in zip(completions, answer, strict=True)]


def draw_examples(variant: Variant, sizes: Sequence[int]) -> list[list[Example]]:
    """Draw one list of examples for each size, always the same; no prompt occurs twice in any of them."""
    rng = random.Random("sums/0" if variant == "all" else f"sums/{variant}/0")
    seen: set[str] = set()
    splits = []
    for size in sizes:
        examples: list[Example] = []
        while len(examples) < size:
            terms = draw_terms(rng, TERMS[variant])
            prompt = prompt_of(terms)
            if prompt not in seen:
                seen.add(prompt)
                examples.append(Example(prompt, {"answer": sum(terms), "terms": len(terms)}))
        splits.append(examples)
    return splits


class SumsSettings(TaskSettings):
    """Settings of the task; by default it has 192 training, 512 gate and 4,096 test examples."""

    name: str = "sums"
    variant: Variant = "all"
    """all: 2 to 30 terms; short: 2 to 10; longest: 40 to 48, with answers of about 500 tokens."""

    def load(self) -> Task:
        """Draw the task; its splits are disjoint, and its prompts always the same."""
        chosen = {split: size for split in SIZES if (size := getattr(self, f"{split}_size")) is not None}
        train, gate, test = draw_examples(self.variant, list((SIZES | chosen).values()))
        return Task("sums", train, test, {"accuracy": accuracy}, gate)
