"""The order of the prompts of a run."""

import torch

from rlkernels.sampling.keys import keyed_seed


def prompt_order(seed: int, first: int, count: int, size: int) -> list[int]:
    """Return entries ``first`` .. ``first + count - 1`` of an endless sequence of prompt numbers.

    Every epoch visits each of ``size`` prompts once, in another order, which depends on the seed and the epoch alone.
    """
    order: list[int] = []
    for epoch in range(first // size, (first + count - 1) // size + 1):
        generator = torch.Generator().manual_seed(keyed_seed(seed, "epoch", epoch))
        order += torch.randperm(size, generator=generator).tolist()
    start = first % size
    return order[start : start + count]
