"""Sums of two-digit numbers with every partial sum written out.

Prompt ``12+34+56=``, answer ``12+34=46\\n46+56=102\\nA:102``. The short variant has 2 to 10 terms, mostly few;
the long variant 20 to 24, which makes answers of 200 tokens and more; the longest 40 to 48, with answers of about 500.
Terms of one prompt are distinct.
"""

import random
import re
from collections.abc import Sequence
from typing import Literal

from python_trainer.data import Example
from python_trainer.tasks.base import Task
from python_trainer.tasks.settings import TaskSettings

Variant = Literal["short", "long", "longest"]

# Number of terms -> weight. Short: about 33 answer tokens in the mean, from 14 to about 105.
TERMS: dict[Variant, dict[int, float]] = {
    "short": {2: 0.34, 3: 0.26, 4: 0.16, 5: 0.10, 6: 0.06, 7: 0.03, 8: 0.02, 9: 0.015, 10: 0.015},
    "long": {20: 0.2, 21: 0.2, 22: 0.2, 23: 0.2, 24: 0.2},
    "longest": {n: 1.0 for n in range(40, 49)},
}
SIZES = {"train": 512, "gate": 2048, "test": 8192}

FINAL_ANSWER = re.compile(r"(?:\A|\n)A:(0|[1-9][0-9]*)\Z")


def draw_terms(rng: random.Random, weights: dict[int, float]) -> list[int]:
    """Distinct two-digit terms; their number drawn by ``weights``."""
    count = rng.choices(list(weights), list(weights.values()))[0]
    return rng.sample(range(10, 100), count)


def prompt_of(terms: Sequence[int]) -> str:
    """``12+34+56=``."""
    return "+".join(map(str, terms)) + "="


def solution(terms: Sequence[int], slip_step: int | None = None, slip: int = 0) -> str:
    """The answer with its partial sums; step ``slip_step`` is off by ``slip``, and later steps build on it."""
    partial, lines = terms[0], []
    for step, term in enumerate(terms[1:]):
        result = partial + term + (slip if step == slip_step else 0)
        lines.append(f"{partial}+{term}={result}")
        partial = result
    return "\n".join([*lines, f"A:{partial}"])


def final_answer(text: str) -> int | None:
    """The number after ``A:``, if the text has exactly one ``A:`` and ends with that line; otherwise None."""
    match = FINAL_ANSWER.search(text)
    return int(match[1]) if match and text.count("A:") == 1 and len(match[1]) < 20 else None


def accuracy(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[int],
    **_: object,
) -> list[float | None]:
    """1 for every completion whose final answer is the sum, else 0. Steps are not looked at."""
    return [float(final_answer(text) == gold) for text, gold in zip(completions, answer, strict=True)]


def draw_splits(rng: random.Random, weights: dict[int, float], sizes: Sequence[int]) -> list[list[Example]]:
    """One list of examples for each size, numbers of terms by ``weights``; no prompt occurs twice in any of them."""
    seen: set[str] = set()
    splits = []
    for size in sizes:
        examples: list[Example] = []
        while len(examples) < size:
            terms = draw_terms(rng, weights)
            prompt = prompt_of(terms)
            if prompt not in seen:
                seen.add(prompt)
                examples.append(Example(prompt, {"answer": sum(terms), "terms": len(terms)}))
        splits.append(examples)
    return splits


def draw_examples(variant: Variant, seed: int, sizes: Sequence[int]) -> list[list[Example]]:
    """The splits of a variant, of these sizes."""
    return draw_splits(random.Random(f"arithmetic/{variant}/{seed}"), TERMS[variant], sizes)


def arithmetic_task(variant: Variant, seed: int, *, train_size: int, gate_size: int, test_size: int) -> Task:
    """The task; its training, gate and test prompts are disjoint, and a seed always gives the same ones."""
    train, gate, test = draw_examples(variant, seed, (train_size, gate_size, test_size))
    return Task(f"arithmetic-{variant}", train, test, {"accuracy": accuracy}, gate)


class ArithmeticSettings(TaskSettings):
    """Settings of the task; by default it has 512 training, 2,048 gate and 8,192 test examples."""

    name: str = "arithmetic"
    variant: Variant = "short"
    """2 to 10 terms, 20 to 24 with answers of 200 tokens and more, or 40 to 48 with about 500."""

    def load(self) -> Task:
        chosen = {split: getattr(self, f"{split}_size") for split in SIZES}
        sizes = {f"{split}_size": SIZES[split] if size is None else size for split, size in chosen.items()}
        return arithmetic_task(self.variant, self.seed, **sizes)
