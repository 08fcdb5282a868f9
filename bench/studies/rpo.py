"""Suffix rollouts on long sums: tokens, seconds and accuracy against plain GRPO and DAPO.

    python -m bench.studies rpo --output-dir runs/studies/rpo

128 training prompts, so that every prompt is visited three times in 25 steps; suffix rollouts live on second visits.
Seconds are CPU seconds of the one thread that runs, so other programs on the machine do not count; filling the cache
is in them, evaluations are not. Runs that are finished are kept, one that was interrupted goes on: about 35 minutes on
a core of its own. Writes bench/studies/results/rpo.md, .json and .png.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
import torch
from python_trainer.accelerators.rpo.picture import informative_by_cut
from rich.console import Console

from bench._markdown import table_lines
from bench._runner import commit
from python_trainer.compare import check_same, finished
from python_trainer.config import Config, load_config
from python_trainer.report.intervals import paired_difference
from python_trainer.report.runs import Run, find_runs
from python_trainer.report.tables import mean
from python_trainer.run_directory import load_evaluations, read_metrics, save_evaluation
from python_trainer.trainer import Trainer

CONFIG = Path("configs/arithmetic_long.yaml")
TEST_PROMPTS = 1024  # of the last evaluation; the ones in between use 256
TARGETS = (0.55, 0.6)  # accuracies to which seconds and tokens are counted
COMMON = [
    "task.train_size=128", "max_steps=25", "evaluation.eval_steps=5", "evaluation.eval_limit=256",
    "evaluation.eval_limit_during=256", "evaluation.target_accuracy=null",
    "save.save_steps=10", "optimizer.learning_rate=2e-4",
]  # fmt: skip
RPO = ["accelerators.enabled=[rpo]", "accelerators.rpo.fill=4"]
GRPO = ["algorithm.loss_type=grpo"]
DAPO = ["algorithm.loss_type=dapo", "algorithm.epsilon_high=0.28", "rollout.dynamic_sampling=true"]
LENGTH = ["accelerators.rpo.length_reward=correct"]
WHOLE = ["algorithm.prefix_in_loss=true"]
SHORT = ["accelerators.rpo.cut_share=0.3"]
# variant -> (what it is compared with, settings)
VARIANTS: dict[str, tuple[str | None, list[str]]] = {
    "grpo": (None, GRPO),
    "grpo+rpo": ("grpo", RPO + GRPO),
    "dapo": (None, DAPO),
    "dapo+rpo": ("dapo", RPO + DAPO),
    "grpo+rpo+length": ("grpo", RPO + GRPO + LENGTH),
    "grpo+rpo, prefix in the loss": ("grpo", RPO + GRPO + WHOLE),
    "grpo+rpo, short cuts": ("grpo", RPO + GRPO + SHORT),
    "dapo+rpo+length": ("dapo", RPO + DAPO + LENGTH),
}
MAIN = ("grpo", "grpo+rpo", "grpo+rpo+length", "dapo", "dapo+rpo", "dapo+rpo+length")
# the first steps of grpo+rpo again, each answer with its own copy of the prefix in training
UNSHARED = "grpo+rpo, prefixes repeated"
UNSHARED_STEPS = 12


def settings(variant: str, seed: int) -> Config:
    if variant == UNSHARED:
        special = [f"max_steps={UNSHARED_STEPS}", "evaluation.eval_steps=0", "optimizer.share_prefixes=false"]
        return load_config(CONFIG, [*COMMON, *RPO, *GRPO, *special, f"seed={seed}"])
    return load_config(CONFIG, [*COMMON, *VARIANTS[variant][1], f"seed={seed}"])


def order(seeds: int) -> list[tuple[str, int]]:
    """All runs, most important first: a study that ends early has whole seeds of the main variants."""
    main = [(variant, seed) for seed in range(seeds) for variant in MAIN]
    names = [name for name in VARIANTS if name not in MAIN]
    others = [(UNSHARED, 0), *((variant, seed) for seed in range(seeds) for variant in names)]
    return main + others


def train(variant: str, seed: int, folder: Path) -> None:
    """One run and its last evaluation, unless they are there already."""
    config = settings(variant, seed)
    check_same(folder, config)
    if finished(folder) and "test" in load_evaluations(folder):
        return
    trainer = Trainer(config, folder, resume=True, label=f"{variant} (seed {seed})", timer=time.process_time)
    if not finished(folder):
        trainer.run()
    save_evaluation(folder, "test", trainer.evaluator.evaluate_each("test", range(TEST_PROMPTS)))


def reached(rows: Iterable[dict[str, float]], target: float, key: str) -> float | None:
    """Where the accuracy crosses the target on the way up, on a straight line between evaluations.

    Args:
        rows: of metrics.jsonl.
        key: what is counted up to there.
    """
    before: tuple[float, float] | None = None
    for row in rows:
        if "eval/accuracy" in row:
            now = (row[key], row["eval/accuracy"])
            if now[1] >= target:
                if before is None:
                    return now[0]
                return before[0] + (now[0] - before[0]) * (target - before[1]) / (now[1] - before[1])
            before = now
    return None


def facts(runs: Sequence[Run]) -> dict[str, Any]:
    """Means over the seeds of a variant, and each seed's own figures where they matter."""
    summaries = [run.summary for run in runs]
    metrics = [read_metrics(run.folder) for run in runs]
    answers = [[row for row in rows if row["step"]] for rows in metrics]
    spent = fmean(s["training_s"] for s in summaries)
    out: dict[str, Any] = {
        "seeds": len(runs),
        "steps": fmean(s["steps"] for s in summaries),
        "seconds_per_step": fmean(sum(r["time/rollout_s"] + r["time/train_s"] for r in a) / len(a) for a in answers),
        "training_s": spent,
        "fill_s": fmean(rows[0]["time/training_s"] for rows in metrics),  # before the first step: filling the cache
        "generated_tokens": fmean(s["generated_tokens"] for s in summaries),
        "generated_per_answer": fmean(fmean(r["completions/generated_length"] for r in a) for a in answers),
        "answer_length": fmean(fmean(r["completions/mean_length"] for r in a) for a in answers),
        "trained_per_step": fmean(fmean(r["tokens/trained"] for r in a) for a in answers),
        "informative": fmean(1 - fmean(r["frac_reward_zero_std"] for r in a) for a in answers),
        "accuracy": [float(load_evaluations(run.folder)["test"].mean()) for run in runs],
        "share": {
            part: fmean(s[f"{part}_s"] for s in summaries) / spent for part in ("rollout", "train")
        } | {"rpo": fmean(s["accelerator_s"].get("rpo", 0.0) for s in summaries) / spent},
    }  # fmt: skip
    for target in TARGETS:
        out[f"seconds_to_{target}"] = [reached(rows, target, "time/training_s") for rows in metrics]
        out[f"tokens_to_{target}"] = [reached(rows, target, "total/generated_tokens") for rows in metrics]
    return out


def versus(ours: Sequence[float | None], plain: Sequence[float | None], form: str) -> str:
    """The mean and how much less than the plain mean it is; how many seeds got there when not all did."""
    value, other = mean(ours), mean(plain)
    if value is None:
        return f"{sum(v is not None for v in ours)} of {len(ours)} seeds"
    return form.format(value) + (f" ({100 * (value / other - 1):+.0f} %)" if other else "")


def table(by_variant: dict[str, list[Run]], found: dict[str, dict[str, Any]]) -> str:
    """Markdown, one row per variant."""
    targets = [f"{what} to {t}" for t in TARGETS for what in ("seconds", "generated tokens")]
    head = ["", "seeds", "steps", "tokens per answer", "s per step", *targets, "accuracy", "minus plain, paired 95 %",
            "generation / training / rpo", "informative groups"]  # fmt: skip
    rows = []
    for name, own in found.items():
        plain = VARIANTS[name][0] or name
        cells, same_seeds = [f"**{name}**"], by_variant.get(plain, [])[: own["seeds"]]
        reference = facts(same_seeds) if len(same_seeds) == own["seeds"] else own
        cells += [str(own["seeds"]), f"{own['steps']:.0f}"]
        cells.append(versus([own["generated_per_answer"]], [reference["generated_per_answer"]], "{:.0f}"))
        cells.append(versus([own["seconds_per_step"]], [reference["seconds_per_step"]], "{:.2f}"))
        for target in TARGETS:
            for what, form in (("seconds", "{:.0f}"), ("tokens", "{:,.0f}")):
                key = f"{what}_to_{target}"
                cells.append(versus(own[key], reference[key], form))
        cells.append(f"{fmean(own['accuracy']):.3f} ({', '.join(f'{a:.3f}' for a in own['accuracy'])})")
        difference = "-"
        if plain != name and plain in by_variant:
            ours, theirs = ([load_evaluations(run.folder)["test"] for run in by_variant[n]] for n in (name, plain))
            both = min(len(ours), len(theirs))
            difference = str(paired_difference(ours[:both], theirs[:both]))
        share = own["share"]
        cells += [difference, " / ".join(f"{100 * share[part]:.0f}" for part in ("rollout", "train", "rpo")) + " %",
                  f"{100 * own['informative']:.0f} %"]  # fmt: skip
        rows.append(cells)
    return "\n".join(table_lines(head, rows))


def repeated_prefixes(output_dir: Path) -> dict[str, Any]:
    """Seconds per step of the same first steps, with each prefix computed once and once per answer."""
    out = {}
    for name, variant in (("shared", "grpo+rpo"), ("repeated", UNSHARED)):
        rows = [row for row in read_metrics(output_dir / variant / "seed-0") if 1 <= row["step"] <= UNSHARED_STEPS]
        out[name] = {} if not rows else {
            key: fmean(row[source] for row in rows)
            for key, source in (
                ("rollout_s", "time/rollout_s"), ("train_s", "time/train_s"), ("trained_tokens", "tokens/trained")
            )
        }  # fmt: skip
    return out


def draw(by_variant: dict[str, list[Run]], path: Path) -> None:
    """Accuracy over seconds and over generated tokens (one line per seed), and informative groups against the cut."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for number, (name, runs) in enumerate(by_variant.items()):
        counts: dict[int, numpy.ndarray] = {}
        for i, run in enumerate(runs):
            rows = [row for row in read_metrics(run.folder) if "eval/accuracy" in row]
            for ax, key, unit in ((axes[0], "time/training_s", 1), (axes[1], "total/generated_tokens", 1e6)):
                ax.plot([row[key] / unit for row in rows], [row["eval/accuracy"] for row in rows], color=f"C{number}",
                        linewidth=1.4, marker=".", label=None if i else name)  # fmt: skip
            for upper, pair in informative_by_cut(run.folder).items():
                counts[upper] = counts.get(upper, numpy.zeros(2)) + pair
        if counts:
            uppers = sorted(counts)
            share = [counts[upper][1] / counts[upper][0] for upper in uppers]
            axes[2].plot(uppers, share, marker=".", color=f"C{number}", label=name)
    axes[0].set(xlabel="seconds, without evaluations", ylabel="accuracy on 256 test prompts, sampled")
    axes[1].set(xlabel="tokens generated (million)")
    axes[2].set(xlabel="tokens cut from the remembered answer, up to (%)", ylabel="share of informative groups",
                ylim=(0, 1))  # fmt: skip
    for ax in axes:
        ax.grid(alpha=0.3)
    axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/rpo"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for variant, seed in order(args.seeds):
        train(variant, seed, args.output_dir / variant / f"seed-{seed}")
        write(args.output_dir, args.results)


def write(output_dir: Path, results: Path) -> None:
    """The table, the figures behind it and the picture, of what is finished."""
    runs = [run for run in find_runs([output_dir]) if "test" in load_evaluations(run.folder)]
    by_variant = {name: [run for run in runs if run.name == name] for name in VARIANTS}
    by_variant = {name: own for name, own in by_variant.items() if own}
    found = {name: facts(own) for name, own in by_variant.items()}
    twice = repeated_prefixes(output_dir)
    results.mkdir(parents=True, exist_ok=True)
    text = table(by_variant, found)
    prefixes = table_lines(
        ["", "generation, s per step", "training, s per step", "tokens in forward-backward passes"],
        [[name, f"{v['rollout_s']:.2f}", f"{v['train_s']:.2f}", f"{v['trained_tokens']:,.0f}"]
         for name, v in twice.items() if v],
    )  # fmt: skip
    lines = [
        f"{TEST_PROMPTS} test prompts in the last evaluation, {runs[0].summary['device']}, commit {commit()}.",
        "", text, "",
        "The same first steps of `grpo+rpo` with every prefix computed once per group and once per answer:", "",
        *prefixes,
    ]  # fmt: skip
    (results / "rpo.md").write_text("\n".join(lines) + "\n")
    record = {"commit": commit(), "versions": runs[0].summary["versions"], "device": runs[0].summary["device"],
              "variants": found, "repeated_prefixes": twice}  # fmt: skip
    (results / "rpo.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(by_variant, results / "rpo.png")
    Console().print(text, soft_wrap=True)
