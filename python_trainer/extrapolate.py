"""Gated extrapolation of checkpoints on disk: ``python -m python_trainer extrapolate``."""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from python_trainer.accelerators.alpha.settings import AlphaSettings
from python_trainer.checkpoint import list_checkpoints, step_of
from python_trainer.config import Config, load_config
from python_trainer.distributed.shard_files import load_whole
from python_trainer.errors import UserError
from python_trainer.files import check_output_dir, publish, unusable_output_dir
from python_trainer.model.policy import Policy, load_policy
from python_trainer.model.shipped import policy_folder
from python_trainer.run import Trainer
from python_trainer.run_directory import read_metrics
from rlkernels import RankOneTrajectory
from rlkernels.extrapolation import Gate, skill
from rlkernels.rank1.stream import Folder, default_filter

Weights = Mapping[str, torch.Tensor]


class Stored(Mapping[str, torch.Tensor]):
    """The tensors of a Hugging Face folder, read when they are asked for."""

    def __init__(self, path: Path):
        try:
            self.folder = Folder(path)
        except ValueError as error:
            raise UserError(str(error)) from error

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.folder.load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.folder.files)

    def __len__(self) -> int:
        return len(self.folder.files)


@dataclass
class Saved:
    """Checkpoints of one training, oldest first."""

    base: Path
    folders: list[Path]
    steps: list[int]
    accuracy: list[float] | None  # of each, where it is known
    from_run: bool  # checkpoints of this trainer, otherwise Hugging Face folders

    def weights(self, index: int) -> Weights:
        """All weights of one checkpoint, as precise as they are stored."""
        folder = self.folders[index]
        if not self.from_run:
            return Stored(folder)
        state = load_whole(folder)
        masters = {name: values["master"] for name, values in state["optimizer"].items() if "master" in values}
        return state["model"] | masters


def find(folders: Sequence[Path], base: Path | None, accuracy: Sequence[float] | None) -> Saved:
    """The checkpoints of a run directory, or folders in Hugging Face format in the order given.

    Raises:
        UserError: no base, a number of accuracies that does not fit.
    """
    if len(folders) == 1 and (folders[0] / "config.yaml").is_file():
        config = load_config(folders[0] / "config.yaml")
        found = list_checkpoints(folders[0] / "checkpoints")
        steps = [step_of(path) for path in found]
        rows = {row["step"]: row["accuracy"] for row in read_metrics(folders[0]) if "accuracy" in row}
        # a mean of five steps, the last ones up to there that had answers from their start
        smooth = [[rows[s] for s in sorted(rows) if s <= step][-5:] for step in steps]
        known = [sum(window) / len(window) for window in smooth] if all(smooth) else None
        saved = Saved(base or policy_folder(config.model.path, config.model.revision), found, steps, known, True)
    else:
        if base is None:
            raise UserError("--base is needed: the folder of the model that training began with")
        digits = [re.search(r"(\d+)$", folder.name) for folder in folders]
        steps = [int(m[1]) for m in digits if m]
        if len(steps) < len(folders) or sorted(set(steps)) != steps:
            steps = list(range(1, len(folders) + 1))
        saved = Saved(base, list(folders), steps, None, False)
    if accuracy is not None:
        if len(accuracy) != len(saved.folders):
            raise UserError(f"--accuracy needs one number for each of {len(saved.folders)} checkpoints, got {accuracy}")
        saved.accuracy = list(accuracy)
    return saved


def track(saved: Saved) -> RankOneTrajectory:
    """Reads every checkpoint once."""
    base = {name: t for name, t in Stored(saved.base).items() if t.ndim == 2 and default_filter(name)}
    if not base:
        raise UserError(f"{saved.base} has no 2-D projection to extrapolate")
    trajectory = RankOneTrajectory(base)
    for index, step in enumerate(saved.steps):
        weights = saved.weights(index)
        for name, tensor in base.items():
            if name not in weights or weights[name].shape != tensor.shape:
                raise UserError(f"{saved.folders[index]} has no {name} of shape {list(tensor.shape)} as in the base")
        # a rise that objects to nothing where no accuracy is known
        accuracy = saved.accuracy[index] if saved.accuracy else index / len(saved.steps)
        trajectory.track(weights, step=step, accuracy=accuracy)
    return trajectory


def extrapolate_folders(
    folders: Sequence[Path],
    output_dir: Path,
    *,
    base: Path | None = None,
    accuracy: Sequence[float] | None = None,
    config_path: Path | None = None,
    overrides: Sequence[str] = (),
    gated: bool = True,
    console: Console | None = None,
) -> None:
    """Writes extrapolated weights in Hugging Face format to ``output_dir``, if nothing speaks against them.

    Args:
        folders: a run directory of this trainer, or checkpoints in Hugging Face format, oldest first.
        base: what training began with; a run directory knows it.
        accuracy: of each checkpoint; a run directory knows them. Only `pls` cannot do without.
        config_path: task and generation for the gate, and ``accelerators.alpha``; a run directory has its own.
        overrides: ``key=value`` settings on top.
        gated: whether the gate decides. Refusals apply in any case.

    Raises:
        UserError: refused, rejected by the gate, or an input that is no good; nothing is written then.
    """
    console = console or Console()
    check_output_dir(output_dir)
    if output_dir.exists() and any(output_dir.iterdir()):
        raise UserError(f"--output-dir {output_dir} already holds files")
    saved = find(folders, base, accuracy)
    if config_path is None and saved.from_run:
        config_path = folders[0] / "config.yaml"
    if gated and config_path is None:
        raise UserError("the gate needs the task: give --config, or --no-gate to write weights that nothing has tested")
    config = load_config(config_path, overrides)
    settings: AlphaSettings = getattr(config.accelerators, AlphaSettings.name)
    if settings.predictor == "pls" and saved.accuracy is None:
        raise UserError("predictor pls goes by accuracy: give --accuracy, one number for each checkpoint")
    trajectory = track(saved)
    rules = settings.rules(holdout=1)
    objection = rules.refusal(trajectory)
    if objection is not None:
        more = ""
        if saved.from_run and objection.reason == "few points":
            more = "; to keep more checkpoints, train with a larger save.save_total_limit or a smaller save.save_steps"
        raise UserError(f"refused: {objection}{more}")
    last = saved.weights(len(saved.steps) - 1)
    kept = set(trajectory.steps)
    exact = trajectory.exact_points(saved.weights(index) for index, step in enumerate(saved.steps) if step in kept)
    predicted = rules.predict(trajectory, last, points=exact)
    console.print(
        f"{len(saved.steps)} checkpoints, {len(predicted)} of {len(trajectory.base)} modules, predictor "
        f"{settings.predictor}, back-test skill {skill(trajectory, settings.predictor):.2f}"
    )
    if gated:
        policy = pass_gate(config, saved.base, last, predicted, console)
    else:
        policy = load_policy(
            config.model.model_copy(update={"path": str(saved.base), "revision": None, "device": "cpu"})
        )
        put(policy.model, dict(last) | predicted)
    try:
        save(policy, output_dir)
    except OSError as error:
        raise unusable_output_dir(output_dir, error.strerror) from error
    console.print(f"written to {output_dir}", highlight=False)


def run(args: argparse.Namespace) -> None:
    """What the command line asks for."""
    extrapolate_folders(
        args.folders,
        args.output_dir,
        base=args.base,
        accuracy=args.accuracy,
        config_path=args.config,
        overrides=args.overrides,
        gated=not args.no_gate,
    )


def pass_gate(
    config: Config, base: Path, last: Weights, predicted: dict[str, torch.Tensor], console: Console
) -> Policy:
    """The policy with the weights that the gate accepted."""
    settings: AlphaSettings = getattr(config.accelerators, AlphaSettings.name)
    model = config.model.model_copy(update={"path": str(base), "revision": None})
    accelerators = config.accelerators.model_copy(update={"enabled": []})
    algorithm = config.algorithm.model_copy(update={"beta": 0.0, "advantage": "group"})  # neither reference nor critic
    kept = config.optimizer.model_copy(update={"offload": False})  # masters are written and read here
    with TemporaryDirectory() as folder:
        changes = {"model": model, "accelerators": accelerators, "algorithm": algorithm, "parallel": "none"}
        changes |= {"optimizer": kept}
        trainer = Trainer(config.model_copy(update=changes), Path(folder), console=Console(quiet=True))
    settings.check_gate(len(trainer.task.gate))
    put(trainer.policy.model, last)
    device = trainer.policy.device
    moved = {name: value.to(device) for name, value in predicted.items()}
    optimizer, engine = trainer.learner.optimizer, trainer.engine
    optimizer.write({name: last[name].to(device).float() for name in moved})
    engine.policy_updated()
    tries = settings.rules(holdout=1).judge(
        Gate(settings.gate_level),
        moved,
        {name: optimizer.places(name) for name in moved},
        lambda rows: trainer.evaluate_each("gate", rows),
        available=len(trainer.task.gate),
        changed=engine.policy_updated,
    )
    for one in tries:
        console.print(
            f"factor {one['factor']:g}: {one['before']:.4f} -> {one['after']:.4f} on {one['prompts']} gate prompts, "
            f"evidence {one['e_value']:.3g} (needs {one['needed']:.3g})",
            highlight=False,
        )
    if not tries[-1]["accepted"]:
        raise UserError(f"the gate rejected all {len(tries)} candidates; nothing was written")
    return trainer.policy


def put(model: torch.nn.Module, weights: Weights) -> None:
    """Sets the parameters that are in ``weights``; tied ones are stored under one name only."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in weights:
                param.copy_(weights[name])


def save(policy: Policy, output_dir: Path) -> None:
    """Writes model and tokenizer, complete or not at all."""
    aside = output_dir.with_name(f".{output_dir.name}.tmp")
    policy.save(aside)
    if output_dir.exists():
        output_dir.rmdir()
    publish(aside, output_dir)
