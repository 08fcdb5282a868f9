"""Chooses a learning rate: one run of the trainer for each rate and seed, appended to bench/sweep/results.csv.

    python -m bench.sweep --config configs/sums.yaml --rates 5e-5 1e-4 2e-4 --seeds 0 --steps 40

Everything else is as in the config; ``--set`` changes it. Counts of steps and tokens hold on any machine, seconds
only on one that does nothing else.
"""

import argparse
import csv
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench._runner import commit
from python_trainer.config import load_config
from python_trainer.trainer import Trainer

CSV = Path(__file__).parent / "results.csv"


def run(config_path: Path, overrides: list[str], folder: Path) -> dict[str, Any]:
    """One run -> a row."""
    config = load_config(config_path, overrides)
    summary = Trainer(config, folder).run()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [(row["step"], row["eval/accuracy"]) for row in metrics if "eval/accuracy" in row]
    target = config.evaluation.target_accuracy
    reached = next((step for step, accuracy in evaluations if target is not None and accuracy >= target), None)
    return {
        "policy": config.model.path,
        "variant": getattr(config.task, "variant", ""),
        "prompts": config.rollout.prompts_per_step,
        "samples": config.rollout.num_generations,
        "learning_rate": f"{config.optimizer.learning_rate:g}",
        "seed": config.seed,
        "steps": summary["steps"],
        "accuracy_start": f"{summary['eval_accuracy_start']:.4f}",
        "accuracy_final": f"{summary['eval_accuracy_final']:.4f}",
        "target": target,
        "steps_to_target": reached,
        "tokens_to_target": summary["tokens_to_target"],
        "seconds_to_target": summary["seconds_to_target"] and f"{summary['seconds_to_target']:.1f}",
        "wall_s": f"{summary['wall_s']:.1f}",
        "threads": torch.get_num_threads(),
        "evaluations": " ".join(f"{step}:{accuracy:.3f}" for step, accuracy in evaluations),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def append(path: Path, row: dict[str, Any]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/sums.yaml"))
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-5, 1e-4, 2e-4, 4e-4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings")
    args = parser.parse_args()
    for seed in args.seeds:
        for rate in args.rates:
            settings = [f"seed={seed}", f"optimizer.learning_rate={rate}", f"max_steps={args.steps}"]
            fixed = ["save.save_steps=0", "max_seconds=null", "task.test_size=2048"]
            with tempfile.TemporaryDirectory() as folder:
                row = run(args.config, [*fixed, *settings, *args.set], Path(folder) / "run")
            append(args.csv, row)
            print(f"rate {rate:g}, seed {seed}: {row['evaluations']}", flush=True)


if __name__ == "__main__":
    main()
