"""What history is worth: training the policy `main` with the memory of a run of the policy `small`.

    python -m bench.studies rhyme --output-dir runs/studies/rhyme --seeds 0 1 2 --minutes 60

First fills the databases (their cost is in the table), then trains every variant on every seed and writes
results/rhyme.csv, where rows of other variants and seeds stay, and a table. What is finished is kept, what was
interrupted goes on; no run is started after ``--minutes``. The learning rate is the best of the plain run's sweep
(bench/sweep). `fresh-4` is a control: it has the 4 fresh answers per prompt of `ratio-1`, but no history. Seconds are
CPU seconds of the one thread that runs, so other programs on the machine count little.
"""

import argparse
import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from python_trainer.tasks.arithmetic import SIZES, arithmetic_task
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from bench._runner import commit
from python_trainer.compare import finished
from python_trainer.config import load_config
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer
from tools.policies import arithmetic as pretrain

CONFIG = Path(__file__).parents[2] / "configs" / "arithmetic.yaml"
SETTINGS = [
    "max_seconds=null", "evaluation.eval_steps=2", "evaluation.eval_limit=2048",
    "evaluation.eval_limit_during=1024", "evaluation.target_accuracy=0.85",
]  # fmt: skip
FILL = ["accelerators.enabled=[rhyme]", "accelerators.rhyme.history_ratio=0", "accelerators.rhyme.rescue=false"]
EASY_TERMS = 3  # sums of up to so many terms are the easy part of the task

# what fills a database: (policy, part of the task)
HISTORIES = {"qwen2": ("small", "all"), "llama": ("llama", "all"), "easy": ("small", "easy"), "hard": ("small", "hard")}


def rhyme(history: str = "qwen2", **settings: Any) -> list[str]:
    """Overrides of a run that reads a database."""
    values = {"database": f"{{databases}}/{history}.db", "rare_share": 0, **settings}
    chosen = ["accelerators.enabled=[rhyme]", *(f"accelerators.rhyme.{key}={value}" for key, value in values.items())]
    return chosen


VARIANTS: dict[str, list[str]] = {
    "baseline": [],
    "fresh-4": ["rollout.num_generations=4"],
    "rhyme": rhyme(history_ratio=0.34),
    "ratio-1": rhyme(history_ratio=1.0),
    "rescue only": rhyme(history_ratio=0.0),
    "own answers": ["accelerators.enabled=[rhyme]", "accelerators.rhyme.history_ratio=0.34"],
    "fraction 5 %": rhyme(history_ratio=1.0, fraction=0.05),
    "fraction 10 %": rhyme(history_ratio=1.0, fraction=0.1),
    "fraction 40 %": rhyme(history_ratio=1.0, fraction=0.4),
    "fraction 100 %": rhyme(history_ratio=1.0, fraction=1.0),
    "retrodiction": rhyme(history_ratio=1.0, selection="retrodiction", retrodiction_steps=1),
    "from llama": rhyme("llama", history_ratio=1.0),
    "from easy": rhyme("easy", history_ratio=1.0),
    "from hard": rhyme("hard", history_ratio=1.0),
    # how well the rankings agree with the held-out gradient, over all candidates of all stages; nothing is mixed in
    "ranking": rhyme(history_ratio=0.0, rescue=False, fraction=1.0, threshold=0.0, retrodiction_steps=1),
}
RANKINGS = ("retrodiction", "likelihood", "recent", "reward", "random")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/rhyme"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=30, help="of every run (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="start no run after so many (default: 60)")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more settings")


def llama_policy(folder: Path) -> None:
    """A base policy of the size of `small`, of another family and another seed, made as the shipped ones are."""
    torch.manual_seed(1)
    shape: dict[str, Any] = dict(pretrain.SHAPES["small"])
    config = LlamaConfig(
        vocab_size=pretrain.EOS_ID + 1, num_hidden_layers=3, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.04, pad_token_id=pretrain.PAD_ID, eos_token_id=pretrain.EOS_ID, bos_token_id=None,
        **shape,
    )  # fmt: skip
    policy: Any = LlamaForCausalLM(config)
    policy.set_attn_implementation("eager")
    for phase in pretrain.PHASES["small"]:
        pretrain.train(policy, phase, pretrain.Sums(1, phase), 64)
    pretrain.save(policy, folder)


def part_of_the_task(folder: Path, part: str) -> list[str]:
    """The training prompts of one difficulty as files -> overrides that train on them."""
    task = arithmetic_task("short", 0, **{f"{split}_size": size for split, size in SIZES.items()})
    is_easy = part == "easy"
    chosen = [x for x in task.train if (x.columns["terms"] <= EASY_TERMS) == is_easy]
    folder.mkdir(parents=True, exist_ok=True)
    for name, examples in (("train", chosen), ("test", task.test[:2048])):
        rows = [json.dumps({"prompt": x.prompt, "answer": x.columns["answer"]}) + "\n" for x in examples]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return [
        "task={name: jsonl, reward: 'python_trainer.tasks.arithmetic:accuracy', "
        f"train_path: {folder}/train.jsonl, test_path: {folder}/test.jsonl}}"
    ]


def train(folder: Path, overrides: list[str], label: str) -> dict[str, Any]:
    """One run, unless it is there -> its summary."""
    if not finished(folder):
        config = load_config(CONFIG, [*SETTINGS, *overrides])
        Trainer(config, folder, resume=True, label=label, timer=time.process_time).run()
    return dict(json.loads((folder / "summary.json").read_text()))


def fill(args: argparse.Namespace, history: str) -> dict[str, Any]:
    """Makes a database by training another policy, or part of the task, with other noise -> summary of that run."""
    policy, part = HISTORIES[history]
    folder = args.output_dir / "history" / history
    overrides = [*FILL, f"accelerators.rhyme.database={args.output_dir}/{history}.db", "seed=100",
                 f"model.path={policy}", f"max_steps={2 * args.steps}"]  # fmt: skip
    if policy == "llama":
        home = args.output_dir / "llama"
        if not (home / "tokenizer.json").exists():
            llama_policy(home)
        overrides.append(f"model.path={home}")
    if part != "all":
        overrides += part_of_the_task(args.output_dir / part, part)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    return train(folder, [*overrides, *args.overrides], f"history {history}")


def row_of(name: str, seed: int, folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """One line of the results."""
    rows = read_metrics(folder)[1:]

    def average(key: str) -> float | None:
        values = [row[key] for row in rows if row.get(key) is not None]
        return fmean(values) if values else None

    ranks = {f"rank_{name}": average(f"rhyme/rank/{name}") for name in RANKINGS}
    spent = summary["accelerator_s"].get("rhyme", 0.0)
    return {
        "variant": name, "seed": seed, "steps": summary["steps"], "accuracy_start": summary["eval_accuracy_start"],
        "accuracy_final": summary["eval_accuracy_final"], "seconds_to_target": summary["seconds_to_target"],
        "tokens_to_target": summary["tokens_to_target"], "training_s": summary["training_s"],
        "generated_tokens": summary["generated_tokens"], "trained_tokens": summary["trained_tokens"],
        "rhyme_share": spent / summary["training_s"], "stored_share": average("rhyme/stored_share"),
        "failed_groups": average("rhyme/failed_groups"), "rescued_groups": average("rhyme/rescued_groups"), **ranks,
        "device": summary["device"], "commit": commit(),
    }  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that are there; numbers are text."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """results/rhyme.csv, where rows of other variants and seeds stay, and the table of ``rows`` on the terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rhyme.csv"
    kept = {(row["variant"], row["seed"]): row for row in read(path)}
    kept |= {(row["variant"], str(row["seed"])): row for row in rows}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in kept.values() for name in row)))
        writer.writeheader()
        writer.writerows(kept.values())
    table = Table("variant", "seeds", "tokens to target", "seconds to target", "accuracy after", "generated tokens",
                  "stored", "rhyme's share of time")  # fmt: skip
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == name]
        cells = [
            spread(mine, key, form)
            for key, form in (("tokens_to_target", "{:,.0f}"), ("seconds_to_target", "{:.1f}"),
                              ("accuracy_final", "{:.3f}"), ("generated_tokens", "{:,.0f}"), ("stored_share", "{:.3f}"),
                              ("rhyme_share", "{:.3f}"))
        ]  # fmt: skip
        table.add_row(name, str(len(mine)), *cells)
    console = Console()
    console.print(table)
    ranking = [row for row in rows if row["variant"] == "ranking"]
    if ranking:
        ranks = ", ".join(f"{name} {spread(ranking, f'rank_{name}', '{:+.3f}')}" for name in RANKINGS)
        console.print(f"rank correlation with the held-out gradient, mean over steps: {ranks}", highlight=False)


def spread(rows: list[dict[str, Any]], key: str, form: str) -> str:
    """Mean and standard deviation over seeds; a dash where a seed has no value."""
    values = [row[key] for row in rows]
    if any(value is None for value in values):
        return "-"
    text: Callable[[float], str] = form.format
    return text(fmean(values)) + (f" ± {text(stdev(values)).lstrip('+')}" if len(values) > 1 else "")


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    started = time.monotonic()
    args.output_dir = args.output_dir.absolute()
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        for name in args.variants:
            overrides = [value.format(databases=args.output_dir) if "{databases}" in value else value
                         for value in VARIANTS[name]]  # fmt: skip
            folder = args.output_dir / name.replace(" ", "-").replace("-%", "") / f"seed-{seed}"
            late = time.monotonic() - started > 60 * args.minutes
            if late and not finished(folder):
                continue
            for history in HISTORIES:
                home = args.output_dir / "history" / history
                if any(f"/{history}.db" in value for value in overrides):
                    filled = fill(args, history)
                    if not any(row["variant"] == f"history {history}" for row in rows):
                        rows.append(row_of(f"history {history}", 100, home, filled))
            settings = [*overrides, f"max_steps={args.steps}", f"seed={seed}", *args.overrides]
            rows.append(row_of(name, seed, folder, train(folder, settings, f"{name}, seed {seed}")))
            write(rows, args.results)
