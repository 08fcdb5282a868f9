"""``python -m rlkernels weights RUN --step N --output-dir DIR``: a step of a run as a model."""

import argparse
from pathlib import Path

from rlkernels.weights.checkpoints import History, Step, check_new_folder, step_file, write_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run of the trainer with save.weight_history")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="0: the first model")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="new folder for the model")


def run(args: argparse.Namespace) -> int:
    """Write the model after a step, bit for bit, and return the exit code.

    Raises:
        ValueError: the run has no such step, a delta is damaged, or the output folder exists.
    """
    check_new_folder(args.output_dir)
    history = History(args.run_dir / "weights")
    history.weights(args.step)  # checked before anything is written
    write_checkpoint(Step(step_file(history.path, args.step), history), args.output_dir)
    print(f"step {args.step} of {args.run_dir} (0 to {history.steps}) is written to {args.output_dir}")
    return 0
