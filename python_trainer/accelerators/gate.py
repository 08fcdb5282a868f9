"""The gate that every extrapolation must pass: right answers before and after on held-out prompts, paired."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from python_trainer.statistics import improvement_p_value


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
