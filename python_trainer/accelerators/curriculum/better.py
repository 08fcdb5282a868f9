"""Whether an earlier run came to answer prompts right more often than the present one does.

What a worse policy has answered right teaches its habits along with the answers, so only runs that are clearly better
are learned from. Compared are the same prompts: how often each was answered right at its last visits.
"""

from collections.abc import Iterable, Mapping
from statistics import fmean, stdev

from python_trainer.accelerators.curriculum.difficulty import StepOutcomes, visits

CLEAR = 2.0  # standard errors
ENOUGH = 8  # prompts that both have answered; of fewer no error can be told


def last_shares(trajectory: Iterable[StepOutcomes]) -> dict[str, float]:
    """Of each prompt of a run the share of right answers at its last visit.

    Raises:
        UserError: outcomes are not what a run records.
    """
    return {key: right / answers for outcomes in trajectory for key, answers, right in visits(outcomes) if answers}


def clearly_better(theirs: Mapping[str, float], own: Mapping[str, float]) -> bool:
    """Whether a run with these shares is better than one with the others, beyond chance."""
    gains = [theirs[key] - share for key, share in own.items() if key in theirs]
    return len(gains) >= ENOUGH and fmean(gains) > CLEAR * stdev(gains) / len(gains) ** 0.5
