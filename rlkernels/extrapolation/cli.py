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
    """Declares the arguments of the subcommand."""
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
    """Writes extrapolated weights beside the other files of the last checkpoint, and prints what they are.

    Checkpoints are sorted by their steps, see :func:`step_of`. The output folder is written as a whole or not at all.
    Without accuracies they count as rising. No gate is used.

    Returns:
        The exit code.

    Raises:
        ValueError: a reason not to extrapolate, folders of other tensors, or an output folder that is there already.
    """
    attempt = Attempt(predictor=args.predictor, horizon=args.horizon)
    base, checkpoints, output_dir, accuracy = args.base, args.checkpoints, args.output_dir, args.accuracy
    check_new_folder(output_dir)
    if accuracy is None and attempt.predictor == "pls":
        raise ValueError("predictor pls goes by accuracy: give --accuracy, one number for each checkpoint")
    if accuracy is not None and len(accuracy) != len(checkpoints):
        raise ValueError(f"--accuracy must have one number for each of {len(checkpoints)} checkpoints, got {accuracy}")
    numbered = sorted((step_of(path), path, place) for place, path in enumerate(checkpoints))
    steps = [step for step, _, _ in numbered]
    for (step, path, _), (later_step, later_path, _) in pairwise(numbered):
        if step == later_step:
            raise ValueError(
                f"checkpoints must be of different steps, got {path} and {later_path}, both of step {step}"
            )
    if accuracy is not None:
        accuracy = [accuracy[place] for _, _, place in numbered]
    origin, histories = open_checkpoint(base), dict[Path, History]()
    folders = [open_checkpoint(path, histories) for _, path, _ in numbered]
    before = Projections(origin, origin.shapes)
    if not before:
        raise ValueError(f"{base} has no projection to extrapolate")
    for folder in folders:
        for name in before.names.values():
            if folder.shapes.get(name) != origin.shapes[name]:
                raise ValueError(f"{folder.path} has no {name} of shape {origin.shapes[name]}, as {base} has")
    trajectory = RankOneTrajectory(before)
    tracked = [Projections(folder, origin.shapes) for folder in folders]
    for index, (step, weights) in enumerate(zip(steps, tracked)):
        assumed = index / len(steps)  # it rises
        trajectory.track(weights, step=step, accuracy=assumed if accuracy is None else accuracy[index])
    if (objection := attempt.refusal(trajectory)) is not None:
        raise ValueError(f"refused: {objection}")
    kept = set(trajectory.steps)
    points = trajectory.exact_points(weights for step, weights in zip(steps, tracked) if step in kept)
    predicted = attempt.predict(trajectory, tracked[-1], points=points)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        matrices = [matrix for matrix in matrix_names(name, tensor.shape) if matrix in predicted]
        result = tensor.clone() if matrices else tensor
        for matrix in matrices:
            view_of(matrix, result).copy_(predicted[matrix])
        return result

    write_checkpoint(folders[-1], output_dir, change)
    print(
        f"{len(steps)} checkpoints, {len(predicted)} of {len(before)} projections taken from step {steps[-1]} to "
        f"{attempt.horizon * steps[-1]:g}; back-test skill {skill(trajectory, attempt.predictor):.2f} (1: exact)\n"
        f"{before.describe_left_out()}\n"
        f"written to {output_dir}. Nothing has tested these weights: evaluate them on held-out prompts before you use "
        "them (rlkernels.Gate judges two sets of answers)"
    )
    return 0


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint: ``global_step`` of its trainer_state.json, else the number that ends its name.

    Where the name has no number, that of a folder above it counts: ``global_step_100/actor/huggingface``.

    Raises:
        ValueError: no step can be told, or one below 1.
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
