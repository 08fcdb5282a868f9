"""Predictors of x = (W - W_0) v_T, a back-test of their skill, and reasons not to extrapolate.

A predictor maps the points of one module to x at a later step or a higher accuracy. :func:`skill` tests it on points
that it has not seen, :func:`refusal` returns reasons not to try. Test every prediction on held-out prompts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rlkernels import _check
from rlkernels._precision import without_autocast
from rlkernels.extrapolation.trajectory import Points, RankOneTrajectory, check_weights
from rlkernels.rank1.ops import add_rank1_
from rlkernels.rank1.update import GAP_FLOOR


@dataclass(frozen=True)
class Target:
    """The step and accuracy to extrapolate to; a predictor uses one of them."""

    step: float  # on the scale of the tracked steps
    accuracy: float = 1.0  # on the scale of the tracked accuracies


@dataclass(frozen=True)
class Predictor:
    """A map from the points of one module and a target to x [m] at the target, float32."""

    name: str
    predict: Callable[[Points, Target], torch.Tensor]  # x [m] of any floating type, on the device of the points
    min_points: int = 2
    whole: bool = False  # it predicts the whole update, stretched, not only its part along v

    def __call__(self, points: Points, target: Target) -> torch.Tensor:
        """Predict x.

        Raises:
            ValueError: too few points, or points that cannot be extrapolated, such as an accuracy that never moved.
        """
        if len(points.steps) < self.min_points:
            raise ValueError(f"{self.name} needs at least {self.min_points} points, got {len(points.steps)}")
        with without_autocast(points.x.device):
            x = self.predict(points, target)
        if not x.isfinite().all():
            raise ValueError(f"{self.name} found no finite prediction for step {target.step:g}")
        return x.float()


def invert_accuracy(points: Points, target: Target) -> torch.Tensor:
    """One-component partial least squares of x against accuracy, inverted at the target accuracy (AlphaRL, section 4).

    The paper inverts at an accuracy of 1. Divides by the slope of accuracy, which makes it explode when that is flat.
    """
    x = points.x.double()
    accuracy = points.accuracy.to(points.x.device)
    x_mean = x.mean(0)
    x_std = x.std(0)
    accuracy_mean = accuracy.mean()
    scaled = torch.where(x_std > 0, (x - x_mean) / x_std, 0.0)  # [T, m]
    centred = accuracy - accuracy_mean
    covariance = scaled.T @ centred
    score = scaled @ (covariance / covariance.norm())  # [T], the component
    square = score @ score
    loading = scaled.T @ score / square
    slope = (score @ centred) / square
    return x_mean + x_std * loading * (target.accuracy - accuracy_mean) / slope


def follow_secant(points: Points, target: Target) -> torch.Tensor:
    """Follow the line through the latest point and the one nearest to half its step to the target step."""
    last = points.steps[-1]
    near = int((points.steps[:-1] - last / 2).abs().argmin())
    rate = (target.step - last) / (last - points.steps[near])
    return points.x[-1] + float(rate) * (points.x[-1] - points.x[near])


def stretch_update(points: Points, target: Target) -> torch.Tensor:
    """Extrapolate the whole update, of every rank, on a line: W_0 + b (W_t - W_0), b = target step / latest step."""
    return float(target.step / points.steps[-1]) * points.x[-1]


PREDICTORS = {p.name: p for p in (
    Predictor("pls", invert_accuracy, min_points=3), Predictor("secant", follow_secant),
    Predictor("full", stretch_update, min_points=1, whole=True),
)}  # fmt: skip


def find_predictor(name: str) -> Predictor:
    """Return one of ``PREDICTORS``; another name raises ValueError."""
    _check.one_of("predictor", name, PREDICTORS)
    return PREDICTORS[name]


def skill(trajectory: RankOneTrajectory, predictor: str, *, holdout: int = 1) -> float:
    """Back-test a predictor: predict the last point, and compare with the prediction that the weights stay.

    It leaves out the last ``holdout`` points. Direction and points are those of the step before them; the target is
    the step and accuracy of the last point.

    Args:
        trajectory: of the tracked steps.
        predictor: one of ``PREDICTORS``.
        holdout: points to leave out, >= 1.

    Returns:
        1 - sum |prediction - x_T|^2 / sum |x_(T - holdout) - x_T|^2 over all modules, at most 1; -inf if the predictor
        has too few points or fails.

    Raises:
        ValueError: an unknown predictor; a holdout that is not positive.
    """
    predict = find_predictor(predictor)
    holdout = _check.integer("holdout", holdout, 1)
    if len(trajectory) <= holdout:
        return -math.inf
    error = distance = 0.0
    for name in trajectory.base:
        points = trajectory.points(name, at=-1 - holdout)
        if not points.x.any():  # it never moved along that direction, so there is nothing to predict
            continue
        actual = points.x[-1]
        earlier = points.until(len(points.steps) - holdout)
        try:
            predicted = predict(earlier, Target(float(points.steps[-1]), float(points.accuracy[-1])))
        except ValueError:
            return -math.inf
        error += float((predicted - actual).double().square().sum())
        distance += float((earlier.x[-1] - actual).double().square().sum())
    return 1 - error / distance if distance else -math.inf


@dataclass(frozen=True)
class Limits:
    """Limits beyond which an extrapolation is refused."""

    min_gap: float = GAP_FLOOR  # 1 - sigma2 / sigma1: below it the leading direction is not defined
    noise_factor: float = 3.0  # sigma1 must exceed this many times the rounding noise of the weights
    min_rise: float = 0.02  # of the accuracy, from the first third of the tracked steps to the last
    min_cosine: float = 0.7  # between the directions at half the latest step and at the latest
    min_skill: float = 0.0  # the back-test must exceed it
    min_share: float = 0.5  # of the squared norm of all updates that must lie in modules without objection
    holdout: int | None = None  # points left out in the back-test; None: a third of them


def module_refusal(trajectory: RankOneTrajectory, name: str, limits: Limits) -> str | None:
    """Return why one module cannot be extrapolated; None if it can."""
    facts = trajectory.facts(name)
    status = trajectory.status(name)
    if status == "zero":
        return "no update"
    if status == "ill_defined" or facts["gap"] < limits.min_gap:
        return "low gap"
    if facts["sigma"] < limits.noise_factor * facts["noise"]:
        return "storage noise"
    points = trajectory.points(name)
    near = int((points.steps - points.steps[-1] / 2).abs().argmin())
    if points.cosine[near] < limits.min_cosine:
        return "direction still turning"
    return None


@dataclass(frozen=True)
class Refusal:
    """The reason not to extrapolate."""

    reason: str  # few points | flat accuracy | low gap | storage noise | direction still turning | no update | no skill
    detail: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})"


def refusal(trajectory: RankOneTrajectory, predictor: str, limits: Limits | None = None) -> Refusal | None:
    """Return the first reason not to try this predictor on this trajectory now; None without one.

    Args:
        trajectory: of the tracked steps.
        predictor: one of ``PREDICTORS``.
        limits: None for the defaults.

    Returns:
        The reason, and the figures behind it.

    Raises:
        ValueError: an unknown predictor.
    """
    limits = limits or Limits()
    third = len(trajectory) // 3
    holdout = max(third, 1) if limits.holdout is None else limits.holdout
    needed = max(find_predictor(predictor).min_points + holdout, 3)
    if len(trajectory) < needed:
        return Refusal("few points", f"{predictor} needs {needed} tracked steps, there are {len(trajectory)}")
    rise = sum(trajectory.accuracy[-third:]) / third - sum(trajectory.accuracy[:third]) / third
    if not rise >= limits.min_rise:
        return Refusal("flat accuracy", f"rose by {rise:.3f}, less than {limits.min_rise:g}")
    squares: dict[str | None, float] = {}
    for name in trajectory.base:
        reason = module_refusal(trajectory, name, limits)
        squares[reason] = squares.get(reason, 0.0) + trajectory.facts(name)["frobenius"] ** 2
    total = sum(squares.values())
    accepted = squares.pop(None, 0.0)
    if total == 0 or (squares and accepted < limits.min_share * total):
        commonest = max(squares, key=lambda reason: squares[reason]) or "no update"
        refused_share = 1 - accepted / total if total else 1
        return Refusal(commonest, f"modules with {refused_share:.0%} of the squared update are refused")
    tested = skill(trajectory, predictor, holdout=holdout)
    if not tested > limits.min_skill:
        return Refusal("no skill", f"back-test {tested:.2f}, needs more than {limits.min_skill:g}")
    return None


def extrapolate(trajectory: RankOneTrajectory, weights: Mapping[str, torch.Tensor], target: Target, *,
                predictor: str = "secant", keep_rest: bool = True,
                limits: Limits | None = None, points: Mapping[str, Points] | None = None,
                ) -> dict[str, torch.Tensor]:  # fmt: skip
    """Predict the weights of the modules to which :func:`module_refusal` does not object.

    Args:
        trajectory: of the tracked steps.
        weights: name -> W_T [m, n], the weights of the latest tracked step; not changed.
        target: step and accuracy to extrapolate to.
        predictor: one of ``PREDICTORS``.
        keep_rest: True keeps the update's other directions, W_T + (x - x_T) v_T^T. False drops them, as in AlphaRL,
            W_0 + a x v_T^T, where a = |W_T - W_0| / |x_T| gives the rank-1 update the Frobenius norm of the whole one.
            Predictors of the whole update keep and stretch everything.
        limits: conditions that a module must fulfil; None for the defaults.
        points: exact points, from ``trajectory.exact_points``; None for those of the factors.

    Returns:
        name -> float32 [m, n], untested: evaluate them on held-out prompts.

    Raises:
        TypeError, ValueError: an unknown predictor; weights, or points, that do not fit the trajectory, or
            one without a tracked step; a prediction that is not finite.
    """
    predict = find_predictor(predictor)
    check_weights("weights", weights, trajectory.base)
    if not len(trajectory):
        raise ValueError("trajectory must hold a tracked step, got none")
    if points and (missing := sorted(set(trajectory.base) - set(points))):
        raise ValueError(f"points must hold every tracked module, but {missing[0]!r} is missing")
    out = {}
    for name, base in trajectory.base.items():
        if module_refusal(trajectory, name, limits or Limits()) is not None:
            continue
        module_points = points[name] if points else trajectory.points(name)
        weight = weights[name].detach().float()
        last = module_points.x[-1]
        x = predict(module_points, target)
        if predict.whole:
            stretch = float(x.dot(last)) / float(last.dot(last))
            out[name] = base.float() + stretch * (weight - base.float())
        elif keep_rest:
            out[name] = add_rank1_(weight.clone(), x - last, module_points.v, 1.0)
        else:
            factor = float(module_points.frobenius[-1]) / float(last.norm())
            out[name] = add_rank1_(base.float().clone(), factor * x, module_points.v, 1.0)
    return out
