"""A rival of the gate: extrapolated weights are judged by the next training batch, which costs nothing.

The candidate answers the whole batch of the step after it was written. Its mean reward is held against that of the last
steps, by the standard error of both over prompts. Where it is too low the weights from before come back, and the
answers, which the candidate has drawn, are trained on with importance weights. There is one candidate in an attempt.
"""

from statistics import fmean, stdev
from typing import Any, ClassVar

import torch

from python_trainer.accelerators.alpha.accelerator import Alpha
from python_trainer.accelerators.alpha.settings import AlphaSettings
from python_trainer.accelerators.base import StepContext
from python_trainer.data import Rollout, by_group, merits
from python_trainer.tasks import Task

CAP = 2.0  # of importance weights


class OnBatches(Alpha):
    """Attributes: before: weights as they were, while a candidate answers in their place; by name, float32."""

    settings: "OnBatchesSettings"

    def __init__(self, settings: "OnBatchesSettings"):
        super().__init__(settings)
        self.before: dict[str, torch.Tensor] | None = None

    def after_update(self, context: StepContext) -> None:
        if context.step < context.max_steps:  # else no batch would judge a candidate
            super().after_update(context)

    def _try(self, context: StepContext) -> dict[str, Any]:
        """Writes a candidate; :meth:`collect` judges it."""
        assert self.trajectory is not None
        weights = self.weights(context)
        predicted = self.rules().predict(self.trajectory, weights)
        self.before = {name: weights[name].detach().clone() for name in predicted}
        context.optimizer.write(predicted)
        context.engine.policy_updated()
        recent = self.answered[-self.settings.smoothing :]
        mean = fmean(right / answers for _, right, answers in recent)
        # `after` is not known yet
        tried = {"factor": 1.0, "before": mean, "after": mean, "batches": len(recent)}
        return {"accepted": False, "modules": len(predicted), "tries": [tried]}

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        if self.before is not None:
            self._judge(context, self.before, rollouts)
            self.before = None
        return super().collect(context, rollouts)

    def _judge(self, context: StepContext, before: dict[str, torch.Tensor], rollouts: list[Rollout]) -> None:
        event = self.events[-1]
        (tried,) = event["tries"]
        means = [fmean(merits(group)) for group in by_group(rollouts).values()]
        # batches before are as large and vary as much
        error = stdev(means) * ((1 + 1 / tried["batches"]) / len(means)) ** 0.5
        tried["after"] = fmean(means)
        event["accepted"] = tried["after"] >= tried["before"] + self.settings.margin * error
        if event["accepted"]:
            context.optimizer.forget_momentum(before)
            self.restart(context, context.step - 1)
        else:
            context.optimizer.write(before)
            context.engine.policy_updated()
            for rollout in rollouts:
                rollout.importance_cap = CAP  # drawn by others, so they do not count for the accuracy either

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"before": self.before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.before = state["before"]


class OnBatchesSettings(AlphaSettings):
    """Settings of attempts that the next training batch judges, and those of alpha but for the gate's."""

    name = "on_batches"
    accelerator = "bench.studies.on_batches:OnBatches"
    counters: ClassVar = {"alpha/tried": "extrapolations tried (on batches)"}

    margin: float = -1.0
    """Standard errors by which the mean reward of a candidate has to be above that of the steps before."""

    def splits(self, task: Task) -> list[str]:
        return []
