"""AlphaRL: weights are extrapolated along the rank-1 direction in which training moved them, behind a gate.

:class:`rlkernels.extrapolation.Extrapolator` is the method, after arXiv 2510.00553. As there, only projections of
attention and MLP change, each expert's by itself; embeddings, norms, biases and head keep their trained values.
Differences:

- The prediction is a line in the step, which does not divide by the slope of the accuracy. The part of the update
  beyond rank 1 stays as trained.
- Predicted weights stay only if they answer significantly more held-out prompts right than the present ones (see
  ``rlkernels.Gate``). If not, weights nearer to the present ones are tried a few times; then the present ones come
  back bit for bit.
- An attempt without a prospect is refused (see ``rlkernels.refusal``).
- Low-precision models: float32 master weights are tracked and changed, and the model gets them rounded.

``preset: paper`` undoes the first three: one prediction by partial least squares, of rank 1 alone, with the norm of the
whole update, which stays without a gate.

All ranks track; before an attempt rank 0 decides about it and broadcasts its factors, so that all predict the same.
"""

import time
from typing import Any

import torch

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.settings import AlphaSettings
from python_trainer.data import Rollout, filter_scores, select_fresh
from python_trainer.errors import UserError
from rlkernels.extrapolation import PAPER_RULES, TRY_ANYWAY, Attempt, Extrapolator, Gate, Limits
from rlkernels.rank1.projections import Projections

GATE_LEVEL = 0.05  # largest chance per run of accepting weights that are no better


def make_extrapolator(settings: AlphaSettings) -> Extrapolator:
    """Return the method with these settings."""
    steps = {"track_steps": settings.track_steps, "first_step": settings.first_step}
    if settings.preset == "paper":
        return Extrapolator(PAPER_RULES, None, **steps, every=0)
    limits = Limits() if settings.refuse else TRY_ANYWAY
    rules = Attempt(predictor=settings.predictor, horizon=settings.horizon, limits=limits, prompts=None)
    return Extrapolator(rules, Gate(GATE_LEVEL), **steps, every=settings.every)


def find_places(run: RunContext) -> dict[str, list[torch.Tensor]]:
    """Return for each projection the tensors that hold it, the most precise one first."""
    return {name: run.optimizer.places(name) for name in Projections.of(run.optimizer.masters)}


class Alpha(Accelerator):
    """Track the weights of a run, and extrapolate them when that is due."""

    settings: AlphaSettings

    def __init__(self, settings: AlphaSettings):
        super().__init__(settings)
        self.extrapolator = make_extrapolator(settings)
        self.judged = True
        self.seconds = {"track": 0.0, "gate": 0.0}

    def begin(self, run: RunContext) -> None:
        projections = Projections.of(run.optimizer.masters)
        if not projections:
            raise UserError("accelerator alpha: the model has no trainable projection to extrapolate")
        self.extrapolator.restart(find_places(run), 0)
        run.note(f"alpha: {projections.describe_left_out()}")

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        fresh = select_fresh(rollouts)  # neither stored answers nor those with a right beginning
        if self.judged and any(rollout.filter_score is not None for rollout in fresh):
            self.judged = False  # rewards take the place of accuracies
            self.extrapolator.restart(find_places(context.run), context.step - 1)
        self.extrapolator.add_scores(context.step, filter_scores(fresh))
        return rollouts

    def after_update(self, context: StepContext) -> None:
        step = context.step
        if self.extrapolator.tracks(step):
            start = time.perf_counter()
            self.extrapolator.track(find_places(context.run), step)
            self._count_seconds(context, "track", start)
            if self.extrapolator.is_due(step):
                self.attempt(context)

    def attempt(self, context: StepContext) -> dict[str, Any]:
        """Make one attempt; return its event."""
        run = context.run
        start = time.perf_counter()
        event = self.extrapolator.attempt(
            find_places(run),
            context.step,
            lambda rows: run.evaluate_each("gate", rows),
            available=len(run.task.gate),
            forget=run.optimizer.forget_momentum,
            changed=run.engine.policy_updated,
            on_rank0=run.on_rank0,
        )
        if "refused" in event:
            context.telemetry["alpha/refused"] = 1.0
            return event
        self._count_seconds(context, "gate", start)
        tries = event["tries"]
        if tries:
            context.telemetry["alpha/gate_accuracy"] = tries[-1]["after"]
        context.telemetry["alpha/tried"] = float(max(len(tries), 1))
        context.telemetry["alpha/accepted"] = float(event["accepted"])
        return event

    def _count_seconds(self, context: StepContext, name: str, start: float) -> None:
        seconds = time.perf_counter() - start
        self.seconds[name] += seconds
        context.telemetry[f"alpha/{name}_s"] = seconds

    def summary(self) -> dict[str, Any]:
        """Return the seconds spent on tracking and at the gate, and all attempts."""
        seconds = {f"{name}_s": seconds for name, seconds in self.seconds.items()}
        return seconds | {"attempts": self.extrapolator.events}

    def state_dict(self) -> dict[str, Any]:
        return self.extrapolator.state_dict() | {"seconds": self.seconds, "judged": self.judged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.extrapolator.load_state_dict(state)
        self.seconds = state["seconds"]
        self.judged = state["judged"]
