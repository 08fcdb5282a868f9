"""Tables and picture of ``python -m bench.studies together``."""

import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
import torch

from bench._markdown import table_lines
from bench._runner import commit, cpu_model
from bench.studies import PAPERS
from bench.studies.rpo import reached
from python_trainer.accelerators import ACCELERATORS
from python_trainer.files import write_text
from python_trainer.report.intervals import Interval, difference_of_runs
from python_trainer.report.runs import BASELINE, Run, find_runs
from python_trainer.report.tables import accelerator_facts, mean, seconds_per_step
from python_trainer.report.write import draw
from python_trainer.run_directory import load_evaluations, read_metrics

TARGETS = {"short": (0.85, 0.92), "long": (0.6, 0.65)}
TITLES = {"short": "Short sums", "long": "Long sums"}
Group = dict[str, Run]  # seed folder -> run


def grouped(folder: Path) -> dict[str, Group]:
    """Variant -> its finished runs by seed; plain training first, then one accelerator, several, all."""
    found: dict[str, Group] = {}
    for run in find_runs([folder]):
        found.setdefault(run.name, {})[run.folder.name] = run

    def rank(name: str) -> tuple[int, int]:
        main = name.partition("-")[0]
        first = [BASELINE, *ACCELERATORS.names(), "all"]
        return (first.index(main) if main in first else len(first), len(name))

    return {name: found[name] for name in sorted(found, key=rank)}


def answers(run: Run) -> numpy.ndarray:
    """1 for every test prompt that the trained policy answered right."""
    return load_evaluations(run.folder)["final"].astype(float)


def summaries(group: Group) -> list[dict[str, Any]]:
    return [run.summary for run in group.values()]


def times(ours: float | None, plain: float | None) -> str:
    return "-" if ours is None or plain is None else f"{plain / ours:.2f}x"


def same_seeds(groups: dict[str, Group], names: Sequence[str]) -> list[Group]:
    """These variants, cut down to the seeds that all of them have."""
    seeds = set.intersection(*(set(groups[name]) for name in names))
    return [{seed: run for seed, run in groups[name].items() if seed in seeds} for name in names]


def outcome_lines(groups: dict[str, Group], targets: Sequence[float]) -> list[str]:
    """What each variant was worth; ratios are to the plain runs of the same seeds."""
    head = ["", "seeds", "s per step", "steps per s"]
    head += [f"{what} to {target}" for target in targets for what in ("s", "speed", "tokens")]
    head += ["accuracy at the end", "minus plain, 95 %"]
    metrics = {run.folder: read_metrics(run.folder) for group in groups.values() for run in group.values()}

    def to_target(group: Group, target: float, key: str) -> list[float | None]:
        """Of every seed; None where it did not get there."""
        return [reached(metrics[run.folder], target, key) for run in group.values()]

    rows = []
    for name in groups:
        group, plain = same_seeds(groups, [name, BASELINE])
        spent, plain_spent = seconds_per_step(summaries(group)), seconds_per_step(summaries(plain))
        row = [f"**{name}**", len(group), f"{spent:.2f}", times(spent, plain_spent)]
        for target in targets:
            each = to_target(group, target, "time/training_s")
            seconds, tokens = mean(each), mean(to_target(group, target, "total/generated_tokens"))
            count = sum(value is not None for value in each)
            row += [f"{count} of {len(group)} seeds" if seconds is None else f"{seconds:.1f}",
                    times(seconds, mean(to_target(plain, target, "time/training_s"))),
                    "-" if tokens is None else f"{tokens:,.0f}"]  # fmt: skip
        change = "" if name == BASELINE else str(contrast([group], [plain]))
        row += [f"{fmean(float(answers(run).mean()) for run in group.values()):.4f}", change]
        rows.append(row)
    return table_lines(head, rows)


def gain(group: Group, plain: Group) -> float:
    """Accuracy minus that of plain runs with the same seeds."""
    return float(numpy.mean([answers(run) - answers(plain[seed]) for seed, run in group.items()]))


def contrast(plus: Sequence[Group], minus: Sequence[Group]) -> Interval:
    """Sum of accuracies of some variants minus that of others, all of them with the same seeds."""
    after, before = (
        [sum(answers(group[seed]) for group in side) for seed in sorted(side[0])] for side in (plus, minus)
    )
    return difference_of_runs(after, before)


def time_lines(groups: dict[str, Group]) -> list[str]:
    """Where the seconds went, and what the accelerators did."""
    kinds = [ACCELERATORS.resolve(name) for name in PAPERS]
    did = {name: accelerator_facts(list(group.values()), kinds) for name, group in groups.items()}
    head = ["", "generation", "training", *PAPERS, "else", *did[BASELINE]]
    rows = []
    for name, group in groups.items():
        found = summaries(group)
        spent = fmean(s["training_s"] for s in found)
        parts = [fmean(s[f"{part}_s"] for s in found) for part in ("rollout", "train")]
        parts += [fmean(s["accelerator_s"].get(kind, 0.0) for s in found) for kind in PAPERS]
        parts.append(spent - sum(parts))
        counts = [count or 0.0 for count in did[name].values()]
        rows.append([f"**{name}**", *(f"{100 * part / spent:.0f} %" for part in parts),
                     *(f"{count:,.1f}" if 0 < count < 10 else f"{count:,.0f}" for count in counts)])  # fmt: skip
    return table_lines(head, rows)


def pair_lines(groups: dict[str, Group]) -> list[str]:
    """What two accelerators do to each other: the pair, against what each of them alone would add up to."""
    head = ["pair", "seeds", "steps per s of each", "product", "together", "accuracy of each, minus plain", "sum",
            "together, minus plain", "together minus sum, 95 %"]  # fmt: skip
    rows = []
    for name in groups:
        pair = name.split("+")
        if len(pair) != 2 or any(one not in groups for one in pair):
            continue
        group, plain, *parts = same_seeds(groups, [name, BASELINE, *pair])
        seconds, plain_seconds, *own = (seconds_per_step(summaries(one)) for one in (group, plain, *parts))
        speeds = [plain_seconds / part for part in own]
        gains = [gain(part, plain) for part in parts]
        rows.append([
            f"**{name}**", len(group), " and ".join(f"{speed:.2f}x" for speed in speeds),
            f"{speeds[0] * speeds[1]:.2f}x",
            times(seconds, plain_seconds), " and ".join(f"{one:+.4f}" for one in gains),
            f"{sum(gains):+.4f}", f"{gain(group, plain):+.4f}", str(contrast([group, plain], parts)),
        ])  # fmt: skip
    return table_lines(head, rows)


def write(output_dir: Path, results: Path) -> None:
    """Writes ``together.md`` and a picture of each task, and prints the tables."""
    lines = [
        f"CPU seconds. {cpu_model()}, {torch.get_num_threads()} thread, torch {torch.__version__}, Python "
        f"{platform.python_version()}, commit {commit()}. Means over seeds; to a target on a straight line between "
        "evaluations; intervals over test prompts and seeds, paired."
    ]
    results.mkdir(parents=True, exist_ok=True)
    for name, targets in TARGETS.items():
        if not any((output_dir / name).rglob("summary.json")):
            continue
        groups = grouped(output_dir / name)
        if BASELINE not in groups:
            continue
        lines += ["", f"## {TITLES[name]}", "", *outcome_lines(groups, targets), "", *time_lines(groups)]
        if any("+" in variant for variant in groups):
            lines += ["", f"## {TITLES[name]}, pairs", "", *pair_lines(groups)]
        main = [variant for variant in groups if "+" not in variant and "-" not in variant]
        draw([run for variant in main for run in groups[variant].values()], results / f"together_{name}.png")
    text = "\n".join(lines)
    print(text)
    write_text(results / "together.md", text + "\n")
