"""Tables and picture of ``python -m bench.studies ground``."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

from bench._markdown import table_lines
from python_trainer.files import write_text

Record = Mapping[str, Any]
PLAIN = "plain"
DYNAMIC_SAMPLING = "dynamic sampling"


def write(records: Sequence[Record], folder: Path) -> None:
    """ground.md and ground.png, of the runs that are recorded."""
    lines = ["# Training without history on tasks of mixed difficulty", "",
             "By `python -m bench.studies ground`; records in ground.jsonl. CPU seconds of one thread, without",
             "evaluations. *Without spread*: share of groups whose answers are all right or all wrong."]  # fmt: skip
    for task in sorted({row["task"] for row in records}):
        mine = [row for row in records if row["task"] == task]
        lines += ["", f"## {task}", "", machines(mine)]
        for part, title in (("rivals", "Rivals"), ("longer", "Twice the answers"), ("tune", "Tuning of plain GRPO")):
            runs = [row for row in mine if row["part"] == part]
            if runs:
                lines += ["", f"### {title}", "", *run_lines(runs, plain_accuracy(mine))]
    write_text(folder / "ground.md", "\n".join(lines) + "\n")
    if rivals := [row for row in records if row["part"] == "rivals"]:
        draw(rivals, folder / "ground.png")


def machines(records: Sequence[Record]) -> str:
    """What the runs were made with, a sentence."""
    found = {f"{row['cpu']}, torch {row['torch']}, commit {row['commit']}" for row in records}
    return "; ".join(sorted(found)) + "."


def plain_accuracy(records: Sequence[Record]) -> float | None:
    """What plain training ends at."""
    ends = [row["final"] for row in records if row["part"] == "rivals" and row["name"] == PLAIN]
    return fmean(ends) if ends else None


def run_lines(runs: Sequence[Record], target: float | None) -> list[str]:
    """A row for each setting, over its seeds."""
    head = ["", "seeds", "steps", "CPU s", "tokens", "accuracy before", "after", "without spread, first tenth", "mean"]
    judged = any("pass@8" in row for row in runs)
    head += ["pass@8"] if judged else []
    head += [] if target is None else [f"CPU s to {target:.3f}"]
    rows = []
    for name in dict.fromkeys(row["name"] for row in runs):
        group = [row for row in runs if row["name"] == name]
        first = [fmean(row["without_spread"][: max(1, row["steps"] // 10)]) for row in group]
        cells = [name, len(group), f"{fmean(row['steps'] for row in group):.0f}",
                 f"{fmean(row['cpu_s'] for row in group):.0f}",
                 f"{fmean(row['generated_tokens'] for row in group):,.0f}",
                 f"{fmean(row['start'] for row in group):.3f}", f"{fmean(row['final'] for row in group):.3f}",
                 f"{fmean(first):.2f}", f"{fmean(fmean(row['without_spread']) for row in group):.2f}"]  # fmt: skip
        if judged:
            cells.append(pass_words(group))
        if target is not None:
            reached = [seconds for row in group if (seconds := first_time(row, target)) is not None]
            cells.append(f"{fmean(reached):.0f}" if len(reached) == len(group) else f"{len(reached)} of {len(group)}")
        rows.append(cells)
    return table_lines(head, rows)


def pass_words(runs: Sequence[Record]) -> str:
    """Mean pass@8, and of how many runs where not of all: it came later than the first records."""
    passed = [row["pass@8"] for row in runs if "pass@8" in row]
    if not passed:
        return "-"
    return f"{fmean(passed):.3f}" + ("" if len(passed) == len(runs) else f" ({len(passed)})")


def first_time(row: Record, accuracy: float, column: int = 1) -> float | None:
    """When two evaluations after another are that high: the seconds (1) or tokens (2) at the first of them."""
    for first, second in pairwise(row["curve"]):
        if min(first[-1], second[-1]) >= accuracy:
            return first[column]
    return None


def draw(records: Sequence[Record], path: Path, column: int = 1, words: str = "CPU seconds") -> None:
    """A row of pictures a task: accuracy over a column of the curves, and the groups without a spread by step.

    Of several seeds each has a faint line, and their mean, as far as all of them go, a thick one.
    """
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    tasks, names = (list(dict.fromkeys(row[key] for row in records)) for key in ("task", "name"))
    figure, grid = pyplot.subplots(len(tasks), 2, figsize=(11, 3.4 * len(tasks)), layout="constrained", squeeze=False)
    drawn, colors = {}, pyplot.get_cmap("tab20")(range(20))  # light ones at odd places
    for task, name in product(tasks, names):
        (left, right), number = grid[tasks.index(task)], names.index(name)
        rows = [row for row in records if (row["task"], row["name"]) == (task, name)]
        curves = [np.array([(point[column], point[-1]) for point in row["curve"]]).T for row in rows]
        color = colors[2 * number % 20 + number // 10]
        width, alpha = (1.6, 0.9) if len(rows) == 1 else (0.6, 0.3)
        for curve in curves:
            (drawn[name],) = left.plot(*curve, color=color, linewidth=width, alpha=alpha)
        if rows:
            steps = min(row["steps"] for row in rows)
            stride = max(1, steps // 12)
            wasted = np.mean([row["without_spread"][:steps] for row in rows], 0)
            starts = range(0, steps, stride)
            right.plot(starts, [wasted[i : i + stride].mean() for i in starts], color=color, linewidth=1.6)
        if len(rows) > 1:
            places = np.linspace(0, min(curve[0, -1] for curve in curves), 50)
            mean = np.mean([np.interp(places, *curve) for curve in curves], 0)
            (drawn[name],) = left.plot(places, mean, color=color, linewidth=3)
    for task, (left, right) in zip(tasks, grid):
        left.set(title=task, xlabel=words, ylabel="accuracy, unseen prompts")
        right.set(title=task, xlabel="step", ylabel="groups without a spread", ylim=(0, 1))
        for axes in (left, right):
            axes.grid(alpha=0.3)
    look = {"ncols": 3, "frameon": False, "fontsize": "medium" if len(drawn) < 9 else "x-small"}
    figure.legend(drawn.values(), drawn.keys(), loc="outside upper center", **look)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
