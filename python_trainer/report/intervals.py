"""Intervals for accuracies: of a share, and of differences between runs on the same prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """Whether the interval leaves 0 out."""
        return not self.low <= 0 <= self.high


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``count`` independent trials (Wilson 1927)."""
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def difference_of_runs(
    after: Sequence[Any], before: Sequence[Any], *, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Return the mean of ``after - before`` over pairs of runs, with a bootstrap interval.

    Every resample draws prompts, the same for all runs, and pairs of runs, each with replacement. So the interval
    covers other prompts and other seeds. Three pairs show little of the spread between seeds: it is then too narrow.

    Args:
        after, before: for each pair of runs the values of the same prompts, each [N].

    Raises:
        ValueError: numbers of prompts that differ, or none.
    """
    pairs = [(numpy.asarray(a, dtype=numpy.float64), numpy.asarray(b)) for a, b in zip(after, before, strict=True)]
    lengths = {len(values) for pair in pairs for values in pair}
    if len(lengths) != 1 or not lengths.pop():
        raise ValueError("runs must answer the same prompts, at least one, to be compared")
    values = numpy.stack([a - b for a, b in pairs], 1)  # [N, runs]
    kinds, counts = numpy.unique(values, axis=0, return_counts=True)  # equal rows are drawn together
    generator = numpy.random.default_rng(seed)
    means = generator.multinomial(len(values), counts / len(values), size=resamples) @ kinds / len(values)
    runs = values.shape[1]
    weights = generator.multinomial(runs, [1 / runs] * runs, size=resamples) / runs
    low, high = numpy.quantile((means * weights).sum(1), [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))
