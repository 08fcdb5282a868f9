"""The curve that a report begins with: accuracy on the test prompts, zoomed to the data, with intervals."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from python_trainer.config import settings_used
from python_trainer.report.runs import Run, by_variant
from python_trainer.run_directory import load_evaluations, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#3b82f6", "#e8731a", "#16a37a", "#d6409f", "#8b5cf6", "#a3860b", "#0ea5b7", "#ef4444")  # light and dark
STEP, SECONDS, TOKENS = "step", "time/training_s", "total/generated_tokens"
AXES = {SECONDS: "training time without evaluations (s)", TOKENS: "generated tokens", STEP: "step"}


def colours_of(runs: Sequence[Run]) -> dict[str, str]:
    """Variant -> its colour in all pictures."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(by_variant(runs))}


def width_of(number: int, count: int) -> float:
    """Of the line of a variant: earlier ones are wider, so that they show behind one that coincides."""
    return 1.5 + 1.2 * min(count - 1 - number, 3)


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of ``count`` independent trials (Wilson 1927)."""
    z = 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def points_of(run: Run) -> Iterator[tuple[dict[str, Any], int | None]]:
    """(row of metrics, number of test prompts where it is known) of every evaluation."""
    sizes = {name: len(values) for name, values in load_evaluations(run.folder).items()}
    limit = settings_used(run.folder).get("evaluation.eval_limit_during", "null")
    between = min([*sizes.values(), *([int(limit)] if limit != "null" else [])]) if sizes else None
    rows = [row for row in read_metrics(run.folder) if row.get("eval/accuracy") is not None]
    for row in rows:
        last = row is rows[-1] and run.ended
        yield row, sizes.get("start" if not row["step"] else "final" if last else "", between)


def paint_accuracy(axes: "Axes", runs: Sequence[Run], x: str, target: float | None) -> None:
    """A line for each run, a band for what the number of test prompts leaves open, final values in the legend."""
    variants, colours = by_variant(runs), colours_of(runs)
    for number, (name, mine) in enumerate(variants.items()):
        label: str | None = f"{name}{final_of(mine)}"
        for run in mine:
            points = [(row[x], row["eval/accuracy"], count) for row, count in points_of(run) if x in row]
            if not points:
                continue
            at, accuracy, counts = zip(*points)
            look: dict[str, Any] = {"color": colours[name], "zorder": 2 + number / len(variants)}
            axes.plot(at, accuracy, marker=".", linewidth=width_of(number, len(variants)), label=label, **look)
            label = None
            if all(counts):
                low, high = zip(*map(wilson, accuracy, counts))
                axes.fill_between(at, low, high, color=colours[name], alpha=0.12, linewidth=0)
    if target is not None:
        axes.axhline(target, color="0.5", linewidth=1, linestyle="--", label=f"target {target:g}")
    axes.set(xlabel=AXES[x], ylabel="accuracy on test prompts")
    axes.locator_params("x", nbins=5)
    axes.grid(alpha=0.3)


def final_of(runs: Sequence[Run]) -> str:
    """``: 84.0 % (75.6 to 89.9)``, the mean over seeds; the interval is about other prompts."""
    finals = [x for run in runs if (x := run.summary.get("eval_accuracy_final")) is not None]
    counts = [len(load_evaluations(run.folder).get("final", ())) for run in runs]
    if len(finals) < len(runs):
        return ""
    if not all(counts):
        return f": {fmean(finals):.1%}"
    low, high = wilson(fmean(finals), min(counts))  # all seeds answer the same prompts
    return f": {fmean(finals):.1%} ({100 * low:.1f} to {100 * high:.1f})"
