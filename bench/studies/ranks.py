"""The update of a finished run: how straight its path is, and the policy's accuracy with other weights."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from python_trainer import Trainer, load_config
from python_trainer.run.callbacks import Callback
from python_trainer.run.directory import read_evaluations, write_text
from rlkernels import RankOneTrajectory
from rlkernels.extrapolation import PREDICTORS, TRY_ANYWAY, Attempt, Points
from rlkernels.extrapolation.extrapolator import SMOOTHING_STEPS
from rlkernels.rank1.projections import Projections
from rlkernels.weights import History

RANKS = (0, 1, 4, 16)
KNOWN_SHARE = 0.4  # share of the steps from which the end is predicted
MAX_POINTS = 20
# Settings of the measured runs. A float32 delta is half as long as the weights, so such runs store the full weights of
# every fifth step.
HISTORY = "save.weight_history=1000000000000"
SNAPSHOTS = "callbacks=[bench.studies.ranks:SnapshotWriter]"
SNAPSHOT_STEPS = 5
START, END = "start", "end"

Change = Callable[[str, Tensor], Tensor]  # name and trained weight -> the weight that takes its place


class SnapshotWriter(Callback):
    """Write the weights before the first step and after every fifth step to RUN/snapshots."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:
            self.write(trainer, step)

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step % SNAPSHOT_STEPS == 0:
            self.write(trainer, step)

    @staticmethod
    def write(trainer: Any, step: int) -> None:
        path = Path(trainer.folder, "snapshots", f"{step}.safetensors")
        path.parent.mkdir(exist_ok=True)
        weights = {name: weight.detach() for name, weight in trainer.policy.model.named_parameters()}
        save_file(weights, draft := path.with_suffix(".tmp"))
        draft.replace(path)


class Snapshots:
    """The weights of a run, from :class:`SnapshotWriter` or from its history of weights.

    Attributes:
        steps: steps with weights, without 0; of a history about MAX_POINTS of them, evenly spaced.
    """

    def __init__(self, run: Path) -> None:
        self.files = {int(file.stem): file for file in (run / "snapshots").glob("*.safetensors")}
        self.history = None if self.files else History(run / "weights")
        if self.history is None:
            self.steps = sorted(self.files)[1:]
        else:
            last = self.history.steps
            self.steps = list(range(stride := max(last // MAX_POINTS, 1), last + 1, stride))

    def weights(self, step: int) -> dict[str, Tensor]:
        """Return the weights of the policy after a step, float32."""
        weights = load_file(self.files[step]) if self.history is None else self.history.weights(step)
        # a copy, because a history reuses its tensors
        return {name: weight.to(torch.float32, copy=True) for name, weight in weights.items()}

    def base(self) -> dict[str, Tensor]:
        """Return the projections of attention and MLP before the first step, float32."""
        return dict(Projections.of(self.weights(0)))


def linearity(points: Points) -> float:
    """Return R^2 of straight lines over steps through all entries of x_t together; NaN with fewer than three points."""
    if len(points.steps) < 3:
        return math.nan
    x, steps = points.x.double(), points.steps.double()
    line = torch.stack([torch.ones_like(steps), steps], 1)
    residual = x - line @ torch.linalg.lstsq(line, x, driver="gelsd").solution
    total = (x - x.mean(0)).square().sum()
    return float(1 - residual.square().sum() / total) if total > 0 else math.nan


def training_accuracy(run: Path) -> list[float]:
    """Return the accuracy of the answers of each step, averaged over the last steps as ``alpha`` does."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    accuracies = [row["accuracy"] for row in rows if "accuracy" in row]
    return [fmean(accuracies[max(step - SMOOTHING_STEPS, 0) : step]) for step in range(1, len(accuracies) + 1)]


def tracked(run: Path, steps: Sequence[int]) -> tuple[RankOneTrajectory, dict[str, Points]]:
    """Return the updates after these steps, and their points along the leading direction of the last."""
    snapshots = Snapshots(run)
    accuracy = training_accuracy(run)
    trajectory = RankOneTrajectory(snapshots.base())
    for step in steps:
        trajectory.track(snapshots.weights(step), step=step, accuracy=accuracy[step - 1])
    return trajectory, trajectory.exact_points(map(snapshots.weights, steps))


def shape_of_path(run: Path) -> dict[str, float]:
    """Return R^2 of lines over steps through the update along its leading direction, and that direction's share."""
    trajectory, points = tracked(run, Snapshots(run).steps)
    lines = [linearity(of_module) for of_module in points.values()]
    facts = [trajectory.facts(name) for name in trajectory.base]
    shares = [fact["sigma"] / fact["frobenius"] for fact in facts if fact["frobenius"]]
    return {"R^2 of a line": median(lines), "lowest R^2": min(lines), "norm in rank 1": fmean(shares)}


def leading_vectors(update: Tensor, rank: int) -> Tensor:
    """Return leading singular vectors of the shorter side of an update [m, n], float64 [min(m, n), rank]."""
    wide = (update if update.shape[0] <= update.shape[1] else update.T).double()
    return torch.linalg.eigh(wide @ wide.T).eigenvectors.flip(1)[:, :rank]


def cut(update: Tensor, vectors: Tensor, *, norm_kept: bool) -> Tensor:
    """Return an update [m, n] projected on vectors of its shorter side; ``norm_kept``: scaled to the full norm."""
    is_wide = update.shape[0] <= update.shape[1]
    wide = (update if is_wide else update.T).double()
    projected = vectors @ (vectors.T @ wide)
    if norm_kept and projected.any():
        projected *= wide.norm() / projected.norm()
    return (projected if is_wide else projected.T).to(update)


def replace_by(weights: Mapping[str, Tensor]) -> Change:
    """Return a change that puts these weights in the place of the trained ones."""
    return lambda name, weight: weights.get(name, weight)


def ends(run: Path) -> Iterator[tuple[str, Change]]:
    """Yield the weights before the first step, if the run has kept them, and after the last."""
    if (run / "snapshots").exists():
        yield START, replace_by(Snapshots(run).weights(0))
    yield END, replace_by({})


def at_ranks(run: Path) -> Iterator[tuple[str, Change]]:
    """Yield projections that keep a rank of their update, with other weights as trained. AlphaRL keeps the norm."""
    snapshots = Snapshots(run)
    base = snapshots.base()
    last = snapshots.weights(snapshots.steps[-1])
    updates = {name: last[name] - first for name, first in base.items()}
    vectors = {name: leading_vectors(update, max(RANKS)) for name, update in updates.items()}
    for rank, norm_kept in product(RANKS, (False, True)):
        if norm_kept and not rank:
            continue

        def change(name: str, weight: Tensor, rank: int = rank, norm_kept: bool = norm_kept) -> Tensor:
            if name not in base:
                return weight
            return base[name] + cut(updates[name], vectors[name][:, :rank], norm_kept=norm_kept)

        yield f"rank {rank}{', norm kept' if norm_kept else ''}", change


def predictions(run: Path) -> Iterator[tuple[str, Change]]:
    """Yield the weights after 40 % of the steps, then predictions of the final weights from there.

    A predictor that needs more points than there are is skipped.
    """
    snapshots = Snapshots(run)
    *_, last = snapshots.steps
    steps = [step for step in snapshots.steps if step <= KNOWN_SHARE * last]
    trajectory, points = tracked(run, steps)
    weights = snapshots.weights(steps[-1])
    yield f"step {steps[-1]}", replace_by(weights)
    for predictor, keep_rest in [*((name, True) for name in PREDICTORS), ("secant", False), ("pls", False)]:
        if len(steps) < PREDICTORS[predictor].min_points:
            continue
        attempt = Attempt(predictor=predictor, horizon=last / steps[-1], keep_rest=keep_rest, limits=TRY_ANYWAY)
        predicted = weights | attempt.predict(trajectory, weights, points=points)
        yield (
            f"step {steps[-1]}, then {predictor}{'' if keep_rest else ', rank 1 alone, norm kept'}",
            replace_by(predicted),
        )


@contextmanager
def trainer_with(run: Path, change: Change) -> Iterator[Trainer]:
    """Make a trainer of the trained policy with other weights, for evaluations."""
    with TemporaryDirectory() as folder:
        overrides = [f"model.path={run / 'model'}", "accelerators.enabled=[]", "callbacks=[]"]
        trainer = Trainer(load_config(run / "config.yaml", overrides), folder, console=Console(quiet=True))
        with torch.no_grad():
            for name, weight in trainer.policy.model.named_parameters():
                weight.copy_(change(name, weight))
        trainer.engine.policy_updated()
        yield trainer


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return fmean(values), stdev(values) / math.sqrt(len(values))


def other_weights(run: Path) -> dict[str, tuple[float, float]]:
    """Return the accuracy of a run with other weights and its standard error over test prompts, by name of the weights.

    A killed call leaves its results in other_weights.json, and the next call resumes from there.
    """
    path = run / "other_weights.json"
    trained = read_evaluations(run)
    accuracies = json.loads(path.read_text()) if path.exists() else {}
    accuracies |= {START: mean_and_error(trained["start"]), END: mean_and_error(trained["final"])}
    for name, change in chain(at_ranks(run), predictions(run)):
        if name not in accuracies:
            with trainer_with(run, change) as trainer:
                accuracies[name] = mean_and_error(trainer.evaluator.evaluate_each("test", range(len(trained["final"]))))
            write_text(path, json.dumps(accuracies))
    return accuracies


def gain(weights: Mapping[str, Sequence[float]]) -> float:
    """Return the gain of a run by :func:`other_weights`; NaN if it is below two standard errors."""
    (start, start_error), (end, end_error) = weights[START], weights[END]
    return end - start if end - start > 2 * math.hypot(start_error, end_error) else math.nan


def share_of_gain(weights: Mapping[str, Sequence[float]], name: str) -> float:
    """Return the share of a run's gain that other weights keep."""
    return (weights[name][0] - weights[START][0]) / gain(weights)
