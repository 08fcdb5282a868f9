"""AlphaRL: weights are extrapolated along the direction in which training moved them, behind a gate.

After arXiv 2510.00553, whose prediction divides by the slope of the accuracy and has no acceptance test. What differs:

- Predicted weights stay only if they answer significantly more held-out prompts right than the present ones (see
  ``rlkernels.Gate``); they are pulled towards the present weights a few times, then everything is put back bit for bit.
- Nothing is tried without a reason to (see ``rlkernels.refusal``).
- Only 2-D projections of attention and MLP are changed, as in the paper. Embeddings, norms, biases and head keep
  their trained values.
- Low-precision models: float32 master weights are tracked and changed, and the model gets them rounded.

An accepted jump leaves Adam with a mean gradient of where the weights were: for those that jumped it is set to 0. The
mean of its square stays, as the scale of gradients does not change much. Tracking starts again from there.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from python_trainer.accelerators.base import Accelerator, StepContext
from python_trainer.accelerators.settings import AlphaSettings
from python_trainer.data import Group, Rollout, fresh_ones, merits
from python_trainer.errors import UserError
from rlkernels import RankOneTrajectory
from rlkernels.extrapolation import Attempt, Gate, Limits
from rlkernels.rank1.stream import default_filter

MIN_RISE, MIN_COSINE, MIN_SKILL = 0.02, 0.7, 0.0  # below these nothing is tried; see rlkernels.extrapolation.Limits
GATE_LEVEL = 0.05  # chance per run of accepting weights that are no better, at most
TARGET_ACCURACY = 1.0  # that the predictor pls goes to
SMOOTHING = 5  # steps over which the training accuracy is averaged
FACTS = "anchor", "answered", "next_attempt", "events", "seconds"  # in checkpoints as they are


class Alpha(Accelerator):
    """Tracks, extrapolates and asks the gate."""

    settings: AlphaSettings

    def __init__(self, settings: AlphaSettings):
        super().__init__(settings)
        self.trajectory: RankOneTrajectory | None = None
        self.anchor = 0  # the step whose weights are the base of the trajectory
        self.answered: list[list[float]] = []  # [step, sum of merits, answers] of every step since the anchor
        self.next_attempt = settings.first_step
        self.gate = Gate(GATE_LEVEL)
        self.events: list[dict[str, Any]] = []  # one for every attempt
        self.seconds = {"track": 0.0, "gate": 0.0}

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        if self.trajectory is None:
            self.restart(context, context.step - 1)
        else:  # a resumed run was loaded on the CPU
            self.trajectory.to(next(iter(context.run.optimizer.masters.values())).device)
        return groups

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

    def restart(self, context: StepContext, step: int) -> None:
        """The weights as they are, after ``step`` steps, become the base of a new trajectory."""
        base, optimizer = {}, context.run.optimizer
        for name, master in optimizer.masters.items():
            if master.ndim == 2 and default_filter(name):
                stored = optimizer.params[name].detach()
                # the model's own precision is enough where it holds the master exactly
                base[name] = stored.clone() if torch.equal(stored.float(), master) else master.detach().clone()
        if not base:
            raise UserError("accelerator alpha: the model has no trainable 2-D projection to extrapolate")
        self.trajectory, self.anchor, self.answered = RankOneTrajectory(base), step, []

    def track(self, context: StepContext) -> None:
        """Adds the weights as they are to the trajectory, with the smoothed training accuracy."""
        assert self.trajectory is not None
        window = [right / answers for _, right, answers in self.answered[-SMOOTHING:]]
        if window:  # else nobody knows how good they are
            accuracy = sum(window) / len(window)
            self.trajectory.track(self.weights(context), step=context.step - self.anchor, accuracy=accuracy)

    def weights(self, context: StepContext) -> dict[str, torch.Tensor]:
        """Those that are tracked, as precise as they are trained."""
        assert self.trajectory is not None
        return {name: context.run.optimizer.masters[name] for name in self.trajectory.base}

    def rules(self, prompts: int) -> Attempt:
        settings = self.settings
        return Attempt(
            predictor=settings.predictor,
            horizon=settings.horizon,
            accuracy=TARGET_ACCURACY,
            limits=Limits(
                min_rise=MIN_RISE if settings.refuse else -math.inf,
                min_cosine=MIN_COSINE if settings.refuse else 0.0,
                min_skill=MIN_SKILL if settings.refuse else -math.inf,
                holdout=max(len(self.trajectory or ()) // 3, 1),
            ),
            prompts=prompts,
        )

    def attempt(self, context: StepContext) -> dict[str, Any]:
        """One attempt, from the refusals to the gate -> what became of it, which is also noted in ``events``."""
        assert self.trajectory is not None
        rules = self.rules(len(context.run.task.gate))
        objection = rules.refusal(self.trajectory)
        event: dict[str, Any] = {"step": context.step, "accepted": False}
        if objection is not None:
            event |= {"refused": objection.reason, "detail": objection.detail}
            context.telemetry["alpha/refused"] = 1.0
        else:
            with self._clock(context, "gate"):
                event |= self._try(context, rules)
            self.next_attempt = context.step + self.settings.every if self.settings.every else 1 << 60
            context.telemetry["alpha/tried"] = float(len(event["tries"]))
            context.telemetry["alpha/accepted"] = float(event["accepted"])
            context.telemetry["alpha/gate_accuracy"] = event["tries"][-1]["after"]
        self.events.append(event)
        return event

    def _try(self, context: StepContext, rules: Attempt) -> dict[str, Any]:
        """Asks the gate; an accepted jump begins a new trajectory."""
        assert self.trajectory is not None
        run = context.run
        predicted = rules.predict(self.trajectory, self.weights(context))
        tries = rules.judge(
            self.gate,
            predicted,
            {name: run.optimizer.places(name) for name in predicted},
            lambda rows: run.evaluate_each("gate", rows),
            available=len(run.task.gate),
            changed=run.engine.policy_updated,
        )
        accepted = tries[-1]["accepted"]
        if accepted:
            run.optimizer.forget_momentum(predicted)
            self.restart(context, context.step)
        return {"accepted": accepted, "modules": len(predicted), "tries": tries}

    @contextmanager
    def _clock(self, context: StepContext, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] += spent
            context.telemetry[f"alpha/{name}_s"] = spent

    def summary(self) -> dict[str, Any]:
        """Seconds spent on tracking and at the gate, and all attempts."""
        return {f"{name}_s": seconds for name, seconds in self.seconds.items()} | {"attempts": self.events}

    def state_dict(self) -> dict[str, Any]:
        tracked = self.trajectory
        return {
            "base": None if tracked is None else tracked.base,  # one without points counts as false
            "trajectory": None if tracked is None else tracked.state_dict(),
            "gate": [self.gate.comparisons, self.gate.position],
        } | {name: getattr(self, name) for name in FACTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trajectory = None
        if state["base"] is not None:
            self.trajectory = RankOneTrajectory(state["base"])
            self.trajectory.load_state_dict(state["trajectory"])
        self.gate = Gate(GATE_LEVEL, *state["gate"])
        vars(self).update({name: state[name] for name in FACTS})
