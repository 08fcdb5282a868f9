"""The gate for extrapolations: a paired comparison of right answers before and after on held-out prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlkernels import _check

# Eighths of the prompts after which the gate compares. A look costs the passes of its longest answer, so fewer prompts
# than an eighth would hardly be cheaper.
LOOKS = (1, 2, 3, 4, 6, 8)


def improvement_e_value(gained: int, lost: int) -> float:
    """Return the evidence that more prompts are gained than lost; it holds at any stopping time.

    The likelihood ratio of "a changed prompt was gained with probability q", averaged over q from 1/2 to 1, against
    q = 1/2. If ``q <= 1/2``, it exceeds 1 / a with probability at most a (a test martingale; Ville's inequality).

    Returns:
        ``sum_{k <= gained} C(n + 1, k) / ((n + 1) C(n, gained))`` with ``n = gained + lost``; infinity beyond the
        largest float.
    """
    changed = gained + lost
    tail = sum(math.comb(changed + 1, k) for k in range(gained + 1))
    try:
        return tail / ((changed + 1) * math.comb(changed, gained))
    except OverflowError:  # these integers have any length
        return math.inf


def count_changes(after: Sequence[float], before: Sequence[float]) -> tuple[int, int]:
    """Count the prompts whose answer scores more after than before, and less.

    Raises:
        ValueError: the numbers of prompts differ or are 0, or a score is not finite.
    """
    if len(after) != len(before) or len(after) == 0:
        counts = [len(after), len(before)]
        raise ValueError(f"a paired comparison needs the same prompts, at least one, got {counts}")
    for name, scores in (("after", after), ("before", before)):
        for score in scores:
            if not math.isfinite(score):
                raise ValueError(f"{name} must hold finite scores, got {float(score)}")
    gained = sum(bool(a > b) for a, b in zip(after, before))
    lost = sum(bool(a < b) for a, b in zip(after, before))
    return gained, lost


@dataclass(frozen=True)
class Comparison:
    """A comparison of one candidate with the weights that it would replace."""

    before: float  # accuracy, or mean score, on the evaluated prompts
    after: float
    prompts: int
    e_value: float  # evidence of an improvement
    needed: float  # for acceptance
    accepted: bool


class Gate:
    """Accept weights whose improvement on held-out prompts is significant.

    Both sets of weights answer the same prompts with the same noise, in growing parts; :func:`improvement_e_value`
    compares them. The gate stops when the evidence suffices, or when the rest of the prompts could not change the
    verdict at the present rate. Candidate number k of a run needs evidence of ``k (k + 1) / level``, so a run accepts
    weights that are no better with a probability below ``level``, for any number of candidates. That holds for
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
        self.level = float(level)
        self.comparisons = comparisons
        self.position = position

    def compare(self, after: Sequence[float], before: Sequence[float]) -> Comparison:
        """Judge one candidate by all prompts at once, a score for each. Raises as :func:`count_changes`."""
        comparison = self._judge(after, before, self.comparisons + 1)
        self.comparisons += 1  # an error above uses up no evidence
        return comparison

    def _judge(self, after: Sequence[float], before: Sequence[float], number: int) -> Comparison:
        """Make comparison ``number`` of the run, counted from 1."""
        gained, lost = count_changes(after, before)
        e_value = improvement_e_value(gained, lost)
        needed = number * (number + 1) / self.level
        return Comparison(
            before=math.fsum(before) / len(before),
            after=math.fsum(after) / len(after),
            prompts=len(after),
            e_value=e_value,
            needed=needed,
            accepted=e_value >= needed,
        )

    def _is_hopeless(self, after: Sequence[float], before: Sequence[float], prompts: int, needed: float) -> bool:
        """Return whether the evidence of all prompts would be too weak at the present rate."""
        gained, lost = (round(count * prompts / len(after)) for count in count_changes(after, before))
        return improvement_e_value(gained, lost) < needed

    def compare_in_parts(
        self, after: Callable[[int], Sequence[float]], before: Callable[[int], Sequence[float]], prompts: int
    ) -> Comparison:
        """Judge one candidate by the first prompts that decide. Raises as :func:`count_changes`.

        Args:
            after, before: number of prompts -> a score for each of them, in a fixed order. Each look calls ``before``
                first.
            prompts: most prompts.
        """
        number = self.comparisons + 1
        for look in LOOKS:
            count = -(-prompts * look // LOOKS[-1])
            scores_before = before(count)
            scores_after = after(count)
            comparison = self._judge(scores_after, scores_before, number)
            self.comparisons = number  # an error in the first look uses up no evidence
            if comparison.accepted or self._is_hopeless(scores_after, scores_before, prompts, comparison.needed):
                break
        return comparison


class Answers:
    """Scores of the prompts from ``position`` on, evaluated when they are needed."""

    def __init__(self, evaluate: Callable[[range], Sequence[float]], available: int, position: int):
        self.evaluate = evaluate
        self.available = available
        self.position = position
        self.scores: list[float] = []

    def __call__(self, count: int) -> list[float]:
        while len(self.scores) < count:
            first = (self.position + len(self.scores)) % self.available
            rows = range(first, min(first + count - len(self.scores), self.available))
            scores = list(self.evaluate(rows))
            if len(scores) != len(rows):
                raise ValueError(f"evaluate must return one number for each of {len(rows)} prompts, got {len(scores)}")
            self.scores += scores
        return self.scores[:count]
