"""``python -m rlkernels extrapolate BASE CHECKPOINT... --output-dir DIR``, for checkpoints of any trainer."""

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlkernels._files import draft_of, replace_folder
from rlkernels.extrapolation.attempt import Attempt
from rlkernels.extrapolation.predictors import PREDICTORS, skill
from rlkernels.extrapolation.trajectory import RankOneTrajectory
from rlkernels.rank1.stream import Folder, default_filter

STATE = (".safetensors", ".bin", ".pt", ".pth")  # weights and what a trainer keeps beside them: not copied


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("base", type=Path, help="folder with the safetensors that training began with")
    parser.add_argument("checkpoints", type=Path, nargs="+", help="folders of checkpoints, in training order")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="new folder for the weights")
    parser.add_argument("--predictor", choices=sorted(PREDICTORS), default="secant", help="default: %(default)s")
    parser.add_argument("--horizon", type=float, default=2.0, metavar="X",
                        help="go to X times the last step (default: %(default)s)")  # fmt: skip
    parser.add_argument("--accuracy", type=float, nargs="+", metavar="A",
                        help="of each checkpoint; pls needs it, the others refuse where it did not rise")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Writes extrapolated weights beside the other files of the last checkpoint, and prints what they are.

    The steps of the checkpoints are the numbers that the folders' names end with, else 1, 2, ... The output folder is
    written as a whole or not at all. Without accuracies they count as rising. No gate is used.

    Returns:
        The exit code.

    Raises:
        ValueError: a reason not to extrapolate, folders of other tensors, or an output folder that is there already.
    """
    attempt = Attempt(predictor=args.predictor, horizon=args.horizon)
    base, checkpoints, output_dir, accuracy = args.base, args.checkpoints, args.output_dir, args.accuracy
    if output_dir.exists():
        raise ValueError(f"--output-dir must be a new folder, got {output_dir}")
    if accuracy is None and attempt.predictor == "pls":
        raise ValueError("predictor pls goes by accuracy: give --accuracy, one number for each checkpoint")
    if accuracy is not None and len(accuracy) != len(checkpoints):
        raise ValueError(f"--accuracy must have one number for each of {len(checkpoints)} checkpoints, got {accuracy}")
    origin, folders = Folder(base), [Folder(path) for path in checkpoints]
    names = [n for n in origin if default_filter(n) and len(origin.shape(n)) == 2 and 0 not in origin.shape(n)]
    if not names:
        raise ValueError(f"{base} has no projection with two dimensions to extrapolate")
    trajectory = RankOneTrajectory({name: origin[name] for name in names})
    steps = _steps(checkpoints)
    for index, (step, weights) in enumerate(zip(steps, folders)):
        for name in names:
            if name not in weights or weights.shape(name) != origin.shape(name):
                raise ValueError(f"{weights.path} has no {name} of shape {origin.shape(name)}, as {base} has")
        risen = index / len(steps) if accuracy is None else accuracy[index]
        trajectory.track(weights, step=step, accuracy=risen)
    if (objection := attempt.refusal(trajectory)) is not None:
        raise ValueError(f"refused: {objection}")
    kept = set(trajectory.steps)
    points = trajectory.exact_points(folder for step, folder in zip(steps, folders) if step in kept)
    predicted = attempt.predict(trajectory, folders[-1], points=points)
    _write(folders[-1], predicted, output_dir)
    print(
        f"{len(steps)} checkpoints, {len(predicted)} of {len(names)} projections taken from step {steps[-1]} to "
        f"{attempt.horizon * steps[-1]:g}; back-test skill {skill(trajectory, attempt.predictor):.2f} (1: exact)\n"
        f"written to {output_dir}. Nothing has tested these weights: evaluate them on held-out prompts before you use "
        "them (rlkernels.Gate judges two sets of answers)"
    )
    return 0


def _steps(checkpoints: Sequence[Path]) -> list[int]:
    ends = [re.search(r"(\d+)$", path.name) for path in checkpoints]
    steps = [int(end[1]) for end in ends if end]
    ascending = len(steps) == len(checkpoints) and sorted(set(steps)) == steps and steps[0] > 0
    return steps if ascending else list(range(1, len(checkpoints) + 1))


def _write(last: Folder, predicted: Mapping[str, torch.Tensor], output_dir: Path) -> None:
    """Write the files of ``last`` with the predicted weights in their dtypes, one weight file at a time in memory."""
    from safetensors.torch import save_file

    aside = draft_of(output_dir)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in last.path.iterdir():
        if file.is_file() and file.suffix not in STATE:
            shutil.copyfile(file, aside / file.name)
    for file in sorted(set(last.files.values())):
        tensors = {name: last[name] for name, place in last.files.items() if place == file}
        changed = {name: predicted[name].to(tensors[name].dtype) for name in tensors if name in predicted}
        save_file(tensors | changed, aside / file.name, metadata={"format": "pt"})
        shutil.copymode(file, aside / file.name)  # save_file leaves it to its owner alone, whatever the umask
    replace_folder(output_dir)
