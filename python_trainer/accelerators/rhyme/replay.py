"""Right answers that are trained on again: first those of better earlier runs, later those of this run.

Where one answer in thirty is right, the others of its group cost as much to generate and say little, and the right one
is used once. A stored answer costs no generation. Its baseline cannot be a group that failed: it would seem the better
the more often it is used. Its baseline is the *present* success rate p of its prompt: the advantage is
(1 - p) / sqrt(p (1 - p)), which falls as the prompt is learned. At p = 1/n fresh groups of n have a right answer
themselves, and no stored answer is used. Related: RLEP (arXiv 2507.07451), which replays right answers of an earlier
run.

Where most groups have a right answer, the others fail by bad luck, and lucky answers carry no signal. So nothing is
used before right answers are known to be rare, or an earlier run to be better.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import torch

from python_trainer.data import Rollout
from python_trainer.tasks.prompt_order import prompt_order

FIRST_GROUPS = 128  # that decide whether right answers are rare: a share to within 0.09, 95 % certain
DECAY_STEPS = 60  # steps after which an answer weighs 1/e in the rate of its prompt, and is not replayed any more
PER_PROMPT = 2  # best and newest answers that are replayed
MOST_USES = 8  # of an answer
REST = 2  # steps between two uses of an answer
MIN_STANDARD_ERRORS = 2.0  # by which a better run is ahead
MIN_PROMPTS_TO_COMPARE = 8  # that both runs have answered


class SuccessRates:
    """Running rate of right answers to each prompt.

    A prompt has r right ones among n answers, each weighed by exp(-age in steps / DECAY_STEPS); R and N are their sums
    over all prompts. The rate of the prompt is (r + R / N) / (n + 1): one answer of the mean prompt is added. So a
    prompt without answers has the rate of all prompts.

    Also counts how many of the first groups had no right answer.
    """

    def __init__(self, prompts: int):
        self.step = self.groups = self.failed = 0
        self.right = torch.zeros(prompts, dtype=torch.float64)
        self.answers = torch.zeros(prompts, dtype=torch.float64)

    def advance(self, step: int) -> None:
        """Discount all answers up to this step."""
        discount = math.exp((self.step - step) / DECAY_STEPS)
        self.step = step
        self.right *= discount
        self.answers *= discount

    def add(self, groups: Iterable[Sequence[Rollout]]) -> None:
        """Count groups of fresh answers of the present step, which are right or wrong."""
        for group in groups:
            right = sum(answer.right for answer in group)
            self.right[group[0].prompt_index] += right
            self.answers[group[0].prompt_index] += len(group)
            if self.groups < FIRST_GROUPS:
                self.groups += 1
                self.failed += right == 0

    def rates(self, prompt_indices: Sequence[int]) -> list[float]:
        """Return the rates of these prompts."""
        prompts = torch.tensor(prompt_indices, dtype=torch.int64)
        total = float(self.answers.sum())
        mean = float(self.right.sum()) / total if total else 0.0
        return ((self.right[prompts] + mean) / (self.answers[prompts] + 1)).tolist()

    def rare(self, share: float) -> bool | None:
        """Return whether at least this share of the first groups had no right answer; None: not known yet."""
        if not share:
            return True
        return None if self.groups < FIRST_GROUPS else self.failed >= share * self.groups

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "groups": self.groups,
            "failed": self.failed,
            "right": self.right.clone(),
            "answers": self.answers.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.groups = state["groups"]
        self.failed = state["failed"]
        self.right = state["right"].clone()
        self.answers = state["answers"].clone()


def last_shares(trajectory: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the share of right answers to each prompt at its last visit in a run, from ``StepRecord.outcomes``."""
    shares: dict[str, float] = {}
    for outcomes in filter(None, trajectory):
        columns = (outcomes[name].tolist() for name in ("prompts", "answers", "right"))
        for key, answers, right in zip(*columns, strict=True):
            if not 0 <= right <= answers:
                raise ValueError("more right answers than answers")
            if answers:
                shares[bytes(key).hex()] = right / answers
    return shares


def clearly_better(earlier: Mapping[str, float], present: Mapping[str, float]) -> bool:
    """Return whether a run with the ``earlier`` shares is better than one with the ``present`` ones, beyond chance.

    Right answers of a worse policy would teach its habits too.
    """
    gains = [earlier[prompt] - share for prompt, share in present.items() if prompt in earlier]
    if len(gains) < MIN_PROMPTS_TO_COMPARE:
        return False
    standard_error = stdev(gains) / len(gains) ** 0.5
    return fmean(gains) > MIN_STANDARD_ERRORS * standard_error


def in_batches(groups: Sequence[list[Rollout]], size: int, times: int, seed: int) -> list[list[Rollout]]:
    """Return all groups ``times`` times, each time in another order, in batches of ``size`` answers or just above."""
    batches: list[list[Rollout]] = []
    for place in prompt_order(seed, 0, times * len(groups), len(groups)) if groups else ():
        if not batches or len(batches[-1]) >= size:
            batches.append([])
        number = len({answer.group for answer in batches[-1]})
        batches[-1] += [replace(answer, group=number) for answer in groups[place]]
    return batches
