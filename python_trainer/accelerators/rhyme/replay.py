"""Right answers that are trained on again: those of better earlier runs first, later this run's own.

Where one answer in thirty is right, the others of its group cost as much to generate and say little; the right one was
used once. Kept and used again it costs no generation. Judged against a group that failed it would seem better than it
is the more it is used, so it is judged against the rate p at which its prompt is answered right *now*: the advantage is
(1 - p) / sqrt(p (1 - p)), which falls as the prompt is learned, and at p = 1/n, from where fresh groups of n do the
same, no stored answer is used. Related: RLEP (arXiv 2507.07451), which replays right answers of an earlier run.

Where most groups have a right answer, those that have none do so by bad luck, and what was right by luck is nothing to
learn. So nothing is used before it is known that right answers are rare, or that an earlier run was better.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import torch

from python_trainer.data import Rollout
from python_trainer.keyed import prompt_order

FIRST_GROUPS = 128  # after which it is known whether right answers are rare: a share to within 0.09, 95 % certain
MEMORY = 60  # steps after which an answer weighs 1/e in the rate of its prompt, and is not replayed any more
PER_PROMPT = 2  # answers that are replayed, the best and newest
MOST_USES = 8  # of an answer
REST = 2  # steps between two uses of an answer
CLEAR = 2.0  # standard errors by which a run is better
ENOUGH = 8  # prompts that both runs have answered; fewer tell no error


class SuccessRates:
    """Running rate of right answers to each prompt.

    With right answers r and answers n to a prompt, each weighed by exp(-age in steps / MEMORY), and R and N the sums of
    these over all prompts, the rate of the prompt is (r + R / N) / (n + 1): one answer of the mean prompt is added to
    its own. So a prompt without answers has the rate of all of them.

    Also counts how many of the first groups had no right answer.
    """

    def __init__(self, prompts: int):
        self.step = self.groups = self.failed = 0
        self.right = torch.zeros(prompts, dtype=torch.float64)
        self.answers = torch.zeros(prompts, dtype=torch.float64)

    def advance(self, step: int) -> None:
        """Discounts everything up to this step."""
        left = math.exp((self.step - step) / MEMORY)
        self.step = step
        self.right *= left
        self.answers *= left

    def add(self, groups: Iterable[Sequence[Rollout]]) -> None:
        """Counts groups of fresh answers of the present step, which are right or wrong."""
        for group in groups:
            right = sum(answer.accuracy > 0.5 for answer in group)
            self.right[group[0].prompt_key] += right
            self.answers[group[0].prompt_key] += len(group)
            if self.groups < FIRST_GROUPS:
                self.groups, self.failed = self.groups + 1, self.failed + (not right)

    def rates(self, keys: Sequence[int]) -> list[float]:
        """Returns the rates of these prompts."""
        total, places = float(self.answers.sum()), torch.tensor(keys, dtype=torch.int64)
        mean = float(self.right.sum()) / total if total else 0.0
        return ((self.right[places] + mean) / (self.answers[places] + 1)).tolist()

    def rare(self, least: float) -> bool | None:
        """Returns whether at least this share of the first groups had no right answer; None: not known yet."""
        if not least:
            return True
        return None if self.groups < FIRST_GROUPS else self.failed >= least * self.groups

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self)) | {"right": self.right.clone(), "answers": self.answers.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"right": state["right"].clone(), "answers": state["answers"].clone()})


def last_shares(trajectory: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Returns of each prompt of a run the share of right answers at its last visit, from ``StepRecord.outcomes``."""
    shares: dict[str, float] = {}
    for outcomes in filter(None, trajectory):
        columns = (outcomes[name].tolist() for name in ("prompts", "answers", "right"))
        for key, answers, right in zip(*columns, strict=True):
            if not 0 <= right <= answers:
                raise ValueError("more right answers than answers")
            if answers:
                shares[bytes(key).hex()] = right / answers
    return shares


def clearly_better(theirs: Mapping[str, float], own: Mapping[str, float]) -> bool:
    """Returns whether a run with these shares is better than one with the others, beyond chance.

    What a worse policy has answered right teaches its habits along with the answers.
    """
    gains = [theirs[key] - share for key, share in own.items() if key in theirs]
    return len(gains) >= ENOUGH and fmean(gains) > CLEAR * stdev(gains) / len(gains) ** 0.5


def in_batches(groups: Sequence[list[Rollout]], size: int, times: int, seed: int) -> list[list[Rollout]]:
    """Returns all groups so many times, in another order each time, in batches of ``size`` answers or just above."""
    batches: list[list[Rollout]] = []
    for place in prompt_order(seed, 0, times * len(groups), len(groups)) if groups else ():
        if not batches or len(batches[-1]) >= size:
            batches.append([])
        number = len({answer.group for answer in batches[-1]})
        batches[-1] += [replace(answer, group=number) for answer in groups[place]]
    return batches
