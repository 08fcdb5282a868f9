"""AlphaRL over a training run: track the weights, refuse, predict, test, and start again from weights that stay.

After arXiv 2510.00553, for any trainer that calls :class:`Extrapolator` after its steps.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlkernels import _check
from rlkernels.extrapolation.attempt import Attempt, write_weights
from rlkernels.extrapolation.gate import Gate
from rlkernels.extrapolation.predictors import Limits
from rlkernels.extrapolation.trajectory import RankOneTrajectory
from rlkernels.rank1.projections import tensor_name, view_of

SMOOTHING_STEPS = 5  # over which the training accuracy is averaged
NEVER = 1 << 60  # a step that no run reaches
TRY_ANYWAY = Limits(min_rise=-math.inf, min_cosine=0.0, min_skill=-math.inf)
# the paper's recipe, without a gate: to an accuracy of 1, by rank 1 alone, with the norm of the whole update
PAPER_RULES = Attempt(predictor="pls", keep_rest=False, limits=replace(TRY_ANYWAY, holdout=1))

Places = Mapping[str, Sequence[torch.Tensor]]


def forget_momentum(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor], matrices: Iterable[str]
) -> None:
    """Set the mean gradient (``exp_avg``) of matrices to 0; the mean of its square and the step count stay.

    Args:
        optimizer: of Adam's kind. One without such a mean stays as it is.
        weights: name of a tensor -> the parameter that the optimizer changes.
        matrices: names as in :class:`rlkernels.rank1.projections.Projections`.
    """
    for matrix in matrices:
        mean = optimizer.state.get(weights[tensor_name(matrix)], {}).get("exp_avg")
        if mean is not None:
            view_of(matrix, mean).zero_()


def copy_exactly(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of a weight in the lowest precision that holds it exactly; the most precise tensor comes first."""
    precise, stored = tensors[0], tensors[-1]
    exact = torch.equal(stored.to(precise.dtype), precise)
    return (stored if exact else precise).detach().clone()


class Extrapolator:
    """The extrapolations of one training run.

    After a jump Adam's mean gradient belongs to the old weights, so ``forget`` sets it to 0 for weights that jumped.
    The mean square stays, as the scale of gradients does not change much. Tracking starts again from the new weights.

    ``places`` below is a mapping: name of a matrix -> the tensors [m, n] that hold it, the most precise one first (a
    float32 master copy, then the parameter that is rounded from it). It has the same names in every call.

    Args:
        rules: of every attempt.
        gate: decides whether predicted weights stay; None: they stay untested.
        track_steps: steps between two tracked points.
        first_step: first step after which to extrapolate. After a refusal the next tracked step tries again.
        every: steps from a decision to the next attempt; 0: one decision per run.
        smoothing: steps over which the training accuracy is averaged.

    Attributes:
        trajectory: of the weights since ``anchor``; made by :meth:`restart` or :meth:`load_state_dict`.
        anchor: the step whose weights are the base of the trajectory.
        answered: [step, sum of scores, number of scores] of every step since the anchor.
        next_attempt: the first step that may attempt an extrapolation.
        events: a dictionary for each attempt.

    Raises:
        TypeError, ValueError: a number of steps that is no integer or out of range.
    """

    trajectory: RankOneTrajectory

    def __init__(self, rules: Attempt, gate: Gate | None, *, track_steps: int, first_step: int, every: int,
                 smoothing: int = SMOOTHING_STEPS) -> None:  # fmt: skip
        self.rules = rules
        self.gate = gate
        self.track_steps = _check.integer("track_steps", track_steps, 1)
        self.next_attempt = _check.integer("first_step", first_step, 1)
        self.every = _check.integer("every", every, 0)
        self.smoothing = _check.integer("smoothing", smoothing, 1)
        self.anchor = 0
        self.answered: list[list[float]] = []
        self.events: list[dict[str, Any]] = []

    def restart(self, places: Places, step: int) -> None:
        """Start a new trajectory at the present weights, those after ``step`` steps."""
        self.trajectory = RankOneTrajectory({name: copy_exactly(tensors) for name, tensors in places.items()})
        self.anchor = step
        self.answered = []

    def add_scores(self, step: int, scores: Sequence[float]) -> None:
        """Add scores of training answers of a step, whose mean is its accuracy; a step may add several times."""
        if not scores:
            return
        if not self.answered or self.answered[-1][0] != step:
            self.answered.append([step, 0, 0])
        self.answered[-1][1] += sum(scores)
        self.answered[-1][2] += len(scores)

    def tracks(self, step: int) -> bool:
        """Return whether the weights after this step join the trajectory."""
        return step % self.track_steps == 0 and step != self.anchor

    def track(self, places: Places, step: int) -> None:
        """Add the weights as they are to the trajectory, with the smoothed training accuracy."""
        accuracies = [total / count for _, total, count in self.answered[-self.smoothing :]]
        if not accuracies:  # without answers nobody knows how good the weights are
            return
        weights = {name: tensors[0] for name, tensors in places.items()}
        name, base = next(iter(self.trajectory.base.items()))
        if base.device != weights[name].device:  # a checkpoint was loaded on the CPU
            self.trajectory.to(weights[name].device)
        accuracy = sum(accuracies) / len(accuracies)
        self.trajectory.track(weights, step=step - self.anchor, accuracy=accuracy)

    def is_due(self, step: int) -> bool:
        """Return whether to attempt an extrapolation after this step, which was tracked."""
        return step >= self.next_attempt

    def attempt(
        self,
        places: Places,
        step: int,
        evaluate: Callable[[range], Sequence[float]],
        *,
        available: int,
        forget: Callable[[Iterable[str]], None],
        changed: Callable[[], None] = lambda: None,
        on_rank0: Callable[[Callable[[], Any]], Any] = lambda function: function(),
    ) -> dict[str, Any]:
        """Make one attempt, from the refusals to the gate.

        Args:
            places: see the class.
            step: of the run.
            evaluate, available, changed: as for :meth:`Attempt.judge`.
            forget: called with the names of the matrices that jumped: resets their momentum.
            on_rank0: calls a function on rank 0 -> its result, on all ranks. Rank 0 decides about the attempt and
                broadcasts the factors, so that all ranks predict the same.

        Returns:
            The event that joins ``events``: ``step``, ``accepted``, and either ``refused`` (the reason) and ``detail``,
            or the number of predicted ``modules`` and the ``tries`` of the gate.
        """
        trajectory = self.trajectory
        event: dict[str, Any] = {"step": step, "accepted": False}
        refusal = on_rank0(lambda: self.rules.refusal(trajectory))
        if refusal is not None:
            event |= {"refused": refusal.reason, "detail": refusal.detail}
        else:
            trajectory.load_state_dict(on_rank0(lambda: {n: x.cpu() for n, x in trajectory.state_dict().items()}))
            predicted = self.rules.predict(trajectory, {name: tensors[0] for name, tensors in places.items()})
            tries: list[dict[str, Any]] = []
            if self.gate is None:
                write_weights(places, predicted)
                changed()
            else:
                tries = self.rules.judge(self.gate, predicted, places, evaluate, available=available, changed=changed)
            accepted = self.gate is None or tries[-1]["accepted"]
            event |= {"accepted": accepted, "modules": len(predicted), "tries": tries}
            self.next_attempt = step + self.every if self.every else NEVER
            if accepted:
                forget(predicted)
                self.restart(places, step)
        self.events.append(event)
        return event

    def progress(self) -> dict[str, Any]:
        """Return what a resumed run needs that starts a new trajectory, as numbers and lists."""
        gate = [self.gate.comparisons, self.gate.position] if self.gate else [0, 0]
        return {"gate": gate, "next_attempt": self.next_attempt}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Undo :meth:`progress`."""
        if self.gate is not None:
            self.gate.comparisons, self.gate.position = progress["gate"]
        self.next_attempt = progress["next_attempt"]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as tensors, strings, numbers, lists and dictionaries."""
        return self.progress() | {
            "base": self.trajectory.base,
            "trajectory": self.trajectory.state_dict(),
            "anchor": self.anchor,
            "answered": self.answered,
            "events": self.events,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`."""
        self.trajectory = RankOneTrajectory(state["base"])
        self.trajectory.load_state_dict(state["trajectory"])
        self.load_progress(state)
        self.anchor = state["anchor"]
        self.answered = state["answered"]
        self.events = state["events"]
