"""Which training prompts come next where nothing is known of them but their lengths: rules that history must beat."""

from collections.abc import Sequence
from math import ceil

import torch

from python_trainer.keyed import keyed_seed, prompt_order
from python_trainer.rollout.settings import PromptOrder

ALL_AFTER = 0.5  # of the run: when `shortest_first` has let the longest prompt in


def next_prompts(
    order: PromptOrder, lengths: Sequence[int], seed: int, first: int, count: int, done: float = 0.0
) -> list[int]:
    """Prompts ``first`` .. ``first + count - 1`` of a run; a function of its arguments alone.

    Args:
        lengths: tokens of each training prompt.
        done: share of the run that lies behind, 0 to 1.
    """
    if order == "inverse_length":
        weights = 1.0 / torch.tensor(lengths, dtype=torch.float64)
        generator = torch.Generator().manual_seed(keyed_seed(seed, order, first))
        return torch.multinomial(weights, count, replacement=count > len(lengths), generator=generator).tolist()
    pool = list(range(len(lengths)))
    if order != "shuffled":
        share = 0.5 if order == "shorter_half" else min(done / ALL_AFTER, 1.0)
        pool.sort(key=lengths.__getitem__)
        pool = pool[: max(ceil(share * len(pool)), min(count, len(pool)))]
    return [pool[i] for i in prompt_order(seed, first, count, len(pool))]
