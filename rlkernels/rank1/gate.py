"""The gate that every extrapolation must pass: right answers before and after on held-out prompts, paired."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


def improvement_p_value(after: Sequence[float], before: Sequence[float]) -> float:
    """Exact one-sided McNemar test: how likely at least this much improvement is when ``after`` is no better.

    Args:
        after, before: N values each, right (above 0.5) or wrong, of the same prompts.

    Returns:
        Probability of at least as many prompts gained as seen, when each of the prompts that changed was as likely
        lost as gained; 1 when nothing changed.

    Raises:
        ValueError: numbers of prompts that differ, or none.
    """
    if len(after) != len(before) or len(after) == 0:
        counts = [len(after), len(before)]
        raise ValueError(f"a paired comparison needs the same prompts, at least one, got {counts}")
    gained = sum(bool(a > 0.5 >= b) for a, b in zip(after, before))
    lost = sum(bool(b > 0.5 >= a) for a, b in zip(after, before))
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(gained, changed + 1))
    return tail / 2**changed if changed else 1.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


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
        return Comparison(_mean(before), _mean(after), p_value, level, p_value <= level)


def try_candidates(gate: Gate, present: Mapping[str, torch.Tensor], predicted: Mapping[str, torch.Tensor], *,
                   write: Callable[[dict[str, torch.Tensor]], None], evaluate: Callable[[], Sequence[float]],
                   max_tries: int, shrink: float) -> list[dict[str, Any]]:  # fmt: skip
    """Writes candidates until the gate accepts one. What was there before is for the caller to put back.

    Args:
        present: name -> weights as they are.
        predicted: name -> weights, float32. Candidate k takes the share shrink^k of the way to them.
        write: puts float32 weights into the model.
        evaluate: 0 or 1 for each gate prompt, with the weights as they are.

    Returns:
        A dictionary for each that was tried: its ``factor`` and the fields of :class:`Comparison`.
    """
    before = evaluate()
    tries: list[dict[str, Any]] = []
    while len(tries) < max_tries and not (tries and tries[-1]["accepted"]):
        factor = shrink ** len(tries)
        write({name: torch.lerp(present[name].float(), weight, factor) for name, weight in predicted.items()})
        tries.append({"factor": factor, **asdict(gate.compare(evaluate(), before))})
    return tries
