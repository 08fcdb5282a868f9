"""The command ``extrapolate``."""

import argparse
from collections.abc import Callable
from pathlib import Path

EXAMPLES = [
    "train --config configs/sums.yaml --output-dir runs/kept \\\n"
    "      --set save.save_steps=5 save.save_total_limit=12",
    "extrapolate runs/kept --output-dir runs/kept/extrapolated",
    "extrapolate out/checkpoint-10 out/checkpoint-20 out/checkpoint-30 --base models/base \\\n"
    "      --config configs/gsm8k.yaml --set task.gate_path=gate.jsonl --output-dir out/extrapolated",
]


def add(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds it to the command line."""
    parser = add_parser(
        "extrapolate",
        help="predict weights from checkpoints, behind a gate",
        examples=EXAMPLES,
        description="Follows the weights over checkpoints, predicts where they are heading (AlphaRL), and writes the "
        "prediction if it answers\nsignificantly more of the task's held-out gate prompts right than the last "
        "checkpoint. Three checkpoints are needed at\nleast (a run keeps save.save_total_limit), and prompts that "
        "training has not seen (task.gate_path; the task sums\nhas them). The settings are those of the "
        "accelerator alpha, for example:\n--set accelerators.alpha.predictor=full accelerators.alpha.horizon=1.5",
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="a run directory, or checkpoints in Hugging Face format, oldest first",
    )
    parser.add_argument("--base", type=Path, metavar="DIR", help="the model that training began with (not for a run)")
    parser.add_argument("--accuracy", type=float, nargs="+", metavar="A", help="of each checkpoint (not for a run)")
    parser.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="task and generation for the gate (not for a run)"
    )
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="change settings"
    )
    parser.add_argument("--no-gate", action="store_true", help="write the prediction although nothing has tested it")
    parser.add_argument("--output-dir", required=True, type=Path, metavar="DIR", help="new folder, Hugging Face format")
    parser.set_defaults(call="python_trainer.extrapolate:run")
