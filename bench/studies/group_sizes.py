"""Ablations of the curriculum: the answers of a step shared unevenly among its prompts, 2 to 32 each, in plain order.

By ``value``: a group of n brings p (1 - p) (n - 1) / (n + 2), and every further answer goes where it adds most. By
``rarity``: in proportion to 1 / p.
"""

import heapq
from typing import Literal

import torch

from bench.studies.oracle import Oracle, OracleSettings
from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.curriculum.accelerator import Curriculum
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.data import Group

FEWEST, MOST = 2, 32
NOISE = 3.0  # answers at which a group's gradient is half noise

Rule = Literal["value", "rarity"]


def worth_of_one_more(chance: float, size: int, rule: Rule) -> float:
    """What an answer is worth to a group that has ``size`` of them."""
    if rule == "rarity":  # highest averages: sizes in proportion to 1 / p
        return 1 / (max(chance, 1e-3) * size)
    return max(chance * (1 - chance), 1e-6) * (size / (size + NOISE) - (size - 1) / (size - 1 + NOISE))


def sizes(chances: list[float], total: int, rule: Rule) -> list[int]:
    """Answers of each group, ``total`` together, as far as all groups hold them."""
    found = [FEWEST] * len(chances)
    heap = [(-worth_of_one_more(chance, FEWEST, rule), i) for i, chance in enumerate(chances)]
    heapq.heapify(heap)
    for _ in range(total - sum(found)):
        if not heap:
            break
        _, i = heapq.heappop(heap)
        found[i] += 1
        if found[i] < MOST:
            heapq.heappush(heap, (-worth_of_one_more(chances[i], found[i], rule), i))
    return found


class GroupSizes(Curriculum):
    """By what is believed of each prompt."""

    settings: "GroupSizesSettings | KnownGroupSizesSettings"

    def choose(self, context: StepContext, count: int) -> list[Group] | None:
        groups = super().choose(context, count) or context.groups_of(context.plain_order(count))
        chances = self.outcomes.p(torch.tensor([group.prompt_key for group in groups])).tolist()
        total = len(groups) * context.generation.num_generations
        for group, size in zip(groups, sizes(chances, total, self.settings.rule)):
            group.num_samples = size
        return groups


class KnownGroupSizes(GroupSizes, Oracle):
    """By measured chances."""

    settings: "KnownGroupSizesSettings"


class GroupSizesSettings(CurriculumSettings):
    """Settings of the sizes, and those of the curriculum."""

    name = "group_sizes"
    accelerator = "bench.studies.group_sizes:GroupSizes"

    rule: Rule = "value"
    """What sizes go by."""
    database: str | None = None
    """As of the curriculum."""
    rare_share: float = 0.0
    """As of the curriculum."""


class KnownGroupSizesSettings(OracleSettings):
    """Settings of the sizes, and those of the oracle."""

    name = "known_group_sizes"
    accelerator = "bench.studies.group_sizes:KnownGroupSizes"

    rule: Rule = "value"
    """What sizes go by."""
