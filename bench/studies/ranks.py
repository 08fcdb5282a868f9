"""The update of a finished run: how much of its gain low ranks keep, how straight it moved, and where it led."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import numpy
import torch
from rich.console import Console
from torch import Tensor

from python_trainer import Trainer, load_config
from python_trainer.accelerators.alpha import TRY_ANYWAY
from python_trainer.run_directory import read_evaluations
from rlkernels import RankOneTrajectory
from rlkernels.extrapolation import Attempt, Points
from rlkernels.rank1.projections import Projections
from rlkernels.weights import History

RANKS = (1, 4, 16)
KNOWN = 0.4  # of the steps, from which the end is predicted
POINTS = 20
HISTORY = "save.weight_history=1000000000000"  # of the runs that are looked at


def base_weights(run: Path) -> dict[str, Tensor]:
    """The projections of attention and MLP that a run began with, float32."""
    base = History(run / "weights").base
    return {name: weight.float() for name, weight in Projections(base, base.shapes).items()}


def linearity(points: Points) -> float:
    """R^2 of straight lines in the step through all entries of x_t together; NaN with fewer than three points."""
    if len(points.steps) < 3:
        return math.nan
    x, steps = points.x.double(), points.steps.double()
    line = torch.stack([torch.ones_like(steps), steps], 1)
    rest = x - line @ torch.linalg.lstsq(line, x, driver="gelsd").solution
    total = (x - x.mean(0)).square().sum()
    return float(1 - rest.square().sum() / total) if total > 0 else math.nan


def weights_at(history: History, step: int) -> dict[str, Tensor]:
    """The weights of the policy after a step, float32."""
    return {name: weight.float() for name, weight in history.weights(step).items()}


def steps_of(history: History) -> list[int]:
    """About POINTS steps of a run, at even distances."""
    return list(range(every := max(history.steps // POINTS, 1), history.steps + 1, every))


def tracked(run: Path, history: History, steps: Sequence[int]) -> tuple[RankOneTrajectory, dict[str, Points]]:
    """The updates after these steps, and where they stand along the leading direction of the last."""
    trajectory = RankOneTrajectory(base_weights(run))
    for step in steps:
        trajectory.track(weights_at(history, step), step=step, accuracy=0.0)
    return trajectory, trajectory.exact_points(weights_at(history, step) for step in steps)


def straightness(run: Path) -> dict[str, float]:
    """R^2 of lines in the step through the update along its last leading direction."""
    history = History(run / "weights")
    _, points = tracked(run, history, steps_of(history))
    found = [linearity(of_module) for of_module in points.values()]
    return {"R^2 of a line": median(found), "lowest R^2": min(found)}


def cut(update: Tensor, rank: int) -> Tensor:
    """The leading ranks of an update [m, n]; rank 1 has the norm of all of it, as in AlphaRL."""
    wide = (update if update.shape[0] <= update.shape[1] else update.T).double()
    u = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -rank:]
    kept = u @ (u.T @ wide)
    if rank == 1 and kept.any():
        kept *= wide.norm() / kept.norm()
    return (kept if update.shape[0] <= update.shape[1] else kept.T).to(update)


def accuracy_with(run: Path, change: Callable[[str, Tensor], Tensor]) -> float:
    """Accuracy on all test prompts of the trained policy with other weights: ``change`` gets those of each name."""
    with TemporaryDirectory() as folder:
        settings = load_config(run / "config.yaml", [f"model.path={run / 'model'}", "accelerators.enabled=[]"])
        trainer = Trainer(settings, folder, console=Console(quiet=True))
        with torch.no_grad():
            for name, weight in trainer.policy.model.named_parameters():
                weight.copy_(change(name, weight))
        trainer.engine.policy_updated()
        return trainer.evaluate("test")


def gain_of(run: Path) -> tuple[float, float]:
    """Accuracy at the start, and what it rose by until the end; NaN if that may be chance (two standard errors)."""
    found = read_evaluations(run)
    rise = numpy.subtract(found["final"], found["start"])  # of each test prompt
    clear = rise.mean() > 2 * rise.std(ddof=1) / math.sqrt(len(rise))
    return fmean(found["start"]), float(rise.mean()) if clear else math.nan


def share_of_gain(run: Path, change: Callable[[str, Tensor], Tensor]) -> float:
    """Share of a run's gain with other weights, as of accuracy_with; NaN without a gain, as of gain_of."""
    start, gain = gain_of(run)
    return math.nan if math.isnan(gain) else (accuracy_with(run, change) - start) / gain


def gain_at_ranks(run: Path) -> dict[str, float]:
    """Share of a run's gain that is left when projections keep a rank of their update."""
    base, shares = base_weights(run), {}
    for rank in RANKS:

        def keep_rank(name: str, weight: Tensor, rank: int = rank) -> Tensor:
            if name not in base:
                return weight
            first = base[name].to(weight)
            return first + cut(weight - first, rank)

        shares[f"gain at rank {rank}"] = share_of_gain(run, keep_rank)
    return shares


def gain_when_predicted(run: Path) -> dict[str, float]:
    """Shares of a run's gain after 40 % of its steps: with the weights then, and with those of the end as predicted.

    ``secant`` predicts from the steps until then.
    """
    history = History(run / "weights")
    steps = [step for step in steps_of(history) if step <= KNOWN * history.steps]
    trajectory, points = tracked(run, history, steps)
    now = weights_at(history, steps[-1])
    attempt = Attempt(predictor="secant", horizon=history.steps / steps[-1], limits=TRY_ANYWAY)
    predicted = now | attempt.predict(trajectory, now, points=points)
    return {
        "gain at 40 %": share_of_gain(run, lambda name, weight: now.get(name, weight)),
        "gain as predicted": share_of_gain(run, lambda name, weight: predicted.get(name, weight)),
    }
