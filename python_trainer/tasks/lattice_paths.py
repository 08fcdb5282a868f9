"""Paths through a random grid, one cell a row, to be drawn into it: a task in which length tells nothing.

A prompt is a grid of ``ROWS`` rows of ``WIDTH`` cells, half of them blocked (``#``), with the start marked ``o`` in the
first row. The answer redraws the rows below with one ``o`` in each, on an open cell (``.``) and at most one column away
from that of the row above, down to the last row. Prompts and answers all have the same length; what differs is how
often a path that steps on any open cell runs into a dead end. A prompt's ``chance`` is that of such a blind walker to
get through (:func:`chances`), and the prompts are drawn so that it is spread (``STRATA``).
"""

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from python_trainer.data import Example
from python_trainer.tasks.base import Task
from python_trainer.tasks.settings import TaskSettings

ROWS = 16
WIDTH = 6
BLOCKED = 3  # cells of every row but the first
STRATA = ((0.3, 0.9, 1.0), (0.3, 0.03, 0.1), (0.4, 0.0, 0.01))  # share of the prompts, least and largest chance
SIZES = {"train": 192, "gate": 512, "test": 4096}
DRAW_SIZE = 16384  # grids drawn at a time
PATTERNS = np.array([row for row in product((False, True), repeat=WIDTH) if sum(row) == WIDTH - BLOCKED])  # of a row


def draw_grids(rng: np.random.Generator, count: int) -> NDArray[np.bool_]:
    """Draw which cells are open, [count, ROWS, WIDTH]; in the first row the start alone."""
    grids = PATTERNS[rng.integers(len(PATTERNS), size=(count, ROWS))]
    grids[:, 0] = np.arange(WIDTH) == rng.integers(WIDTH, size=(count, 1))
    return grids


def reached(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the three cells below each, from [..., WIDTH + 2, count] with margins: [..., WIDTH, count]."""
    return values[..., :-2, :] + values[..., 1:-1, :] + values[..., 2:, :]


def chances(grids: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return a blind walker's chance to get from each cell to the last row, [count, ROWS, WIDTH]; 0: no path."""
    chance = np.zeros((ROWS, WIDTH + 2, len(grids)))
    chance[:, 1:-1] = grids.transpose(1, 2, 0)
    open_below = np.maximum(reached(chance), 1.0)
    for row in range(ROWS - 2, -1, -1):
        chance[row, 1:-1] *= reached(chance[row + 1]) / open_below[row + 1]
    return chance[:, 1:-1].transpose(2, 0, 1)


def prompt_of(grid: NDArray[np.bool_]) -> str:
    """Write the rows of a grid, one a line; in the first row the start is the only open cell."""
    first, *rows = grid.tolist()
    lines = ["".join("#o"[cell] for cell in first), *("".join("#."[cell] for cell in row) for row in rows)]
    return "\n".join(lines) + "\n"


def correct(prompt: str, text: str) -> bool:
    """Return whether the text is the prompt without its first row, with a path from the start drawn into it."""
    first, *rows = prompt.splitlines()
    lines = text.split("\n")
    if len(lines) != len(rows):
        return False
    column = first.index("o")
    for row, line in zip(rows, lines):
        column_above = column
        column = line.find("o")
        if not 0 <= column < len(row) or row[:column] + "o" + row[column + 1 :] != line:
            return False
        if row[column] != "." or abs(column - column_above) > 1:
            return False
    return True


def accuracy(
    prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: object
) -> list[float | None]:
    """Return 1 for every completion that is a path, else 0."""
    return [float(correct(prompt, text)) for prompt, text in zip(prompts, completions, strict=True)]


@cache
def draw_examples(split: str, count: int) -> list[Example]:
    """Draw distinct prompts in random order; a larger count begins with the same prompts."""
    seed = [0, ROWS, WIDTH, *split.encode()]
    stratum_rng = np.random.default_rng([*seed, 0])
    grid_rng = np.random.default_rng([*seed, 1])
    strata = stratum_rng.choice(len(STRATA), size=count, p=[share for share, *_ in STRATA])
    unfilled = [np.flatnonzero(strata == stratum).tolist()[::-1] for stratum in range(len(STRATA))]
    examples: dict[int, Example] = {}
    seen: set[str] = set()
    while len(examples) < count:
        grids = draw_grids(grid_rng, DRAW_SIZE)
        start_chances = chances(grids)[:, 0].max(-1)
        for places, (_, smallest, largest) in zip(unfilled, STRATA):
            fits = np.flatnonzero((start_chances > 0) & (smallest <= start_chances) & (start_chances <= largest))
            for index in fits[: len(places)]:
                prompt = prompt_of(grids[index])
                if prompt not in seen:
                    seen.add(prompt)
                    examples[places.pop()] = Example(prompt, {"chance": float(start_chances[index])})
    return [examples[place] for place in range(count)]


class LatticePathsSettings(TaskSettings):
    """Settings of the task; by default it has 192 training, 512 gate and 4,096 test examples."""

    name: str = "lattice_paths"

    def load(self) -> Task:
        """Draw the task; its prompts are always the same, whatever the sizes."""
        set_sizes = {split: size for split in SIZES if (size := getattr(self, f"{split}_size")) is not None}
        train, gate, test = (draw_examples(split, size) for split, size in (SIZES | set_sizes).items())
        return Task("lattice_paths", train, test, {"accuracy": accuracy}, gate)
