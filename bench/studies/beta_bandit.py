"""A rival of the curriculum: a Beta posterior for each prompt, Thompson sampling to p = 1/2 (MoPPS, arXiv 2507.04632).

Counts of right and wrong answers fade by ``decay`` at each visit; of all prompts those are asked whose draws from their
posteriors lie nearest to 1/2. Neither lengths, nor neighbours, nor costs.
"""

import torch

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.data import Group, Rollout, by_group, merits
from python_trainer.keyed import keyed_seed


class BetaBandit(Accelerator):
    """Attributes: counts: of right and wrong answers and one of each before, float64 [2, P]."""

    def begin(self, run: RunContext) -> None:
        self.counts = torch.ones(2, len(run.prompts), dtype=torch.float64)

    def choose(self, context: StepContext, count: int) -> list[Group]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_seed(context.seed, "beta bandit", context.samples))
            draws = torch.distributions.Beta(*self.counts).sample()
        return context.groups_of((draws - 0.5).abs().argsort()[:count].tolist())

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        for group in by_group(rollouts).values():
            key, right = group[0].prompt_key, sum(merits(group))
            seen = torch.tensor([right, len(group) - right], dtype=torch.float64)
            self.counts[:, key] = 1 + self.settings.decay * (self.counts[:, key] - 1) + seen
        return rollouts

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.counts = state["counts"].clone()


class BetaBanditSettings(AcceleratorSettings):
    """Settings of the bandit."""

    name = "beta_bandit"
    accelerator = BetaBandit

    decay: float = 0.5
    """What is left of earlier counts when a prompt comes back."""
