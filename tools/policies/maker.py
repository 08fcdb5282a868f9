"""What the commands that make base policies have in common."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from python_trainer.tasks.base import Task


def begin(about: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """``output`` and ``seed`` of the command line; what follows depends on the seed alone, on one thread."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the policy, Hugging Face format")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    return args


def prompts_of(task: Task) -> set[str]:
    """Every prompt of a task, none of which a base policy may have seen."""
    return {str(example.prompt) for split in (task.train, task.gate, task.test) for example in split}
