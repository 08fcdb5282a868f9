"""``python -m rlkernels extrapolate BASE CHECKPOINT... --output-dir DIR``, for checkpoints of any trainer."""

import argparse
import json
import re
from itertools import pairwise
from pathlib import Path

import torch

from rlkernels.extrapolation.attempt import Attempt
from rlkernels.extrapolation.predictors import PREDICTORS, skill
from rlkernels.extrapolation.trajectory import RankOneTrajectory
from rlkernels.rank1.projections import Projections, matrix_names, view_of
from rlkernels.weights.checkpoints import History, check_new_folder, open_checkpoint, write_checkpoint

STEP_FOLDER = re.compile(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d+)$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("base", type=Path, help="folder with the safetensors that training began with")
    parser.add_argument(
        "checkpoints",
        type=Path,
        nargs="+",
        help="folders of checkpoints, or steps of a weight history (RUN/weights/step-*.delta), in any order",
    )
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="new folder for the weights")
    parser.add_argument("--predictor", choices=sorted(PREDICTORS), default="secant", help="default: %(default)s")
    parser.add_argument("--horizon", type=float, default=2.0, metavar="X",
                        help="go to X times the last step (default: %(default)s)")  # fmt: skip
    parser.add_argument("--accuracy", type=float, nargs="+", metavar="A",
                        help="of each checkpoint; pls needs it, the others refuse where it did not rise")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Write extrapolated weights with the other files of the last checkpoint, and print a summary.

    Checkpoints are sorted by their steps, see :func:`step_of`. The output folder is written as a whole or not at all.
    Without accuracies the accuracy is assumed to rise. No gate is used.

    Returns:
        The exit code.

    Raises:
        ValueError: a reason not to extrapolate, folders of other tensors, or an output folder that exists.
    """
    attempt = Attempt(predictor=args.predictor, horizon=args.horizon)
    base, checkpoints, accuracy = args.base, args.checkpoints, args.accuracy
    check_new_folder(args.output_dir)
    count = len(checkpoints)
    if accuracy is None and attempt.predictor == "pls":
        raise ValueError("predictor pls goes by accuracy: give --accuracy, one number for each checkpoint")
    if accuracy is not None and len(accuracy) != count:
        raise ValueError(f"--accuracy must have one number for each of {count} checkpoints, got {accuracy}")
    numbered = sorted(zip(map(step_of, checkpoints), checkpoints, accuracy or [0.0] * count))
    steps, paths, accuracy_at = zip(*numbered)
    for i, (step, later_step) in enumerate(pairwise(steps)):
        if step == later_step:
            raise ValueError(
                f"checkpoints must be of different steps, got {paths[i]} and {paths[i + 1]}, both of step {step}"
            )
    if accuracy is None:
        accuracy_at = tuple(index / count for index in range(count))  # assumed to rise
    base_folder = open_checkpoint(base)
    histories: dict[Path, History] = {}
    folders = [open_checkpoint(path, histories) for path in paths]
    base_weights = Projections(base_folder, base_folder.shapes)
    if not base_weights:
        raise ValueError(f"{base} has no projection to extrapolate")
    for folder in folders:
        for name in base_weights.names.values():
            shape = base_folder.shapes[name]
            if folder.shapes.get(name) != shape:
                raise ValueError(f"{folder.path} has no {name} of shape {shape}, as {base} has")
    trajectory = RankOneTrajectory(base_weights)
    weights_at = {step: Projections(folder, base_folder.shapes) for step, folder in zip(steps, folders)}
    for step, step_accuracy in zip(steps, accuracy_at):
        trajectory.track(weights_at[step], step=step, accuracy=step_accuracy)
    objection = attempt.refusal(trajectory)
    if objection is not None:
        raise ValueError(f"refused: {objection}")
    points = trajectory.exact_points(weights_at[step] for step in trajectory.steps)
    predicted = attempt.predict(trajectory, weights_at[steps[-1]], points=points)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        matrices = [matrix for matrix in matrix_names(name, tensor.shape) if matrix in predicted]
        result = tensor.clone() if matrices else tensor
        for matrix in matrices:
            view_of(matrix, result).copy_(predicted[matrix])
        return result

    write_checkpoint(folders[-1], args.output_dir, change)
    print(
        f"{count} checkpoints, {len(predicted)} of {len(base_weights)} projections taken from step {steps[-1]} to "
        f"{attempt.horizon * steps[-1]:g}; back-test skill {skill(trajectory, attempt.predictor):.2f} (1: exact)\n"
        f"{base_weights.describe_left_out()}\n"
        f"written to {args.output_dir}. Nothing has tested these weights: evaluate them on held-out prompts before you "
        "use them (rlkernels.Gate judges two sets of answers)"
    )
    return 0


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint: ``global_step`` of its trainer_state.json, else the number that ends its name.

    For a name without a number, the name of a folder above it counts: ``global_step_100/actor/huggingface``.

    Raises:
        ValueError: the checkpoint has no step, or one below 1.
    """
    state = checkpoint / "trainer_state.json"
    if state.is_file():
        try:
            step = json.loads(state.read_text())["global_step"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{state} is not the state of a trainer with a global_step: {error!r}") from None
    else:
        path = checkpoint.absolute()
        numbers = [
            re.search(r"(\d+)$", path.name.removesuffix(".delta")),
            *(STEP_FOLDER.search(parent.name) for parent in path.parents),
        ]
        step = next((int(number[1]) for number in numbers if number), None)
    if not isinstance(step, int) or step < 1:
        raise ValueError(
            f"checkpoints must tell their steps, at least 1, by trainer_state.json or by names such as checkpoint-100, "
            f"got {checkpoint} (step {step})"
        )
    return step
