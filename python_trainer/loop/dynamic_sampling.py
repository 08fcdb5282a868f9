"""The groups of one step: from one round, or from several with DAPO's dynamic sampling (arXiv 2503.14476, 3.2)."""

from dataclasses import replace

from python_trainer.data import Rollout, by_group, has_spread
from python_trainer.rollout.settings import RolloutConfig


class StepSampler:
    """Collect the rollouts of a step, round by round, until there are enough.

    Without ``rollout.dynamic_sampling`` one round is enough. With it, rounds go on until ``prompts_per_step`` groups
    have a spread, or ``max_sampling_rounds`` are over. A group has a spread if its answers are neither all right nor
    all wrong; the task's accuracy decides, whatever rewards were shaped into. Where a task has no right and wrong, its
    raw rewards must differ.
    """

    def __init__(self, settings: RolloutConfig):
        self.settings = settings
        self.rounds = 0
        self.accepted: list[list[Rollout]] = []  # groups with a spread; without dynamic sampling all
        self.dropped: list[list[Rollout]] = []
        self.ungrouped: list[list[Rollout]] = []  # stored answers with a success rate as their baseline

    @property
    def missing(self) -> int:
        """Return how many prompts the next round should answer; 0 ends the sampling."""
        max_rounds = self.settings.max_sampling_rounds if self.settings.dynamic_sampling else 1
        if self.rounds >= max_rounds:
            return 0
        return max(self.settings.prompts_per_step - len(self.accepted), 0)

    def add(self, rollouts: list[Rollout]) -> None:
        """Take the rollouts of one round."""
        self.rounds += 1
        for members in by_group(rollouts).values():
            if members[0].success_rate is not None:
                self.ungrouped.append(members)
            elif has_spread(members) or not self.settings.dynamic_sampling:
                self.accepted.append(members)
            else:
                self.dropped.append(members)

    def all_rollouts(self) -> list[Rollout]:
        """Return all rollouts of all rounds, stored answers among them."""
        return [rollout for members in (*self.accepted, *self.dropped, *self.ungrouped) for rollout in members]

    def rollouts(self) -> list[Rollout]:
        """Return the rollouts to train on.

        These are ``prompts_per_step`` groups, numbered from 0: groups with a spread first, then dropped ones if there
        are too few. Stored answers come on top.
        """
        lacking = max(self.settings.prompts_per_step - len(self.accepted), 0)
        numbered = enumerate([*self.accepted, *self.dropped[:lacking], *self.ungrouped])
        return [replace(rollout, group=number) for number, group in numbered for rollout in group]

    def metrics(self) -> dict[str, float]:
        """Return the metrics ``sampling/rounds`` and ``sampling/kept_groups``, a share; none of a single round."""
        if not self.settings.dynamic_sampling:
            return {}
        drawn = len(self.accepted) + len(self.dropped)
        return {"sampling/rounds": self.rounds, "sampling/kept_groups": len(self.accepted) / max(drawn, 1)}
