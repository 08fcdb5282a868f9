"""AlphaRL: weights are extrapolated along the direction in which training moved them, behind a gate.

After arXiv 2510.00553, whose prediction divides by the slope of the accuracy and has no acceptance test. What differs:

- Predicted weights stay only if they answer significantly more held-out prompts right than the present ones (see
  ``rlkernels.Gate``); they are pulled towards the present weights a few times, then everything is put back bit for bit.
- Nothing is tried without a reason to: see ``rlkernels.refusal``.
- Only 2-D projections of attention and MLP are changed, as in the paper. Embeddings, norms, biases and head keep
  their trained values.
- Low-precision models: float32 master weights are tracked and changed, and the model gets them rounded.

An accepted jump leaves Adam with a mean gradient of where the weights were: it is set to 0 for the weights that
jumped. The mean of its square stays, as the scale of the gradients does not change much. Tracking starts again from
there.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from python_trainer.accelerators.base import Accelerator, PlannedGroup, Rollout, Settings, StepContext
from python_trainer.errors import UserError
from rlkernels import RankOneTrajectory
from rlkernels.extrapolation import Attempt, Gate, Limits
from rlkernels.rank1.stream import default_filter

if TYPE_CHECKING:
    from python_trainer.tasks import Task


class AlphaSettings(Settings):
    """Gated extrapolation of the weights."""

    track_steps: int = Field(2, ge=1)
    """Keep rank-4 factors of the update every so many steps."""
    first_step: int = Field(6, ge=1)
    """First step after which to extrapolate. When it is refused, the next tracked step tries again."""
    every: int = Field(20, ge=0)
    """Steps from one decision of the gate to the next attempt; 0: one decision in a run."""
    predictor: Literal["pls", "secant", "temporal", "full"] = "full"
    """pls goes to target_accuracy, the others to `horizon` times the tracked steps."""
    horizon: float = Field(2.0, gt=1)
    """Extrapolate to this many times the steps that were tracked."""
    target_accuracy: float = Field(1.0, gt=0, le=1)
    """Accuracy that pls goes to."""
    scale: float | Literal["alpha"] = 1.0
    """Factor on the predicted update along the direction; `alpha`: give it the norm of the whole update (AlphaRL)."""
    keep_rest: bool = True
    """Keep what the update holds beyond its leading direction; false drops it, as AlphaRL does."""
    smoothing: int = Field(5, ge=1)
    """Steps over which the training accuracy is averaged."""
    gate_prompts: int = Field(512, ge=1)
    """Held-out prompts of the paired comparison, at most; the task must have as many. More find smaller gains, and
    cost more than those are worth where a step has few answers."""
    gate_level: float = Field(0.05, gt=0, lt=1)
    """Chance per run of accepting weights that are no better, at most."""
    max_tries: int = Field(3, ge=1)
    """Candidates in one attempt."""
    shrink: float = Field(0.5, gt=0, lt=1)
    """Each further candidate takes this share of the way of the one before."""
    min_gap: float = Field(0.01, ge=0, lt=1)
    """Refuse modules whose leading direction stands out less: 1 - sigma2 / sigma1."""
    min_cosine: float = Field(0.7, ge=0, le=1)
    """Refuse modules whose direction has turned further since half of the tracked steps."""
    min_rise: float = 0.02
    """Refuse when the training accuracy rose less from the first third of the tracked steps to the last."""
    min_skill: float = 0.0
    """Refuse when the back-test on the last third of the tracked steps does no better than this."""

    def rules(self, holdout: int) -> Attempt:
        """Of an attempt; ``holdout`` points are left out in the back-test."""
        limits = Limits(min_gap=self.min_gap, min_rise=self.min_rise, min_cosine=self.min_cosine,
                        min_skill=self.min_skill, holdout=holdout)  # fmt: skip
        return Attempt(predictor=self.predictor, horizon=self.horizon, accuracy=self.target_accuracy, scale=self.scale,
                       keep_rest=self.keep_rest, limits=limits, prompts=self.gate_prompts, max_tries=self.max_tries,
                       shrink=self.shrink)  # fmt: skip

    def splits(self, task: "Task") -> list[str]:
        self.check_gate(len(task.gate))
        return ["gate"]

    def check_gate(self, size: int) -> None:
        """Raises UserError where the task has fewer gate prompts than are asked for."""
        if size < self.gate_prompts:
            raise UserError(
                f"accelerators.alpha.gate_prompts: {self.gate_prompts} held-out prompts are asked for, but the task "
                f"has {size}; name a file of them in task.gate_path, set more aside by task.gate_size, or ask for fewer"
            )


class Alpha(Accelerator):
    """Tracks, extrapolates and asks the gate."""

    name = "alpha"
    Settings = AlphaSettings
    settings: AlphaSettings

    def __init__(self, settings: AlphaSettings):
        super().__init__(settings)
        self.trajectory: RankOneTrajectory | None = None
        self.anchor = 0  # the step whose weights are the base of the trajectory
        self.answered: list[list[float]] = []  # [step, right answers, answers] of every step since the anchor
        self.next_attempt = settings.first_step
        self.gate = Gate(settings.gate_level)
        self.events: list[dict[str, Any]] = []  # one for every attempt
        self.seconds = {"track": 0.0, "gate": 0.0}

    # hooks -------------------------------------------------------------------------------------------------------

    def plan(self, context: StepContext, groups: list[PlannedGroup]) -> list[PlannedGroup]:
        if self.trajectory is None:
            self.restart(context, context.step - 1)
        else:  # a resumed run was loaded on the CPU
            self.trajectory.to(next(iter(context.optimizer.masters.values())).device)
        return groups

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        if not self.answered or self.answered[-1][0] != context.step:
            self.answered.append([context.step, 0, 0])
        fresh = [rollout.accuracy for rollout in rollouts if rollout.importance_cap is None]  # not stored right ones
        self.answered[-1][1] += sum(fresh)
        self.answered[-1][2] += len(fresh)  # dynamic sampling comes in several rounds
        return rollouts

    def after_update(self, context: StepContext) -> None:
        if context.step % self.settings.track_steps == 0:
            with self._clock(context, "track"):
                self.track(context)
            if context.step >= self.next_attempt:
                self.attempt(context)

    # parts -------------------------------------------------------------------------------------------------------

    def restart(self, context: StepContext, step: int) -> None:
        """The weights as they are, after ``step`` steps, become the base of a new trajectory."""
        base = {}
        for name, master in context.optimizer.masters.items():
            if master.ndim == 2 and default_filter(name):
                stored = context.optimizer.params[name].detach()
                # the model's own precision is enough where it holds the master exactly
                base[name] = stored.clone() if torch.equal(stored.float(), master) else master.detach().clone()
        if not base:
            raise UserError("accelerator alpha: the model has no trainable 2-D projection to extrapolate")
        self.trajectory, self.anchor, self.answered = RankOneTrajectory(base), step, []

    def track(self, context: StepContext) -> None:
        """Adds the weights as they are to the trajectory, with the smoothed training accuracy."""
        assert self.trajectory is not None
        window = [right / answers for _, right, answers in self.answered[-self.settings.smoothing :]]
        accuracy = sum(window) / len(window)
        self.trajectory.track(self.weights(context), step=context.step - self.anchor, accuracy=accuracy)

    def weights(self, context: StepContext) -> dict[str, torch.Tensor]:
        """Those that are tracked, as precise as they are trained."""
        assert self.trajectory is not None
        return {name: context.optimizer.masters[name] for name in self.trajectory.base}

    def rules(self) -> Attempt:
        return self.settings.rules(holdout=max(len(self.trajectory or ()) // 3, 1))

    def attempt(self, context: StepContext) -> dict[str, Any]:
        """One attempt, from the refusals to the gate -> what became of it, which is also noted in ``events``."""
        assert self.trajectory is not None
        objection = self.rules().refusal(self.trajectory)
        event: dict[str, Any] = {"step": context.step, "accepted": False}
        if objection is not None:
            event |= {"refused": objection.reason, "detail": objection.detail}
            context.telemetry["alpha/refused"] = 1.0
        else:
            with self._clock(context, "gate"):
                event |= self._try(context)
            self.next_attempt = context.step + self.settings.every if self.settings.every else 1 << 60
            context.telemetry["alpha/tried"] = float(len(event["tries"]))
            context.telemetry["alpha/accepted"] = float(event["accepted"])
            context.telemetry["alpha/gate_accuracy"] = event["tries"][-1]["after"]
        self.events.append(event)
        return event

    def _try(self, context: StepContext) -> dict[str, Any]:
        """Asks the gate; an accepted jump begins a new trajectory."""
        assert self.trajectory is not None
        rules, optimizer = self.rules(), context.optimizer
        predicted = rules.predict(self.trajectory, self.weights(context))
        tries = rules.judge(
            self.gate, predicted, {name: optimizer.places(name) for name in predicted},
            lambda rows: context.evaluate_each("gate", rows), available=context.gate_size,
            changed=context.engine.policy_updated,
        )  # fmt: skip
        accepted = tries[-1]["accepted"]
        if accepted:
            optimizer.forget_momentum(predicted)
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

    # what remains ------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Seconds spent on tracking and at the gate, and all attempts."""
        return {f"{name}_s": seconds for name, seconds in self.seconds.items()} | {"attempts": self.events}

    def state_dict(self) -> dict[str, Any]:
        tracked = self.trajectory
        return {
            "base": tracked.base if tracked else None,
            "trajectory": tracked.state_dict() if tracked else None,
            "anchor": self.anchor,
            "answered": self.answered,
            "next_attempt": self.next_attempt,
            "gate": [self.gate.comparisons, self.gate.position],
            "events": self.events,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trajectory = None
        if state["base"] is not None:
            self.trajectory = RankOneTrajectory(state["base"])
            self.trajectory.load_state_dict(state["trajectory"])
        self.anchor, self.answered = state["anchor"], [list(row) for row in state["answered"]]
        self.next_attempt, self.events = state["next_attempt"], list(state["events"])
        self.gate = Gate(self.settings.gate_level, *state["gate"])
        self.seconds = dict(state["seconds"])
