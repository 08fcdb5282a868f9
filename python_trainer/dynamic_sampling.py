"""The groups of one step: of one round, or with DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) of several."""

from dataclasses import replace

from python_trainer.data import Rollout, by_group, merits
from python_trainer.rollout.settings import RolloutConfig


class StepSampler:
    """Collects the rollouts of a step, round by round, until there are enough.

    Without ``rollout.dynamic_sampling`` one round is enough. With it, rounds go on until ``prompts_per_step`` groups
    have a spread, or ``max_sampling_rounds`` are over. A group has a spread if its answers are neither all right nor
    all wrong; the task's accuracy decides, whatever rewards were shaped into. Where a task has no right and wrong, its
    raw rewards must differ.
    """

    def __init__(self, settings: RolloutConfig):
        self.settings = settings
        self.rounds = 0
        self.kept: list[list[Rollout]] = []  # groups with a spread; without dynamic sampling all
        self.dropped: list[list[Rollout]] = []
        self.ungrouped: list[list[Rollout]] = []  # stored answers, which are judged against a chance

    @property
    def missing(self) -> int:
        """Returns how many prompts the next round should answer; 0 ends the sampling."""
        size, dynamic = self.settings.prompts_per_step, self.settings.dynamic_sampling
        if self.rounds >= (self.settings.max_sampling_rounds if dynamic else 1):
            return 0
        return max(size - len(self.kept), 0)

    def add(self, rollouts: list[Rollout]) -> None:
        """Takes the rollouts of one round."""
        self.rounds += 1
        for members in by_group(rollouts).values():
            if members[0].expected is not None:
                self.ungrouped.append(members)
            elif len(set(merits(members))) > 1 or not self.settings.dynamic_sampling:
                self.kept.append(members)
            else:
                self.dropped.append(members)

    def generated(self) -> list[Rollout]:
        """Returns all rollouts of all rounds."""
        return [rollout for members in (*self.kept, *self.dropped, *self.ungrouped) for rollout in members]

    def rollouts(self) -> list[Rollout]:
        """Returns the rollouts to train on.

        These are ``prompts_per_step`` groups, numbered from 0: groups with a spread first, then dropped ones if there
        are too few. Stored answers come on top.
        """
        lacking = max(self.settings.prompts_per_step - len(self.kept), 0)
        numbered = enumerate([*self.kept, *self.dropped[:lacking], *self.ungrouped])
        return [replace(rollout, group=number) for number, group in numbered for rollout in group]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics ``sampling/rounds`` and ``sampling/kept_groups``, a share; none of a single round."""
        if not self.settings.dynamic_sampling:
            return {}
        drawn = len(self.kept) + len(self.dropped)
        return {"sampling/rounds": self.rounds, "sampling/kept_groups": len(self.kept) / max(drawn, 1)}
