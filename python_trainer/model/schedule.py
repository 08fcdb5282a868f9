"""The schedule of learning rates: the one place where a factor follows from a step.

It is a function of the step alone, so a checkpoint need not hold it, and a resumed run may have another ``max_steps``.
The schedulers of torch and Transformers count their own calls.
"""

import math
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]


def schedule(step: int, *, warmup_steps: int, decay: Decay = "constant", max_steps: int = 0) -> float:
    """Return the factor of the peak learning rate at a step.

    Args:
        step: counted from 1.
        warmup_steps: steps in which the factor rises linearly from 0; the last of them has the factor 1.
        decay: after the warm-up the factor stays 1, or falls from 1 to 0 along a line or half a cosine.
        max_steps: the step after which a falling factor is 0.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    if decay == "constant":
        return 1.0
    steps_after_warmup = max(max_steps - warmup_steps, 1)
    progress = min((step - 1 - warmup_steps) / steps_after_warmup, 1.0)  # 0 at the first step after the warm-up
    return 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
