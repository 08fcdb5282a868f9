"""Make the base policy of the task ``lattice_paths``: ``python -m tools.policies.lattice_paths --output DIR``.

Supervised learning in two phases, on fresh grids that are hard: paths of a walker that knows which cells lead to the
last row, from which the policy learns to look ahead as far as it can see; and paths of one that knows so in a share of
its steps (``KNOWING``) and in the others takes any open cell, and where there is none a blocked one.
So the policy looks ahead now and then: what reinforcement learning can turn into a habit. `--size small` has a quarter
of the weights.
On one thread and processor the result depends on nothing but the seed.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from python_trainer.tasks.lattice_paths import ROWS, WIDTH, LatticePathsSettings, chances, draw_grids, prompt_of
from tools.policies.training import EOS_ID, Corpus, Stretch, new_policy, save, train

KNOWING = 0.15  # share of the steps
HARD = 0.1  # largest chance of a blind walker in the grids that are taught: where looking ahead tells most
BUFFER = 4096  # grids drawn at a time
PATHS = Stretch("paths", 150, 4e-3, 0.0)
PARTS = 4  # of the paths, each with grids of its own
BLIND = Stretch("blind", 80, 2e-3, 1.0)


def walk(grid: NDArray[np.bool_], found: NDArray[np.float64], knowing: float, rng: random.Random) -> list[int]:
    """Return the columns of a walker's path [ROWS]; from a dead end it steps on blocked cells.

    Args:
        found: chance to get from each cell to the last row; not 0 where there is a path.
        knowing: share of the steps that heed it.
    """
    columns = [int(grid[0].argmax())]
    for row in range(1, ROWS):
        near = range(max(columns[-1] - 1, 0), min(columns[-1] + 2, WIDTH))
        ways = [column for column in near if grid[row, column]]
        if rng.random() < knowing:
            ways = [column for column in ways if found[row, column] > 0] or ways
        columns.append(rng.choice(ways or near))
    return columns


class Walks(Corpus):
    """Endless grids that are no prompt of the shipped task, with a walker's path each."""

    def __init__(self, seed: int, name: str, knowing: float):
        self.rng, self.knowing = random.Random(f"lattice_paths/{seed}/{name}"), knowing
        task = LatticePathsSettings().load()
        self.held_out = {example.prompt for split in (task.train, task.gate, task.test) for example in split}
        self.grids_rng = np.random.default_rng([seed, *name.encode()])
        self.grids: list[tuple[np.ndarray, np.ndarray]] = []  # not yet used, with the chances from each cell

    def example(self) -> tuple[list[int], int]:
        prompt = ""
        while not prompt or prompt in self.held_out:
            if not self.grids:
                grids = draw_grids(self.grids_rng, BUFFER)
                found = chances(grids)
                self.grids = [pair for pair in zip(grids, found) if 0 < pair[1][0].max() <= HARD]
            grid, found = self.grids.pop()
            prompt = prompt_of(grid)
        cells = list(zip(prompt.splitlines(), walk(grid, found, self.knowing, self.rng)))
        answer = "\n".join(row[:column] + "o" + row[column + 1 :] for row, column in cells[1:])
        return [*(prompt + answer).encode(), EOS_ID], len(prompt)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the policy, Hugging Face format")
    parser.add_argument("--size", choices=("medium", "small"), default="medium", help="medium is the task's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    policy = new_policy(args.size)
    for part in range(PARTS):
        train(policy, PATHS, Walks(PARTS * args.seed + part, PATHS.name, 1.0), batch=48, chunk_tokens=4096)
    train(policy, BLIND, Walks(args.seed, BLIND.name, KNOWING), batch=48, chunk_tokens=4096)
    save(policy, args.output)


if __name__ == "__main__":
    main()
