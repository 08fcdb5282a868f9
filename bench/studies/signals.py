"""Ablations of the curriculum's choice of prompts: without their cost, and weighed by how undecided answers are.

The weight of an answer is the sum over its tokens of (1 - pi)^2, pi the chance of the token that was drawn: what the
gradient of its log-probability is made of. It grows with the length.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.curriculum.accelerator import Curriculum
from python_trainer.accelerators.curriculum.field import Field
from python_trainer.accelerators.curriculum.outcomes import Outcomes, features_of
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.data import Group, Rollout


def gradient_weight(answer: Rollout) -> float:
    """Sum over the tokens of (1 - pi)^2."""
    return float((1 - torch.tensor(answer.logprobs, dtype=torch.float64).exp()).square().sum())


class FreeOutcomes(Outcomes):
    """As if all answers cost the same."""

    def cost(self, keys: Tensor) -> Tensor:
        return torch.ones(len(keys), dtype=torch.float64)


class WeighedOutcomes(Outcomes):
    """Signal times the weight of an answer, which is learned as its length is."""

    def __init__(self, lengths: list[int], memory: float):
        super().__init__(lengths, memory)
        self.weights = Field(features_of(lengths), mean=2.0, spread=2.0, own=0.3, walk=0.02, memory=memory)

    def advance(self, step: int) -> None:
        super().advance(step)
        self.weights.advance(step)

    def learn(self, answers: Sequence[Rollout]) -> None:
        super().learn(answers)
        mean = sum(map(gradient_weight, answers)) / len(answers)
        self.weights.observe(answers[0].prompt_key, torch.tensor(mean + 1e-3).log().item(), 0.2)

    def signal(self, keys: Tensor) -> Tensor:
        return super().signal(keys) * self._level(self.weights, keys)

    def signal_draws(self, keys: Tensor, count: int, generator: torch.Generator) -> Tensor:
        return super().signal_draws(keys, count, generator) * self._level(self.weights, keys)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"weights": self.weights.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.weights.load_state_dict(state["weights"])


OUTCOMES: dict[str, type[Outcomes]] = {"free": FreeOutcomes, "weighed": WeighedOutcomes}


class Signals(Curriculum):
    """With signals in another unit than what is seen, so ``least_gain`` has to be 0."""

    settings: "SignalsSettings"

    def _start(self, lengths: list[int], folder: Path) -> None:
        super()._start(lengths, folder)
        self.outcomes = OUTCOMES[self.settings.kind](lengths, self.settings.memory)

    def choose(self, context: StepContext, count: int) -> list[Group] | None:
        assert self.settings.least_gain == 0.0
        return super().choose(context, count)


class SignalsSettings(CurriculumSettings):
    """Settings of the ablation, and those of the curriculum."""

    name = "signals"
    accelerator = "bench.studies.signals:Signals"

    kind: Literal["free", "weighed"] = "weighed"
    """What is changed: answers have no cost, or their weight counts."""
    least_gain: float | None = 0.0
    """From the first step on."""
    database: str | None = None
    """As of the curriculum."""
    rare_share: float = 0.0
    """As of the curriculum."""
