"""An ablation of the curriculum: a group of each step begins behind the first part of a right answer of the run's own.

It is to the hard prompt that was left alone for longest, of those with a stored right answer, in place of a group of
plain order. The cut is where a curve of the chance over the share left, fitted to all groups that were continued, is
one half; or anywhere; or the group begins at the start, which tells what another visit does without a cut. Tokens that
are given are not trained on.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.curriculum.accelerator import Curriculum
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.accelerators.curriculum.stored import Stored
from python_trainer.data import Group, Rollout, by_group, merits
from python_trainer.keyed import keyed_unit

HARD = 0.25  # chance to be right, at most
GUESS = torch.tensor([2.0, -4.0], dtype=torch.float64)  # logit of the chance: at the end of an answer, by share left
DOUBT = 2.0  # standard deviation of both


def fitted(seen: Tensor) -> Tensor:
    """Intercept and slope of the logit of the chance over the share left, the most likely ones, [2].

    Args:
        seen: of every group that was continued: share left, answers, right ones, float64 [N, 3].
    """
    x = torch.stack([torch.ones(len(seen), dtype=torch.float64), seen[:, 0]], dim=1)
    line = GUESS.clone()
    for _ in range(20):
        p = (x @ line).sigmoid()
        slope = x.T @ (seen[:, 2] - seen[:, 1] * p) - (line - GUESS) / DOUBT**2
        curvature = x.T @ (x * (seen[:, 1] * p * (1 - p))[:, None]) + torch.eye(2, dtype=torch.float64) / DOUBT**2
        line = line + torch.linalg.solve(curvature, slope)
    return line


class Cuts(Curriculum):
    """Attributes: seen: as of :func:`fitted`; visited: step of the last visit to each prompt, [P]."""

    settings: "CutsSettings"

    def _start(self, *arguments: Any) -> None:
        super()._start(*arguments)
        self.seen = torch.zeros(0, 3, dtype=torch.float64)
        self.visited = torch.zeros(len(self.lengths))

    def choose(self, context: StepContext, count: int) -> list[Group] | None:
        super().choose(context, count)
        if (stored := self._neglected()) is None:
            return None
        keys = [*context.plain_order(count - 1), stored.answer.prompt_key]
        groups = context.groups_of(keys)
        answer = stored.answer.response_ids
        given = len(answer) - max(1, round(self._share_left(context) * len(answer)))
        groups[-1].prefix_ids = answer[:given]
        groups[-1].max_new_tokens -= given
        return groups

    def _neglected(self) -> Stored | None:
        """A right answer to the hard prompt that was visited last longest ago."""
        found = list(self.stored)
        chances = self.outcomes.p(torch.tensor([stored.answer.prompt_key for stored in found], dtype=torch.int64))
        hard = [stored for stored, p in zip(found, chances.tolist()) if p < HARD]
        return min(hard, key=lambda stored: self.visited[stored.answer.prompt_key].item(), default=None)

    def _share_left(self, context: StepContext) -> float:
        """Of the answer that is given, what the group has to do."""
        if self.settings.cut == "start":
            return 1.0
        if self.settings.cut == "random":
            return keyed_unit(context.seed, "cut")
        intercept, slope = fitted(self.seen).tolist()
        return min(max(-intercept / min(slope, -1e-3), 0.0), 1.0)

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        for group in by_group(rollouts).values():
            self.visited[group[0].prompt_key] = context.step
            if given := group[0].prefix_len:
                left = 1 - given / max(len(answer.response_ids) for answer in group)
                row = torch.tensor([[left, len(group), sum(merits(group))]], dtype=torch.float64)
                self.seen = torch.cat([self.seen, row])
                spread = float(0 < row[0, 2] < row[0, 1])
                context.telemetry |= {"cuts/share_left": left, "cuts/spread": spread}
        return super().collect(context, rollouts)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": self.seen.clone(), "visited": self.visited.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.seen, self.visited = state["seen"].clone(), state["visited"].clone()


class CutsSettings(CurriculumSettings):
    """Settings of the cuts, and those of the curriculum."""

    name = "cuts"
    accelerator = "bench.studies.cuts:Cuts"

    cut: Literal["half", "random", "start"] = "half"
    """Where: at an even chance, anywhere, or nowhere."""
    database: str | None = None
    """As of the curriculum."""
    rare_share: float = 0.0
    """As of the curriculum."""
