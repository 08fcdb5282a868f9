"""The gate that every extrapolation must pass: right answers before and after on held-out prompts, paired."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlkernels import _check

# The gate looks after so many eighths of the prompts. A look costs the passes of its longest answer, so fewer prompts
# than an eighth would hardly be cheaper.
LOOKS = (1, 2, 3, 4, 6, 8)


def improvement_e_value(gained: int, lost: int) -> float:
    """Return the evidence that more prompts are gained than lost; it holds at any stopping time.

    The likelihood ratio of "a changed prompt was gained with probability q", averaged over q from 1/2 to 1, against
    q = 1/2. If ``q <= 1/2``, it exceeds 1 / a with probability at most a (a test martingale; Ville's inequality).

    Returns:
        ``sum_{k <= gained} C(n + 1, k) / ((n + 1) C(n, gained))`` with ``n = gained + lost``; infinity beyond what a
        float holds.
    """
    changed = gained + lost
    tail = sum(math.comb(changed + 1, k) for k in range(gained + 1))
    try:
        return tail / ((changed + 1) * math.comb(changed, gained))
    except OverflowError:  # of integers of any length
        return math.inf


def count_changes(after: Sequence[float], before: Sequence[float]) -> tuple[int, int]:
    """Count the prompts whose answer scores more after than before, and less.

    Raises:
        ValueError: numbers of prompts that differ, or none; a score that is not finite.
    """
    if len(after) != len(before) or len(after) == 0:
        counts = [len(after), len(before)]
        raise ValueError(f"a paired comparison needs the same prompts, at least one, got {counts}")
    for name, scores in (("after", after), ("before", before)):
        if wrong := [float(score) for score in scores if not math.isfinite(score)]:
            raise ValueError(f"{name} must hold finite scores, got {wrong[0]}")
    gained = sum(bool(a > b) for a, b in zip(after, before))
    lost = sum(bool(a < b) for a, b in zip(after, before))
    return gained, lost


@dataclass(frozen=True)
class Comparison:
    """One candidate held against the weights that it would replace."""

    before: float  # accuracy, or mean score, on the prompts that were looked at
    after: float
    prompts: int
    e_value: float  # evidence of an improvement
    needed: float  # for acceptance
    accepted: bool


class Gate:
    """Accept weights that are shown to answer more prompts right.

    Both sets of weights answer the same prompts with the same noise, in growing parts; :func:`improvement_e_value`
    compares them. The gate stops when the evidence suffices, or when the rest of the prompts could not change the
    verdict at the present rate. Candidate number k of a run needs evidence of ``k (k + 1) / level``, so a run accepts
    weights that are no better with a probability below ``level``, however many candidates there are. That holds for
    prompts in random order. Each attempt begins with prompts that earlier ones have not used, while there are any.

    Args:
        level: that probability, between 0 and 1.

    Raises:
        TypeError, ValueError: a level that is no number between the two.

    Attributes:
        comparisons, position: its state: the number of comparisons, and the first prompt of the next attempt.
    """

    def __init__(self, level: float, comparisons: int = 0, position: int = 0):
        _check.share("level", level)
        self.level, self.comparisons, self.position = level, comparisons, position

    def compare(self, after: Sequence[float], before: Sequence[float]) -> Comparison:
        """Judge one candidate by all prompts at once, a score for each. Raises as :func:`count_changes`."""
        found = self._judge(after, before, self.comparisons + 1)
        self.comparisons += 1  # what is wrong uses up no evidence
        return found

    def _judge(self, after: Sequence[float], before: Sequence[float], comparison: int) -> Comparison:
        """Make the ``comparison``-th comparison, counted from 1."""
        e_value = improvement_e_value(*count_changes(after, before))
        means = math.fsum(before) / len(before), math.fsum(after) / len(after)
        needed = comparison * (comparison + 1) / self.level
        return Comparison(*means, len(after), e_value, needed, e_value >= needed)

    def _hopeless(self, after: Sequence[float], before: Sequence[float], prompts: int, needed: float) -> bool:
        """Tell whether prompts that go on like this would not be enough."""
        gained, lost = (round(count * prompts / len(after)) for count in count_changes(after, before))
        return improvement_e_value(gained, lost) < needed

    def compare_in_parts(
        self, after: Callable[[int], Sequence[float]], before: Callable[[int], Sequence[float]], prompts: int
    ) -> Comparison:
        """Judge one candidate by as few prompts as it takes. Raises as :func:`count_changes`.

        Args:
            after, before: number of prompts -> a score for each of them, in an order that does not change.
            prompts: most prompts.
        """
        comparison = self.comparisons + 1
        for look in LOOKS:
            count = -(-prompts * look // LOOKS[-1])
            seen = before(count), after(count)
            found = self._judge(seen[1], seen[0], comparison)
            self.comparisons = comparison  # a first look that is wrong uses up no evidence
            if found.accepted or self._hopeless(seen[1], seen[0], prompts, found.needed):
                break
        return found


class Answers:
    """Scores of the prompts from ``position`` on, evaluated when they are needed."""

    def __init__(self, evaluate: Callable[[range], Sequence[float]], available: int, position: int):
        self.evaluate, self.available, self.position = evaluate, available, position
        self.known: list[float] = []

    def __call__(self, count: int) -> list[float]:
        while len(self.known) < count:
            first = (self.position + len(self.known)) % self.available
            rows = range(first, min(first + count - len(self.known), self.available))
            found = list(self.evaluate(rows))
            if len(found) != len(rows):
                raise ValueError(f"evaluate must return one number for each of {len(rows)} prompts, got {len(found)}")
            self.known += found
        return self.known[:count]
