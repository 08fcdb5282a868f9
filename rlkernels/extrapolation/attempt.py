"""One attempt to extrapolate weights, in three steps: objections, a prediction, and the gate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from rlkernels import _check
from rlkernels.extrapolation.gate import Answers, Gate
from rlkernels.extrapolation.predictors import Limits, Refusal, Target, extrapolate, find_predictor, refusal
from rlkernels.extrapolation.trajectory import Points, RankOneTrajectory


@torch.no_grad()
def write_weights(places: Mapping[str, Sequence[torch.Tensor]], weights: Mapping[str, torch.Tensor]) -> None:
    """Write weights by name into all tensors that hold them."""
    for name, weight in weights.items():
        for tensor in places[name]:
            tensor.copy_(weight)


@dataclass(frozen=True)
class Attempt:
    """Settings of an extrapolation: its limits, its distance, and the test of its candidates.

    Raises:
        TypeError, ValueError: a setting of another type or out of range.
    """

    predictor: str = "secant"  # one of ``PREDICTORS``
    horizon: float = 2.0  # the target is this many times the tracked steps; above 1
    keep_rest: bool = True  # as for ``extrapolate``
    limits: Limits = field(default_factory=Limits)
    prompts: int | None = 512  # most gate prompts for one candidate; None: all that are available
    max_tries: int = 3  # candidates
    shrink: float = 0.5  # candidate k goes shrink^k of the way

    def __post_init__(self) -> None:
        find_predictor(self.predictor)
        _check.number("horizon", self.horizon)
        if not self.horizon > 1:
            raise ValueError(f"horizon must be above 1, got {self.horizon!r}")
        if self.prompts is not None:
            _check.integer("prompts", self.prompts, 1)
        _check.integer("max_tries", self.max_tries, 1)
        _check.share("shrink", self.shrink)

    def refusal(self, trajectory: RankOneTrajectory) -> Refusal | None:
        """Return the reason not to try now; None if there is none."""
        return refusal(trajectory, self.predictor, self.limits)

    def predict(self, trajectory: RankOneTrajectory, weights: Mapping[str, torch.Tensor], *,
                points: Mapping[str, Points] | None = None) -> dict[str, torch.Tensor]:  # fmt: skip
        """Return predicted weights by name; arguments and errors as for :func:`rlkernels.extrapolate`."""
        target = Target(self.horizon * trajectory.steps[-1])
        return extrapolate(trajectory, weights, target, predictor=self.predictor, keep_rest=self.keep_rest,
                           limits=self.limits, points=points)  # fmt: skip

    @torch.no_grad()
    def judge(self, gate: Gate, predicted: Mapping[str, torch.Tensor], places: Mapping[str, Sequence[torch.Tensor]],
              evaluate: Callable[[range], Sequence[float]], *, available: int,
              changed: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:  # fmt: skip
        """Write candidates until the gate accepts one; if it accepts none, restore the weights bit for bit.

        Args:
            gate: counts all candidates of a run.
            predicted: name -> weights [m, n], float32.
            places: name -> the tensors that hold this weight, the most precise one first (a float32 master copy, then
                the parameter that is rounded from it); at least the names of ``predicted``.
            evaluate: numbers of gate prompts -> a score for each, by the weights in the model.
            available: number of gate prompts.
            changed: called after every change of the weights, and once at the end.

        Returns:
            For each candidate its ``factor`` and the fields of :class:`Comparison`; the model has the last one if it
            was ``accepted``.

        Raises:
            ValueError: ``evaluate`` returned another number of scores; the weights are restored.
        """
        saved = {name: [tensor.detach().clone() for tensor in places[name]] for name in predicted}
        present = {name: copies[0] for name, copies in saved.items()}
        loaded: Mapping[str, torch.Tensor] = present  # the weights that the model has

        def answers_with(weights: Mapping[str, torch.Tensor]) -> Answers:
            def answer(rows: range) -> Sequence[float]:
                nonlocal loaded
                if loaded is not weights:
                    write_weights(places, weights)
                    changed()
                    loaded = weights
                return evaluate(rows)

            return Answers(answer, available, gate.position)

        present_answers = answers_with(present)
        prompts = min(self.prompts or available, available)
        tries: list[dict[str, Any]] = []
        accepted = False
        try:
            while len(tries) < self.max_tries and not accepted:
                factor = self.shrink ** len(tries)
                candidate = {n: torch.lerp(present[n].float(), weight, factor) for n, weight in predicted.items()}
                # evaluates the present weights first, while the model has them
                comparison = gate.compare_in_parts(answers_with(candidate), present_answers, prompts)
                tries.append({"factor": factor, **asdict(comparison)})
                accepted = comparison.accepted
            gate.position = (gate.position + len(present_answers.scores)) % available
        finally:
            if not accepted:
                for name, copies in saved.items():
                    for tensor, copy in zip(places[name], copies):
                        tensor.copy_(copy)
            changed()
        return tries
