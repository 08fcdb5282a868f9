"""Drafts on the arithmetic task: forward passes and rollout seconds by epoch, and that training does not change.

    python -m bench.studies drafts --output-dir runs/studies/drafts
    VENV-vllm/bin/python -m bench.studies drafts --output-dir runs/studies/drafts-vllm --epoch 4 \\
        --set rollout.engine=vllm task.train_size=128

The same run with and without drafts, in float32 (matmul_precision highest), on one thread; 16 steps are one visit to
each of the 512 prompts. Seconds are CPU seconds of that thread, so other programs on the machine count little. Runs
that are finished are kept. Prints a table as Markdown for each seed. The second line is for an environment with vLLM
(``make test-vllm`` makes one), which draws other tokens with drafts, of the same distribution.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench._markdown import table_lines
from python_trainer.config import load_config
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer

COMMON = [
    "model.matmul_precision=highest", "max_seconds=null", "evaluation.eval_steps=0", "evaluation.eval_limit=1024",
    "save.save_steps=0",
]  # fmt: skip
VARIANTS = {"plain": "accelerators.enabled=[]", "drafts": "accelerators.enabled=[drafts]"}
# times, drafts, and the sampler's log-probabilities, whose last digits depend on what else is in a forward pass
OTHER = ("time/", "drafts/", "tokens_per_second", "rollout_tokens_per_second", "sampling/")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/drafts"), metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--epoch", type=int, default=16, metavar="STEPS", help="steps of an epoch (default: 16)")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more settings")


def train(folder: Path, options: Sequence[str]) -> None:
    if (folder / "summary.json").exists():
        return
    config = load_config("configs/arithmetic.yaml", [*COMMON, *options])
    trainer = Trainer(config, folder, resume=True, console=Console(quiet=True), timer=time.process_time)
    trainer.run()
    (folder / "engine.json").write_text(json.dumps(trainer.engine.stats), encoding="utf-8")


def learning(folder: Path) -> list[dict[str, float]]:
    """Rewards, accuracies, losses, gradients, lengths and so on, step by step."""
    rows = read_metrics(folder)
    return [{key: value for key, value in row.items() if not key.startswith(OTHER)} for row in rows]


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    head = ["seed", "epoch", "rollout CPU s, plain", "drafts", "tokens per sample and pass", "offered", "accepted",
            "off"]  # fmt: skip
    for seed in range(args.seeds):
        folders = {variant: args.output_dir / f"{variant}-{seed}" for variant in VARIANTS}
        for variant, folder in folders.items():
            steps = f"max_steps={args.epochs * args.epoch}"
            train(folder, [VARIANTS[variant], f"seed={seed}", steps, *args.overrides])
        table = []
        plain, drafts = (read_metrics(folder)[1:] for folder in folders.values())
        for epoch in range(args.epochs):
            before, after = (rows[epoch * args.epoch : (epoch + 1) * args.epoch] for rows in (plain, drafts))
            generated = sum(row["tokens/generated"] for row in after)
            steps = sum(row["tokens/generated"] / row["drafts/tokens_per_step"] for row in after)
            offered = sum(row["drafts/offered_tokens"] for row in after)
            accepted = sum(row["drafts/offered_tokens"] * row["drafts/acceptance"] for row in after)
            off = sum(row["drafts/off_share"] for row in after) / len(after)
            spent = [sum(row["time/rollout_s"] for row in rows) for rows in (before, after)]
            own = sum(row["time/accelerator/drafts_s"] for row in after)
            table.append([
                seed, epoch + 1, f"{spent[0]:.2f}", f"{spent[1]:.2f} + {own:.2f}", f"{generated / steps:.2f}",
                f"{offered:.0f}", f"{accepted / max(offered, 1):.0%}", f"{off:.0%}",
            ])  # fmt: skip
        print("\n".join(table_lines(head, table)))
        same = [ours == wanted for ours, wanted in zip(*(learning(folder) for folder in folders.values()), strict=True)]
        where = "all metrics of learning are equal to the bit" if all(same) else f"row {same.index(False)} differs"
        passes = [json.loads((f / "engine.json").read_text())["forward_passes"] for f in folders.values()]
        print(f"\nseed {seed}: {where}; forward passes {passes[0]:.0f} and {passes[1]:.0f}\n")
