"""AlphaRL: weights are extrapolated along the rank-1 direction in which training moved them, behind a gate.

After arXiv 2510.00553. As there, only projections of attention and MLP change, each expert's by itself; embeddings,
norms, biases and head keep their trained values. Differences:

- The prediction is a line in the step, which does not divide by the slope of the accuracy. The part of the update
  beyond rank 1 stays as trained.
- Predicted weights stay only if they answer significantly more held-out prompts right than the present ones (see
  ``rlkernels.Gate``). If not, weights nearer to the present ones are tried a few times; then the present ones come
  back bit for bit.
- An attempt without a prospect is refused (see ``rlkernels.refusal``).
- Low-precision models: float32 master weights are tracked and changed, and the model gets them rounded.

``preset: paper`` undoes the first three: one prediction by partial least squares, of rank 1 alone, with the norm of the
whole update, which stays without a gate.

After a jump Adam's mean gradient belongs to the old weights: it is set to 0 for weights that jumped. The mean square
stays, as the scale of gradients does not change much. Tracking starts again from the new weights.

All ranks track; before an attempt rank 0 decides about it and broadcasts its factors, so that all predict the same.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.settings import AlphaSettings
from python_trainer.data import Rollout, filter_scores, select_fresh
from python_trainer.errors import UserError
from rlkernels import RankOneTrajectory
from rlkernels.extrapolation import Attempt, Gate, Limits
from rlkernels.rank1.projections import Projections

GATE_LEVEL = 0.05  # largest chance per run of accepting weights that are no better
SMOOTHING_STEPS = 5  # over which the training accuracy is averaged
NEVER = 1 << 60  # a step that no run reaches
TRY_ANYWAY = Limits(min_rise=-math.inf, min_cosine=0.0, min_skill=-math.inf)

Weights = Mapping[str, torch.Tensor]
Places = Mapping[str, Sequence[torch.Tensor]]  # the tensors that hold a weight, by its name


class Strategy(Protocol):
    """How to extrapolate: the predictor and its refusals, whether predicted weights stay, and when to try again."""

    def make_attempt(self, trajectory: RankOneTrajectory, gate_prompts: int) -> Attempt: ...

    def write(
        self, attempt: Attempt, gate: Gate, predicted: Weights, places: Places, run: RunContext
    ) -> list[dict[str, Any]]:
        """Write predicted weights; return the tries of the gate, none without a gate."""
        ...

    def next_attempt(self, step: int) -> int:
        """Return the first step of the next attempt after one at this step."""
        ...


class GatedStrategy:
    """``preset: ours``: predicted weights stay if the gate accepts them."""

    def __init__(self, settings: AlphaSettings):
        self.settings = settings

    def make_attempt(self, trajectory: RankOneTrajectory, gate_prompts: int) -> Attempt:
        limits = Limits() if self.settings.refuse else TRY_ANYWAY
        return Attempt(
            predictor=self.settings.predictor,
            horizon=self.settings.horizon,
            limits=replace(limits, holdout=max(len(trajectory) // 3, 1)),
            prompts=gate_prompts,
        )

    def write(
        self, attempt: Attempt, gate: Gate, predicted: Weights, places: Places, run: RunContext
    ) -> list[dict[str, Any]]:
        return attempt.judge(
            gate,
            predicted,
            places,
            lambda rows: run.evaluate_each("gate", rows),
            available=len(run.task.gate),
            changed=run.engine.policy_updated,
        )

    def next_attempt(self, step: int) -> int:
        return step + self.settings.every if self.settings.every else NEVER


class PaperStrategy:
    """``preset: paper``: one prediction, which stays."""

    def make_attempt(self, trajectory: RankOneTrajectory, gate_prompts: int) -> Attempt:
        return Attempt(predictor="pls", keep_rest=False, limits=TRY_ANYWAY)

    def write(
        self, attempt: Attempt, gate: Gate, predicted: Weights, places: Places, run: RunContext
    ) -> list[dict[str, Any]]:
        with torch.no_grad():
            for name, weight in predicted.items():
                for place in places[name]:
                    place.copy_(weight)
        run.engine.policy_updated()
        return []

    def next_attempt(self, step: int) -> int:
        return NEVER


class Alpha(Accelerator):
    """Tracks the weights, predicts later ones, and lets its strategy decide about them."""

    settings: AlphaSettings
    trajectory: RankOneTrajectory  # made by begin or load_state_dict

    def __init__(self, settings: AlphaSettings):
        super().__init__(settings)
        self.strategy: Strategy = PaperStrategy() if settings.preset == "paper" else GatedStrategy(settings)
        self.anchor = 0  # the step whose weights are the base of the trajectory
        self.answered: list[list[float]] = []  # [step, sum of filter scores, answers] of every step since the anchor
        self.next_attempt = settings.first_step
        self.gate = Gate(GATE_LEVEL)
        self.events: list[dict[str, Any]] = []  # one for every attempt
        self.seconds = {"track": 0.0, "gate": 0.0}

    def begin(self, run: RunContext) -> None:
        self.restart(run, 0)
        run.note(f"alpha: {Projections.of(run.optimizer.masters).describe_left_out()}")

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        scores = filter_scores(select_fresh(rollouts))  # neither of stored answers nor of those with a right beginning
        if not scores:
            return rollouts
        if not self.answered or self.answered[-1][0] != context.step:  # not a further round of dynamic sampling
            self.answered.append([context.step, 0, 0])
        self.answered[-1][1] += sum(scores)
        self.answered[-1][2] += len(scores)
        return rollouts

    def after_update(self, context: StepContext) -> None:
        if context.step % self.settings.track_steps == 0:
            with self._clock(context, "track"):
                self.track(context)
            if context.step >= self.next_attempt:
                self.attempt(context)

    def restart(self, run: RunContext, step: int) -> None:
        """Start a new trajectory at the present weights, those after ``step`` steps."""
        base = {}
        for name, master in Projections.of(run.optimizer.masters).items():
            stored = run.optimizer.places(name)[-1]
            # the model's own precision is enough where it holds the master exactly
            exact = torch.equal(stored.float(), master)
            base[name] = (stored if exact else master).detach().clone()
        if not base:
            raise UserError("accelerator alpha: the model has no trainable projection to extrapolate")
        self.trajectory = RankOneTrajectory(base)
        self.anchor = step
        self.answered = []

    def track(self, context: StepContext) -> None:
        """Add the weights as they are to the trajectory, with the smoothed training accuracy."""
        weights = self.weights(context)
        self.trajectory.to(next(iter(weights.values())).device)  # a checkpoint loads it on the CPU
        accuracies = [score / answers for _, score, answers in self.answered[-SMOOTHING_STEPS:]]
        if accuracies:  # without answers nobody knows how good the weights are
            accuracy = sum(accuracies) / len(accuracies)
            self.trajectory.track(weights, step=context.step - self.anchor, accuracy=accuracy)

    def weights(self, context: StepContext) -> dict[str, torch.Tensor]:
        """Return the tracked weights, as precise as they are trained."""
        return {name: context.run.optimizer.places(name)[0] for name in self.trajectory.base}

    def attempt(self, context: StepContext) -> dict[str, Any]:
        """Make one attempt, from the refusals to the gate; return its outcome, which also joins ``events``."""
        run, trajectory = context.run, self.trajectory
        attempt = self.strategy.make_attempt(trajectory, len(run.task.gate))
        refusal = run.on_rank0(lambda: attempt.refusal(trajectory))
        event: dict[str, Any] = {"step": context.step, "accepted": False}
        if refusal is not None:
            event |= {"refused": refusal.reason, "detail": refusal.detail}
            context.telemetry["alpha/refused"] = 1.0
        else:
            factors = run.on_rank0(lambda: {name: x.cpu() for name, x in trajectory.state_dict().items()})
            trajectory.load_state_dict(factors)
            with self._clock(context, "gate"):
                event |= self._extrapolate(context, attempt)
            self.next_attempt = self.strategy.next_attempt(context.step)
        self.events.append(event)
        return event

    def _extrapolate(self, context: StepContext, attempt: Attempt) -> dict[str, Any]:
        """Predict weights and let the strategy write them; those that stay begin a new trajectory."""
        run = context.run
        predicted = attempt.predict(self.trajectory, self.weights(context))
        places = {name: run.optimizer.places(name) for name in predicted}
        tries = self.strategy.write(attempt, self.gate, predicted, places, run)
        accepted = not tries or tries[-1]["accepted"]
        if tries:
            context.telemetry["alpha/gate_accuracy"] = tries[-1]["after"]
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
        seconds = time.perf_counter() - start
        self.seconds[name] += seconds
        context.telemetry[f"alpha/{name}_s"] = seconds

    def summary(self) -> dict[str, Any]:
        """Return the seconds spent on tracking and at the gate, and all attempts."""
        return {f"{name}_s": seconds for name, seconds in self.seconds.items()} | {"attempts": self.events}

    def state_dict(self) -> dict[str, Any]:
        return {
            "base": self.trajectory.base,
            "trajectory": self.trajectory.state_dict(),
            "gate": [self.gate.comparisons, self.gate.position],
            "anchor": self.anchor,
            "answered": self.answered,
            "next_attempt": self.next_attempt,
            "events": self.events,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trajectory = RankOneTrajectory(state["base"])
        self.trajectory.load_state_dict(state["trajectory"])
        self.gate = Gate(GATE_LEVEL, *state["gate"])
        self.anchor = state["anchor"]
        self.answered = state["answered"]
        self.next_attempt = state["next_attempt"]
        self.events = state["events"]
        self.seconds = state["seconds"]
