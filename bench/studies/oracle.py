"""The ceiling of the curriculum: the same choice, by how often the present policy really answers each prompt right.

Every so many steps the policy answers every training prompt a number of times. These answers are not trained on and not
among the tokens of the run; its seconds have them.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from python_trainer.accelerators.base import StepContext
from python_trainer.accelerators.curriculum.accelerator import Curriculum
from python_trainer.accelerators.curriculum.outcomes import Outcomes
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.data import Group
from python_trainer.keyed import keyed_seed
from python_trainer.rollout import SamplingParams


class Measured(Outcomes):
    """Chances and lengths that were measured, and nothing believed.

    Attributes:
        known: share right and tokens of an answer to each prompt, float64 [2, P].
    """

    known: Tensor

    def p(self, keys: Tensor) -> Tensor:
        return self.known[0, keys]

    def signal(self, keys: Tensor) -> Tensor:
        return 2 * self.p(keys) * (1 - self.p(keys))

    def signal_draws(self, keys: Tensor, count: int, generator: torch.Generator) -> Tensor:
        return self.signal(keys).expand(count, -1)

    def cost(self, keys: Tensor) -> Tensor:
        return self.known[1, keys]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"known": self.known.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.known = state["known"].clone()


class Oracle(Curriculum):
    settings: "OracleSettings"
    measured_step = 0

    def _start(self, lengths: list[int], folder: Path) -> None:
        super()._start(lengths, folder)
        self.outcomes: Measured = Measured(lengths, self.settings.memory)

    def choose(self, context: StepContext, count: int) -> list[Group] | None:
        if (context.step - 1) % self.settings.every == 0 and context.step != self.measured_step:
            self.measured_step = context.step
            self.outcomes.known = self._measure(context)
        return super().choose(context, count)

    def _measure(self, context: StepContext) -> Tensor:
        groups, tries, settings = context.groups_of(range(len(self.lengths))), self.settings.tries, context.generation
        for i, group in enumerate(groups):
            group.num_samples, group.sample_id = tries, tries * i
        sampling = SamplingParams(
            temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
            seed=keyed_seed(context.seed, "oracle"), stop=tuple(settings.stop),
        )  # fmt: skip
        found = context.engine.generate(groups, sampling)
        ids = [rollout.response_ids for rollout in found]
        owners = [group.example for group in groups for _ in range(tries)]
        right = context.judge(owners, [context.policy.decode(row) for row in ids], ids).accuracy
        facts = torch.tensor([right, [float(len(row)) for row in ids]], dtype=torch.float64)
        share, tokens = facts.unflatten(1, (-1, tries)).mean(2)
        return torch.stack([(share * tries + 0.3) / (tries + 0.6), tokens.clamp_min(1.0)])


class OracleSettings(CurriculumSettings):
    """Settings of the oracle, and those of what it replaces."""

    name = "oracle"
    accelerator = "bench.studies.oracle:Oracle"

    every: int = 12
    """Steps between two measurements."""
    tries: int = 8
    """Answers to each prompt."""
    database: str | None = None
    """As of the curriculum."""
    rare_share: float = 0.0
    """As of the curriculum."""
