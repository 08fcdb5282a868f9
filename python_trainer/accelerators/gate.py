"""The gate that every extrapolation must pass: right answers before and after on held-out prompts, paired."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from python_trainer.statistics import improvement_p_value

if TYPE_CHECKING:
    from python_trainer.optimizer import PolicyOptimizer
    from python_trainer.rollout import Engine


@dataclass(frozen=True)
class Comparison:
    """One candidate held against the weights that it would replace."""

    before: float  # accuracy on the gate prompts
    after: float
    p_value: float  # of an improvement at least this large when there is none
    level: float  # what the p-value must not exceed
    accepted: bool


class Gate:
    """Accepts what is shown to answer more prompts right.

    A one-sided exact McNemar test on prompts that both sets of weights answer with the same noise. Comparison number
    k of a run is held against ``level / (k (k + 1))``. These add up to ``level``, so the chance that a run ever
    accepts weights that are no better stays below it, however many candidates there are and whatever they depend on.

    Attributes:
        comparisons: how many there were; part of the state of a run.
    """

    def __init__(self, level: float, comparisons: int = 0):
        self.level, self.comparisons = level, comparisons

    def compare(self, after: Sequence[float], before: Sequence[float]) -> Comparison:
        """Judges one candidate; ``after`` and ``before`` are 0 or 1 for each prompt."""
        self.comparisons += 1
        level = self.level / (self.comparisons * (self.comparisons + 1))
        p_value = improvement_p_value(after, before)
        return Comparison(fmean(before), fmean(after), p_value, level, p_value <= level)


def try_candidates(optimizer: "PolicyOptimizer", engine: "Engine", evaluate: Callable[[], Sequence[float]],
                   predicted: Mapping[str, torch.Tensor], gate: Gate, *, max_tries: int, shrink: float,
                   ) -> tuple[bool, list[dict[str, Any]]]:  # fmt: skip
    """Writes candidates until the gate accepts one; otherwise the weights end up as they were, bit for bit.

    Args:
        evaluate: 0 or 1 for each gate prompt, with the weights as they are.
        predicted: name -> weights, float32. Candidate k takes the share shrink^k of the way to them.

    Returns:
        Whether one was accepted; a dictionary for each that was tried.
    """
    present = {name: optimizer.masters[name].detach().clone() for name in predicted}
    saved = optimizer.snapshot(predicted)
    before = evaluate()
    tries: list[dict[str, Any]] = []
    accepted, factor = False, 1.0
    try:
        while not accepted and len(tries) < max_tries:
            optimizer.write({name: torch.lerp(weight, predicted[name], factor) for name, weight in present.items()})
            engine.policy_updated()
            compared = gate.compare(evaluate(), before)
            tries.append({"factor": factor, **asdict(compared)})
            accepted = compared.accepted
            factor *= shrink
    finally:
        if not accepted:
            optimizer.restore(saved)
        engine.policy_updated()
    return accepted, tries
