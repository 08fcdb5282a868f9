"""DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): a step is filled with prompts whose answers differ."""

from collections.abc import Sequence
from dataclasses import replace

from python_trainer.data import Rollout, by_group, merits


class Refill:
    """Gathers groups of answers until ``size`` of them are worth training on.

    A group is when its answers are neither all right nor all wrong: by the task's accuracy, whatever rewards were
    shaped into. Where a task has no right and wrong, its raw rewards must differ.
    """

    def __init__(self, size: int):
        self.size, self.rounds = size, 0
        self.kept: list[list[Rollout]] = []
        self.dropped: list[list[Rollout]] = []
        self.alone: list[list[Rollout]] = []  # stored answers that no group judges

    @property
    def missing(self) -> int:
        return max(self.size - len(self.kept), 0)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """The answers of one round."""
        self.rounds += 1
        for members in by_group(rollouts).values():
            if members[0].expected is not None:
                self.alone.append(members)
            else:
                (self.kept if len(set(merits(members))) > 1 else self.dropped).append(members)

    def batch(self) -> list[Rollout]:
        """``size`` groups, numbered from 0: those worth training on, filled up with others where they are too few.

        Stored answers that no group judges come on top.
        """
        groups = [*[*self.kept, *self.dropped][: self.size], *self.alone]
        return [replace(rollout, group=number) for number, group in enumerate(groups) for rollout in group]

    def metrics(self) -> dict[str, float]:
        drawn = len(self.kept) + len(self.dropped)
        return {"sampling/rounds": self.rounds, "sampling/kept_groups": len(self.kept) / max(drawn, 1)}
