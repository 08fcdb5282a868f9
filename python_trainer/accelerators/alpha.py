"""AlphaRL: weights are extrapolated along the rank-1 direction in which training moved them, behind a gate.

After arXiv 2510.00553. As there, only projections of attention and MLP change, each expert's by itself; embeddings,
norms, biases and head keep their trained values. What differs:

- The prediction is a line in the step, which does not divide by the slope of the accuracy, and what the update holds
  beyond rank 1 stays as trained.
- Predicted weights stay only if they answer significantly more held-out prompts right than the present ones (see
  ``rlkernels.Gate``); they are pulled towards the present weights a few times, then everything is put back bit for bit.
- Nothing is tried without a reason to (see ``rlkernels.refusal``).
- Low-precision models: float32 master weights are tracked and changed, and the model gets them rounded.

``preset: paper`` undoes the first three: one prediction by partial least squares, of rank 1 alone, with the norm of the
whole update, which stays whatever it answers.

A jump leaves Adam with a mean gradient of where the weights were: for those that jumped it is set to 0. The mean of its
square stays, as the scale of gradients does not change much. Tracking starts again from there.

All ranks track; before an attempt rank 0 decides about it and broadcasts its factors, so that all predict the same.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.settings import AlphaSettings
from python_trainer.data import Rollout, fresh_ones, merits
from python_trainer.errors import UserError
from rlkernels import RankOneTrajectory
from rlkernels.extrapolation import Attempt, Gate, Limits
from rlkernels.rank1.projections import Projections

GATE_LEVEL = 0.05  # chance per run of accepting weights that are no better, at most
SMOOTHING = 5  # steps over which the training accuracy is averaged
TRY_ANYWAY = Limits(min_rise=-math.inf, min_cosine=0.0, min_skill=-math.inf)
FACTS = "anchor", "answered", "next_attempt", "events", "seconds"  # in checkpoints as they are


class Alpha(Accelerator):
    """Tracks, extrapolates and asks the gate."""

    settings: AlphaSettings
    trajectory: RankOneTrajectory  # made by begin or load_state_dict

    def __init__(self, settings: AlphaSettings):
        super().__init__(settings)
        self.anchor = 0  # the step whose weights are the base of the trajectory
        self.answered: list[list[float]] = []  # [step, sum of merits, answers] of every step since the anchor
        self.next_attempt = settings.first_step
        self.gate = Gate(GATE_LEVEL)
        self.events: list[dict[str, Any]] = []  # one for every attempt
        self.seconds = {"track": 0.0, "gate": 0.0}

    def begin(self, run: RunContext) -> None:
        self.restart(run, 0)
        run.note(f"alpha: {Projections.of(run.optimizer.masters).describe_left_out()}")

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        fresh = merits(fresh_ones(rollouts))  # not those that were stored, or had a right beginning
        if fresh and (not self.answered or self.answered[-1][0] != context.step):
            self.answered.append([context.step, 0, 0])
        if fresh:  # dynamic sampling comes in several rounds
            self.answered[-1][1] += sum(fresh)
            self.answered[-1][2] += len(fresh)
        return rollouts

    def after_update(self, context: StepContext) -> None:
        if context.step % self.settings.track_steps == 0:
            with self._clock(context, "track"):
                self.track(context)
            if context.step >= self.next_attempt:
                self.attempt(context)

    def restart(self, run: RunContext, step: int) -> None:
        """Starts a new trajectory at the present weights, those after ``step`` steps."""
        base = {}
        for name, master in Projections.of(run.optimizer.masters).items():
            stored = run.optimizer.places(name)[-1]
            # the model's own precision is enough where it holds the master exactly
            exact = torch.equal(stored.float(), master)
            base[name] = (stored if exact else master).detach().clone()
        if not base:
            raise UserError("accelerator alpha: the model has no trainable projection to extrapolate")
        self.trajectory, self.anchor, self.answered = RankOneTrajectory(base), step, []

    def track(self, context: StepContext) -> None:
        """Adds the weights as they are to the trajectory, with the smoothed training accuracy."""
        weights = self.weights(context)
        self.trajectory.to(next(iter(weights.values())).device)  # a resumed run was loaded on the CPU
        window = [right / answers for _, right, answers in self.answered[-SMOOTHING:]]
        if window:  # else nobody knows how good they are
            accuracy = sum(window) / len(window)
            self.trajectory.track(weights, step=context.step - self.anchor, accuracy=accuracy)

    def weights(self, context: StepContext) -> dict[str, torch.Tensor]:
        """Returns the tracked weights, as precise as they are trained."""
        return {name: context.run.optimizer.places(name)[0] for name in self.trajectory.base}

    def rules(self, prompts: int) -> Attempt:
        if self.settings.preset == "paper":
            return Attempt(predictor="pls", keep_rest=False, limits=TRY_ANYWAY)
        limits = Limits() if self.settings.refuse else TRY_ANYWAY
        return Attempt(
            predictor=self.settings.predictor,
            horizon=self.settings.horizon,
            limits=replace(limits, holdout=max(len(self.trajectory) // 3, 1)),
            prompts=prompts,
        )

    def attempt(self, context: StepContext) -> dict[str, Any]:
        """Makes one attempt, from the refusals to the gate -> its outcome, which also joins ``events``."""
        tracked, rules = self.trajectory, self.rules(len(context.run.task.gate))
        objection = context.run.once(lambda: rules.refusal(tracked))
        event: dict[str, Any] = {"step": context.step, "accepted": False}
        if objection is not None:
            event |= {"refused": objection.reason, "detail": objection.detail}
            context.telemetry["alpha/refused"] = 1.0
        else:
            factors = context.run.once(lambda: {name: x.cpu() for name, x in tracked.state_dict().items()})
            tracked.load_state_dict(factors)
            with self._clock(context, "gate"):
                event |= self._try(context, tracked, rules)
            once = self.settings.preset == "paper" or not self.settings.every
            self.next_attempt = 1 << 60 if once else context.step + self.settings.every
        self.events.append(event)
        return event

    def _try(self, context: StepContext, tracked: RankOneTrajectory, rules: Attempt) -> dict[str, Any]:
        """Writes predicted weights, if the gate does not object; they begin a new trajectory."""
        run, tries = context.run, list[dict[str, Any]]()
        predicted = rules.predict(tracked, self.weights(context))
        places = {name: run.optimizer.places(name) for name in predicted}
        if self.settings.preset == "paper":
            with torch.no_grad():
                for name, weight in predicted.items():
                    for place in places[name]:
                        place.copy_(weight)
            run.engine.policy_updated()
        else:
            tries = rules.judge(
                self.gate, predicted, places, lambda rows: run.evaluate_each("gate", rows),
                available=len(run.task.gate), changed=run.engine.policy_updated,
            )  # fmt: skip
            context.telemetry["alpha/gate_accuracy"] = tries[-1]["after"]
        accepted = not tries or tries[-1]["accepted"]
        if accepted:
            run.optimizer.forget_momentum(predicted)
            self.restart(run, context.step)
        context.telemetry["alpha/tried"] = float(max(len(tries), 1))
        context.telemetry["alpha/accepted"] = float(accepted)
        return {"accepted": accepted, "modules": len(predicted), "tries": tries}

    @contextmanager
    def _clock(self, context: StepContext, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.seconds[name] += spent
        context.telemetry[f"alpha/{name}_s"] = spent

    def summary(self) -> dict[str, Any]:
        """Returns the seconds spent on tracking and at the gate, and all attempts."""
        return {f"{name}_s": seconds for name, seconds in self.seconds.items()} | {"attempts": self.events}

    def state_dict(self) -> dict[str, Any]:
        return {
            "base": self.trajectory.base,
            "trajectory": self.trajectory.state_dict(),
            "gate": [self.gate.comparisons, self.gate.position],
        } | {name: getattr(self, name) for name in FACTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trajectory = RankOneTrajectory(state["base"])
        self.trajectory.load_state_dict(state["trajectory"])
        self.gate = Gate(GATE_LEVEL, *state["gate"])
        vars(self).update({name: state[name] for name in FACTS})
