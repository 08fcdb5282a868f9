"""The update of a finished run: how straight it moved, and what the policy is worth with other weights in its place."""

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
from python_trainer.accelerators.alpha import SMOOTHING_STEPS, TRY_ANYWAY
from python_trainer.callbacks import Callback
from python_trainer.run_directory import read_evaluations, write_text
from rlkernels import RankOneTrajectory
from rlkernels.extrapolation import PREDICTORS, Attempt, Points
from rlkernels.rank1.projections import Projections
from rlkernels.weights import History

RANKS = (0, 1, 4, 16)
KNOWN = 0.4  # of the steps, from which the end is predicted
POINTS = 20
# Settings of the runs that are looked at. A float32 delta is half as long as the weights: there every fifth step is
# kept, whole.
HISTORY = "save.weight_history=1000000000000"
SNAPSHOTS = "callbacks=[bench.studies.ranks:SnapshotWriter]"
EVERY = 5
START, END = "start", "end"

Change = Callable[[str, Tensor], Tensor]  # name and trained weight -> the weight that takes its place


class SnapshotWriter(Callback):
    """Writes the weights before the first step and after every fifth to RUN/snapshots."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:
            self.write(trainer, step)

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step % EVERY == 0:
            self.write(trainer, step)

    @staticmethod
    def write(trainer: Any, step: int) -> None:
        path = Path(trainer.folder, "snapshots", f"{step}.safetensors")
        path.parent.mkdir(exist_ok=True)
        weights = {name: weight.detach() for name, weight in trainer.policy.model.named_parameters()}
        save_file(weights, draft := path.with_suffix(".tmp"))
        draft.replace(path)


class Snapshots:
    """The weights of a run that :class:`SnapshotWriter` wrote, or that its history of weights holds.

    Attributes:
        steps: after which there are weights, without 0; of a history about POINTS of them, at even distances.
    """

    def __init__(self, run: Path) -> None:
        self.files = {int(file.stem): file for file in (run / "snapshots").glob("*.safetensors")}
        self.history = None if self.files else History(run / "weights")
        if self.history is None:
            self.steps = sorted(self.files)[1:]
        else:
            last = self.history.steps
            self.steps = list(range(every := max(last // POINTS, 1), last + 1, every))

    def weights(self, step: int) -> dict[str, Tensor]:
        """The weights of the policy after a step, float32."""
        found = load_file(self.files[step]) if self.history is None else self.history.weights(step)
        return {name: weight.to(torch.float32, copy=True) for name, weight in found.items()}  # a history reuses its own

    def base(self) -> dict[str, Tensor]:
        """The projections of attention and MLP before the first step, float32."""
        return dict(Projections.of(self.weights(0)))


def linearity(points: Points) -> float:
    """R^2 of straight lines in the step through all entries of x_t together; NaN with fewer than three points."""
    if len(points.steps) < 3:
        return math.nan
    x, steps = points.x.double(), points.steps.double()
    line = torch.stack([torch.ones_like(steps), steps], 1)
    rest = x - line @ torch.linalg.lstsq(line, x, driver="gelsd").solution
    total = (x - x.mean(0)).square().sum()
    return float(1 - rest.square().sum() / total) if total > 0 else math.nan


def training_accuracy(run: Path) -> list[float]:
    """The accuracy of each step's own answers, averaged over the last steps as ``alpha`` does."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [row["accuracy"] for row in rows if "accuracy" in row]
    return [fmean(found[max(step - SMOOTHING_STEPS, 0) : step]) for step in range(1, len(found) + 1)]


def tracked(run: Path, steps: Sequence[int]) -> tuple[RankOneTrajectory, dict[str, Points]]:
    """The updates after these steps, and where they stand along the leading direction of the last."""
    snapshots, accuracy = Snapshots(run), training_accuracy(run)
    trajectory = RankOneTrajectory(snapshots.base())
    for step in steps:
        trajectory.track(snapshots.weights(step), step=step, accuracy=accuracy[step - 1])
    return trajectory, trajectory.exact_points(map(snapshots.weights, steps))


def shape_of_path(run: Path) -> dict[str, float]:
    """R^2 of lines in the step through the update along its last leading direction, and that direction's share."""
    trajectory, points = tracked(run, Snapshots(run).steps)
    lines = [linearity(of_module) for of_module in points.values()]
    facts = [trajectory.facts(name) for name in trajectory.base]
    shares = [fact["sigma"] / fact["frobenius"] for fact in facts if fact["frobenius"]]
    return {"R^2 of a line": median(lines), "lowest R^2": min(lines), "norm in rank 1": fmean(shares)}


def leading(update: Tensor, rank: int) -> Tensor:
    """Leading singular vectors on the shorter side of an update [m, n]: float64 [min(m, n), rank], the first first."""
    wide = (update if update.shape[0] <= update.shape[1] else update.T).double()
    return torch.linalg.eigh(wide @ wide.T).eigenvectors.flip(1)[:, :rank]


def cut(update: Tensor, vectors: Tensor, *, norm_kept: bool) -> Tensor:
    """The part of an update [m, n] along vectors of its shorter side; ``norm_kept``: with the norm of all of it."""
    is_wide = update.shape[0] <= update.shape[1]
    wide = (update if is_wide else update.T).double()
    part = vectors @ (vectors.T @ wide)
    if norm_kept and part.any():
        part *= wide.norm() / part.norm()
    return (part if is_wide else part.T).to(update)


def instead(weights: Mapping[str, Tensor]) -> Change:
    """Put these weights in their places."""
    return lambda name, weight: weights.get(name, weight)


def ends(run: Path) -> Iterator[tuple[str, Change]]:
    """The weights before the first step and after the last."""
    yield START, instead(Snapshots(run).weights(0))
    yield END, instead({})


def at_ranks(run: Path) -> Iterator[tuple[str, Change]]:
    """Projections that keep a rank of their update, and other weights as trained. AlphaRL keeps the norm."""
    snapshots = Snapshots(run)
    base, last = snapshots.base(), snapshots.weights(snapshots.steps[-1])
    updates = {name: last[name] - first for name, first in base.items()}
    vectors = {name: leading(update, max(RANKS)) for name, update in updates.items()}
    for rank, norm_kept in product(RANKS, (False, True)):
        if norm_kept and not rank:
            continue

        def change(name: str, weight: Tensor, rank: int = rank, norm_kept: bool = norm_kept) -> Tensor:
            if name not in base:
                return weight
            return base[name] + cut(updates[name], vectors[name][:, :rank], norm_kept=norm_kept)

        yield f"rank {rank}{', norm kept' if norm_kept else ''}", change


def predictions(run: Path) -> Iterator[tuple[str, Change]]:
    """The weights after 40 % of the steps, then those of the end as predicted from there.

    A predictor that needs more points than there are is left out.
    """
    snapshots = Snapshots(run)
    *_, last = snapshots.steps
    steps = [step for step in snapshots.steps if step <= KNOWN * last]
    trajectory, points = tracked(run, steps)
    now = snapshots.weights(steps[-1])
    yield f"step {steps[-1]}", instead(now)
    for predictor, keep_rest in [*((name, True) for name in PREDICTORS), ("secant", False), ("pls", False)]:
        if len(steps) < PREDICTORS[predictor].min_points:
            continue
        attempt = Attempt(predictor=predictor, horizon=last / steps[-1], keep_rest=keep_rest, limits=TRY_ANYWAY)
        predicted = now | attempt.predict(trajectory, now, points=points)
        yield (
            f"step {steps[-1]}, then {predictor}{'' if keep_rest else ', rank 1 alone, norm kept'}",
            instead(predicted),
        )


@contextmanager
def trainer_with(run: Path, change: Change) -> Iterator[Trainer]:
    """A trainer of the trained policy with other weights, for evaluations."""
    with TemporaryDirectory() as folder:
        more = [f"model.path={run / 'model'}", "accelerators.enabled=[]", "callbacks=[]"]
        trainer = Trainer(load_config(run / "config.yaml", more), folder, console=Console(quiet=True))
        with torch.no_grad():
            for name, weight in trainer.policy.model.named_parameters():
                weight.copy_(change(name, weight))
        trainer.engine.policy_updated()
        yield trainer


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    return fmean(values), stdev(values) / math.sqrt(len(values))


def other_weights(run: Path) -> dict[str, tuple[float, float]]:
    """The accuracy of a run with other weights, and its standard error over test prompts, by name of the weights.

    A call that was killed leaves what it has in other_weights.json, and the next one goes on.
    """
    path, trained = run / "other_weights.json", read_evaluations(run)
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= {START: mean_and_error(trained["start"]), END: mean_and_error(trained["final"])}
    for name, change in chain(at_ranks(run), predictions(run)):
        if name not in known:
            with trainer_with(run, change) as trainer:
                known[name] = mean_and_error(trainer.evaluator.evaluate_each("test", range(len(trained["final"]))))
            write_text(path, json.dumps(known))
    return known


def gain(weights: Mapping[str, Sequence[float]]) -> float:
    """What a run gains by :func:`other_weights`; NaN if that may be chance (two standard errors)."""
    (start, start_error), (end, end_error) = weights[START], weights[END]
    return end - start if end - start > 2 * math.hypot(start_error, end_error) else math.nan


def share_of_gain(weights: Mapping[str, Sequence[float]], name: str) -> float:
    """The share of a run's gain that is there with other weights."""
    return (weights[name][0] - weights[START][0]) / gain(weights)
