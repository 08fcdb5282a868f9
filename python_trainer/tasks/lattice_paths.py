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

ROWS, WIDTH, BLOCKED = 16, 6, 3  # BLOCKED cells of every row but the first
STRATA = ((0.3, 0.9, 1.0), (0.3, 0.03, 0.1), (0.4, 0.0, 0.01))  # share of the prompts, least and largest chance
SIZES = {"train": 192, "gate": 512, "test": 4096}
DRAWN = 16384  # grids at a time
PATTERNS = np.array([row for row in product((False, True), repeat=WIDTH) if sum(row) == WIDTH - BLOCKED])  # of a row


def draw_grids(rng: np.random.Generator, count: int) -> NDArray[np.bool_]:
    """Draws which cells are open, [count, ROWS, WIDTH]; in the first row the start alone."""
    grids = PATTERNS[rng.integers(len(PATTERNS), size=(count, ROWS))]
    grids[:, 0] = np.arange(WIDTH) == rng.integers(WIDTH, size=(count, 1))
    return grids


def reached(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums over the three cells below each: [..., WIDTH + 2, count], with margins -> [..., WIDTH, count]."""
    return values[..., :-2, :] + values[..., 1:-1, :] + values[..., 2:, :]


def chances(grids: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns a blind walker's chance to get from each cell to the last row, [count, ROWS, WIDTH]; 0: no path."""
    found = np.zeros((ROWS, WIDTH + 2, len(grids)))
    found[:, 1:-1] = grids.transpose(1, 2, 0)
    ways = np.maximum(reached(found), 1.0)
    for row in range(ROWS - 2, -1, -1):
        found[row, 1:-1] *= reached(found[row + 1]) / ways[row + 1]
    return found[:, 1:-1].transpose(2, 0, 1)


def prompt_of(grid: NDArray[np.bool_]) -> str:
    """Writes the rows, a line each; in the first one the start is the only open cell."""
    first, *rows = grid.tolist()
    lines = ["".join("#o"[cell] for cell in first), *("".join("#."[cell] for cell in row) for row in rows)]
    return "\n".join(lines) + "\n"


def correct(prompt: str, text: str) -> bool:
    """Tells whether the text is the prompt without its first row, with a path from the start drawn into it."""
    first, *rows = prompt.splitlines()
    drawn, column = text.split("\n"), first.index("o")
    if len(drawn) != len(rows):
        return False
    for row, line in zip(rows, drawn):
        before, column = column, line.find("o")
        if not 0 <= column < len(row) or row[:column] + "o" + row[column + 1 :] != line:
            return False
        if row[column] != "." or abs(column - before) > 1:
            return False
    return True


def accuracy(
    prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: object
) -> list[float | None]:
    """Returns 1 for every completion that is a path, else 0."""
    return [float(correct(prompt, text)) for prompt, text in zip(prompts, completions, strict=True)]


@cache
def draw_examples(split: str, count: int) -> list[Example]:
    """Draws distinct prompts in random order; a larger count begins with the same prompts."""
    order, drawing = (np.random.default_rng([0, ROWS, WIDTH, *split.encode(), part]) for part in range(2))
    wanted = order.choice(len(STRATA), size=count, p=[share for share, *_ in STRATA])
    waiting = [np.flatnonzero(wanted == stratum).tolist()[::-1] for stratum in range(len(STRATA))]
    examples: dict[int, Example] = {}
    seen: set[str] = set()
    while len(examples) < count:
        grids = draw_grids(drawing, DRAWN)
        found = chances(grids)[:, 0].max(-1)
        for places, (_, least, largest) in zip(waiting, STRATA):
            fits = np.flatnonzero((found > 0) & (least <= found) & (found <= largest))
            for index in fits[: len(places)]:
                prompt = prompt_of(grids[index])
                if prompt not in seen:
                    seen.add(prompt)
                    examples[places.pop()] = Example(prompt, {"chance": float(found[index])})
    return [examples[place] for place in range(count)]


class LatticePathsSettings(TaskSettings):
    """Settings of the task; by default it has 192 training, 512 gate and 4,096 test examples."""

    name: str = "lattice_paths"

    def load(self) -> Task:
        """Draws the task; its prompts are always the same, whatever the sizes."""
        chosen = {split: size for split in SIZES if (size := getattr(self, f"{split}_size")) is not None}
        train, gate, test = (draw_examples(split, size) for split, size in (SIZES | chosen).items())
        return Task("lattice_paths", train, test, {"accuracy": accuracy}, gate)
