"""Sums of 2 to 30 terms in one set of prompts, for a base policy whose errors compound.

Prompts, answers and reward are those of :mod:`python_trainer.tasks.arithmetic`. The base policy ``sums`` slips in
single steps, later steps build on what is wrong, and so the chance of a right answer falls with the number of terms,
from 0.9 to 0: here length is difficulty.
"""

import random

from python_trainer.tasks.arithmetic import accuracy, draw_splits
from python_trainer.tasks.base import Task
from python_trainer.tasks.settings import TaskSettings

# Number of terms -> weight. Answers have 14 to 350 tokens.
TERMS = (
    {2: 0.28, 3: 0.08, 4: 0.04}
    | {n: 0.2 / 8 for n in range(5, 13)}
    | {n: 0.14 / 12 for n in range(13, 25)}
    | {n: 0.26 / 6 for n in range(25, 31)}
)
SIZES = {"train": 192, "gate": 512, "test": 4096}


class SumsSettings(TaskSettings):
    """Settings of the task; by default it has 192 training, 512 gate and 4,096 test examples."""

    name: str = "sums"

    def load(self) -> Task:
        """The task; its training, gate and test prompts are disjoint, and a seed always gives the same ones."""
        chosen = {split: getattr(self, f"{split}_size") for split in SIZES}
        sizes = [SIZES[split] if size is None else size for split, size in chosen.items()]
        train, gate, test = draw_splits(random.Random(f"sums/{self.seed}"), TERMS, sizes)
        return Task("sums", train, test, {"accuracy": accuracy}, gate)
