"""Paired comparisons of answers to the same prompts: bootstrap intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

Values = Any  # array-like [N] of one value per prompt, or [runs, N] of several runs on the same prompts


@dataclass(frozen=True)
class Interval:
    """A value and its bootstrap percentile interval."""

    value: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """Whether the interval leaves 0 out."""
        return not self.low <= 0 <= self.high

    def __str__(self) -> str:
        text = f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"
        return text if self.resolved else f"{text} not resolved"


def _columns(*measurements: Values) -> numpy.ndarray:
    """float64 [N, K]: one row per prompt, runs averaged."""
    columns = [numpy.atleast_2d(numpy.asarray(values, dtype=numpy.float64)).mean(0) for values in measurements]
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or not lengths.pop():
        raise ValueError(f"a paired comparison needs the same prompts, at least one, got {[len(c) for c in columns]}")
    return numpy.stack(columns, 1)


def resampled_means(*measurements: Values, resamples: int = 10_000, seed: int = 0) -> numpy.ndarray:
    """Means of K measurements over prompts drawn with replacement, the same prompts for all of them.

    Rows that are equal are counted, not drawn one by one: the number of times that each kind occurs in a resample is
    multinomial.

    Args:
        measurements: K of them, each [N], or [runs, N], which is averaged over its runs first.

    Returns:
        float64 [resamples, K].

    Raises:
        ValueError: numbers of prompts that differ, or none.
    """
    columns = _columns(*measurements)
    kinds, counts = numpy.unique(columns, axis=0, return_counts=True)
    draws = numpy.random.default_rng(seed).multinomial(len(columns), counts / len(columns), size=resamples)
    return draws @ kinds / len(columns)


def _interval(value: float, samples: numpy.ndarray, confidence: float) -> Interval:
    low, high = numpy.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high))


def paired_difference(
    after: Values, before: Values, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean of ``after - before`` over prompts, with a paired bootstrap interval.

    Several runs are averaged per prompt, so the interval is about other prompts, not about other seeds of training;
    :func:`difference_of_runs` is about both.
    """
    means = resampled_means(after, before, resamples=resamples, seed=seed)
    value = float(_columns(after, before).mean(0) @ [1, -1])
    return _interval(value, means[:, 0] - means[:, 1], confidence)


def difference_of_runs(
    after: Sequence[Values],
    before: Sequence[Values],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean of ``after - before`` over pairs of runs, with a bootstrap interval about other prompts and other seeds.

    Every resample draws prompts, the same for all runs, and pairs of runs, each with replacement. Few pairs show little
    of the spread between seeds: three leave the interval somewhat too narrow.

    Args:
        after, before: for each pair of runs the answers to the same prompts, each [N].
    """
    values = [numpy.asarray(a, dtype=numpy.float64) - numpy.asarray(b) for a, b in zip(after, before, strict=True)]
    means = resampled_means(*values, resamples=resamples, seed=seed)  # [resamples, runs]
    runs = len(values)
    weights = numpy.random.default_rng(seed + 1).multinomial(runs, [1 / runs] * runs, size=resamples) / runs
    return _interval(float(numpy.mean(values)), (means * weights).sum(1), confidence)


def share_of_gain(
    part: Values, full: Values, start: Values, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """(part - start) / (full - start) of the mean accuracies, with a paired bootstrap interval.

    NaN where the full run gained nothing.
    """
    p, f, s = _columns(part, full, start).mean(0)
    means = resampled_means(part, full, start, resamples=resamples, seed=seed)
    if f <= s or (means[:, 1] <= means[:, 2]).any():
        return Interval(math.nan, math.nan, math.nan)
    return _interval(float((p - s) / (f - s)), (means[:, 0] - means[:, 2]) / (means[:, 1] - means[:, 2]), confidence)
