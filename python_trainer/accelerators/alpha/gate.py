"""Candidates for the weights are tried, held against held-out prompts, and kept or put back."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlkernels.rank1 import Gate
from rlkernels.rank1.gate import try_candidates as try_each

if TYPE_CHECKING:
    from python_trainer.model.optimizer import PolicyOptimizer
    from python_trainer.rollout import Engine


def try_candidates(optimizer: "PolicyOptimizer", engine: "Engine", evaluate: Callable[[range], Sequence[float]],
                   predicted: Mapping[str, torch.Tensor], gate: Gate, *, prompts: int, available: int, max_tries: int,
                   shrink: float) -> tuple[bool, list[dict[str, Any]]]:  # fmt: skip
    """Writes candidates until the gate accepts one; otherwise the weights end up as they were, bit for bit.

    Args:
        evaluate: numbers of gate prompts -> 0 or 1 for each, with the weights as they are.
        predicted: name -> weights, float32. Candidate k takes the share shrink^k of the way to them.
        prompts, available: how many gate prompts are looked at for a candidate, at most, and how many there are.

    Returns:
        Whether one was accepted; a dictionary for each that was tried.
    """

    def write(weights: Mapping[str, torch.Tensor]) -> None:
        optimizer.write(dict(weights))
        engine.policy_updated()

    present = {name: optimizer.masters[name].detach().clone() for name in predicted}
    saved = optimizer.snapshot(predicted)
    accepted = False
    try:
        tries = try_each(gate, present, predicted, write=write, evaluate=evaluate, prompts=prompts,
                         available=available, max_tries=max_tries, shrink=shrink)  # fmt: skip
        accepted = tries[-1]["accepted"]
    finally:
        if not accepted:
            optimizer.restore(saved)
        engine.policy_updated()
    return accepted, tries
