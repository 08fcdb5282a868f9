"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): a step is filled with prompts whose answers differ."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from python_trainer.algorithms.advantages import has_spread
from python_trainer.data import Rollout, by_group


class Refill:
    """Gathers groups of answers until ``size`` of them are worth training on.

    A group is when its answers are neither all right nor all wrong: by the task's accuracy, whatever rewards were
    shaped into.
    """

    def __init__(self, size: int):
        self.size, self.rounds = size, 0
        self.kept: list[list[Rollout]] = []
        self.dropped: list[list[Rollout]] = []

    @property
    def missing(self) -> int:
        return max(self.size - len(self.kept), 0)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """The answers of one round."""
        self.rounds += 1
        groups = torch.tensor([rollout.group for rollout in rollouts])
        accuracy = torch.tensor([rollout.accuracy for rollout in rollouts], dtype=torch.float32)
        differs = dict(zip(groups.tolist(), has_spread(accuracy, groups).tolist()))
        for group, members in by_group(rollouts).items():
            (self.kept if differs[group] else self.dropped).append(members)

    def batch(self) -> list[Rollout]:
        """``size`` groups, numbered from 0: those worth training on, filled up with others where they are too few."""
        groups = [*self.kept, *self.dropped][: self.size]
        return [replace(rollout, group=number) for number, group in enumerate(groups) for rollout in group]

    def metrics(self) -> dict[str, float]:
        drawn = len(self.kept) + len(self.dropped)
        return {"sampling/rounds": self.rounds, "sampling/kept_groups": len(self.kept) / max(drawn, 1)}
