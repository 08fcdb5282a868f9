"""What the commands that make base policies have in common."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from python_trainer.tasks.base import Task


def begin(about: str | None, argv: Sequence[str] | None, sizes: Sequence[str] = ()) -> argparse.Namespace:
    """``output``, ``seed`` and, of more than one, ``size`` of the command line.

    What follows depends on them alone, on one thread.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the policy, Hugging Face format")
    parser.add_argument("--seed", type=int, default=0)
    if sizes:
        parser.add_argument("--size", choices=sizes, default=sizes[0], help=f"default: {sizes[0]}, the task's")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    return args


def prompts_of(task: Task) -> set[str]:
    """Every prompt of a task, none of which a base policy may have seen."""
    return {str(example.prompt) for split in (task.train, task.gate, task.test) for example in split}
