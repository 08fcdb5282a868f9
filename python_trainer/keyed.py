"""Random numbers that depend on their key alone, and the order of the prompts, which does too."""

import torch

from rlkernels.sampling.keys import keyed_choice, keyed_seed, keyed_unit

__all__ = ["keyed_choice", "keyed_seed", "keyed_unit", "prompt_order"]


def prompt_order(seed: int, first: int, count: int, size: int) -> list[int]:
    """Return entries ``first`` .. ``first + count - 1`` of an endless sequence of prompt numbers.

    Every epoch visits each of ``size`` prompts once, in an order of its own.
    """
    order: list[int] = []
    for epoch in range(first // size, (first + count - 1) // size + 1):
        generator = torch.Generator().manual_seed(keyed_seed(seed, "epoch", epoch))
        order += torch.randperm(size, generator=generator).tolist()
    start = first % size
    return order[start : start + count]
