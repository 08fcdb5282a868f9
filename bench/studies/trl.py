"""Training against TRL's GRPOTrainer: seconds to the same accuracy on the arithmetic task.

    python -m bench.studies trl --output-dir runs/studies/trl

The same policy, prompts, rewards, loss and optimizer, float32 with exact products everywhere, on one thread: TRL, this
trainer, and this trainer with the four accelerators of the papers at their defaults. A run ends at the target. Seconds
are CPU seconds of the process from the first step on; evaluations, all by the code of python_trainer, are not in them,
what accelerators do before the first step is. Runs that are finished are kept. Writes bench/studies/results/trl.md.
"""

import argparse
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench._markdown import table_lines
from bench._runner import commit, cpu_model
from bench._trl import TRL_BATCH, Generation, make_grpo_trainer
from bench.studies import PAPERS
from bench.studies.rpo import reached
from python_trainer.compare import check_same, finished
from python_trainer.config import Config, dump_config, load_config
from python_trainer.run_directory import read_metrics, write_text
from python_trainer.trainer import Trainer

TARGET = 0.85
COMMON = [
    "model.matmul_precision=highest", "max_steps=40", "max_seconds=600", "evaluation.eval_steps=2",
    "evaluation.eval_limit=1024", "evaluation.eval_limit_during=1024", f"evaluation.target_accuracy={TARGET}",
    "evaluation.stop_at_target=true", "save.save_steps=0",
]  # fmt: skip
VARIANTS = {
    "TRL": [],
    "python_trainer": [],
    "python_trainer, all accelerators": [f"accelerators.enabled=[{', '.join(PAPERS)}]"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/trl"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--seeds", type=int, default=1)


def settings(variant: str, seed: int) -> Config:
    return load_config("configs/arithmetic.yaml", [*COMMON, *VARIANTS[variant], f"seed={seed}"])


def train(variant: str, seed: int, folder: Path) -> None:
    """One run, unless it is there already."""
    config = settings(variant, seed)
    check_same(folder, config)
    if finished(folder):
        return
    console = Console(quiet=True)
    if variant == "TRL":
        train_trl(config, folder)
    else:
        Trainer(config, folder, resume=True, console=console, timer=time.process_time).run()


def train_trl(config: Config, folder: Path) -> None:
    """A run of TRL's trainer: rows of metrics.jsonl and a summary as the ones of python_trainer, with less in them."""
    from transformers import TrainerCallback

    judge = Trainer(config, folder / "judge", console=Console(quiet=True))  # evaluates, and never trains
    limit = config.evaluation.eval_limit
    rows: list[dict[str, float]] = []

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.spent, self.tokens, self.started = 0.0, 0, 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._evaluate(0, kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.spent += time.process_time() - self.started
            self.tokens += generation.tokens
            late = config.max_seconds is not None and self.spent >= config.max_seconds
            control.should_training_stop = late or state.global_step >= config.max_steps
            if state.global_step % config.evaluation.eval_steps == 0 or control.should_training_stop:
                reached_it = self._evaluate(state.global_step, kwargs["model"])
                control.should_training_stop = control.should_training_stop or reached_it
            self.started = time.process_time()

        def _evaluate(self, step: int, model: torch.nn.Module) -> bool:
            judge.policy.model.load_state_dict(model.state_dict())
            judge.engine.policy_updated()
            accuracy = judge.evaluate("test", limit)
            rows.append({"step": step, "eval/accuracy": accuracy, "time/training_s": self.spent,
                         "total/generated_tokens": self.tokens})  # fmt: skip
            model.train()
            self.started = time.process_time()
            return accuracy >= TARGET

    trainer = make_grpo_trainer(config, folder / "trl", batch=TRL_BATCH, callbacks=[Watch()])
    generation = Generation(trainer)
    trainer.train()
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_text(folder / "config.yaml", dump_config(config))
    summary = {"steps": rows[-1]["step"], "eval_accuracy_final": rows[-1]["eval/accuracy"]}
    write_text(folder / "summary.json", json.dumps(summary) + "\n")


def row_of(variant: str, seed: int, folder: Path, baseline: float | None) -> list[object]:
    """A line of the table."""
    rows = [row for row in read_metrics(folder) if "eval/accuracy" in row]
    last = rows[-1]
    seconds, tokens = (reached(rows, TARGET, key) for key in ("time/training_s", "total/generated_tokens"))
    name = f"TRL {version('trl')}" if variant == "TRL" else variant
    ratio = "-" if seconds is None or baseline is None else f"{baseline / seconds:.2f}x"
    return [
        name, seed, f"{rows[0]['eval/accuracy']:.3f}", f"{last['step']:.0f}",
        f"{last['time/training_s'] / last['step']:.2f}", "not reached" if seconds is None else f"{seconds:.1f}",
        ratio, "-" if tokens is None else f"{tokens:,.0f}", f"{last['eval/accuracy']:.3f}",
    ]  # fmt: skip


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    head = ["", "seed", "accuracy before", "steps", "CPU s per step", f"CPU s to {TARGET}", "times TRL",
            f"tokens to {TARGET}", "accuracy at the end"]  # fmt: skip
    rows = []
    for seed in range(args.seeds):
        folders = {
            variant: args.output_dir / f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}" for variant in VARIANTS
        }
        for variant, folder in folders.items():
            train(variant, seed, folder)
        baseline = reached(read_metrics(folders["TRL"]), TARGET, "time/training_s")
        rows += [row_of(variant, seed, folder, baseline) for variant, folder in folders.items()]
    text = "\n".join([
        f"Arithmetic, short sums, 1024 test prompts in every evaluation. {cpu_model()}, 1 thread, torch "
        f"{torch.__version__}, Python {platform.python_version()}, commit {commit()}. Accuracies between evaluations "
        "are on a straight line.",
        "",
        *table_lines(head, rows),
    ])  # fmt: skip
    print(text)
    args.results.mkdir(parents=True, exist_ok=True)
    write_text(args.results / "trl.md", text + "\n")
