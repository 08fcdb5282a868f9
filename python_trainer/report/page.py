"""The report of runs: a table on the terminal, the picture accuracy.png, an HTML page without network or script."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader
from rich.console import Console

from python_trainer.config import settings_used
from python_trainer.report.runs import (
    Run,
    by_variant,
    caveats,
    escape_controls,
    find_runs,
    judge,
    make_table,
    summary_columns,
    verdicts,
)
from python_trainer.run_directory import read_metrics, read_samples, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#3b82f6", "#e8731a", "#16a37a", "#d6409f", "#8b5cf6", "#a3860b", "#0ea5b7", "#ef4444")
AXES = {"time/training_s": "training time without evaluations (s)", "total/generated_tokens": "generated tokens"}
SHOWN_STEPS = 8  # of a run, with sample answers


def report(folders: Sequence[Path], console: Console | None = None) -> None:
    """Prints the table of all runs in these folders; writes accuracy.png in the first and report.html in all."""
    console = console or Console()
    runs = find_runs(folders)
    columns = summary_columns(runs)
    console.print(make_table(columns))
    picture, pages = folders[0] / "accuracy.png", [folder / "report.html" for folder in dict.fromkeys(folders)]
    draw_curves(runs).savefig(picture, dpi=130)
    page = render_page(runs, columns, picture)
    for path in pages:
        write_text(path, page)
    lines = [*(f"note: {text}" for text in caveats(runs)), *verdicts(runs)]
    for line in [*lines, f"picture: {picture}", *(f"page: {path}" for path in pages)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def draw_curves(runs: Sequence[Run]) -> "Figure":
    """Draw accuracy over seconds and over tokens: a colour per variant, a line per seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    target = next((run.summary["target_accuracy"] for run in runs if run.summary["target_accuracy"]), None)
    for axes, (x, words) in zip(both, AXES.items()):
        for colour, (name, mine) in zip(COLOURS * len(runs), by_variant(runs).items()):
            label: str | None = re.sub("^_", " _", name).replace("$", r"\$")  # no formula; and a legend shows it
            for run in mine:
                rows = [row for row in read_metrics(run.folder) if x in row and row.get("eval/accuracy") is not None]
                if rows:
                    points = [row[x] for row in rows], [row["eval/accuracy"] for row in rows]
                    axes.plot(*points, marker=".", color=colour, label=label)
                    label = None
        if target is not None:
            axes.axhline(target, color="0.5", linewidth=1, linestyle="--", label=f"target {target:g}")
        axes.set_xlabel(words)
        axes.locator_params("x", nbins=5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    both[0].set_ylabel("accuracy on test prompts")
    if both[0].get_legend_handles_labels()[0]:
        figure.legend(*both[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def compare_rows(columns: Sequence[Mapping[str, str]]) -> tuple[list[tuple], list[tuple]]:
    """Return rows (name, value per column): those whose values differ, those that agree."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1], [row for row in rows if len(set(row[1:])) == 1]


def samples_of(run: Run) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return (step, answers) of up to SHOWN_STEPS steps, evenly spread, the last among them."""
    found = sorted(read_samples(run.folder).items())
    count = min(len(found), SHOWN_STEPS)
    return [found[round(i * (len(found) - 1) / max(count - 1, 1))] for i in range(count)] if count > 1 else found


def render_page(runs: Sequence[Run], columns: Mapping[str, Mapping[str, str]], picture: Path) -> str:
    """Return the page: verdict, curves, summary, sample answers, settings, versions."""
    differing, same = compare_rows([settings_used(run.folder) for run in runs])
    made = compare_rows([{"device": run.summary["device"], **run.summary["versions"]} for run in runs])
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"escape_controls": escape_controls, "judge": judge}
    text = environment.get_template("report.html.jinja").render(
        title=", ".join(columns),
        runs=runs,
        variants=list(columns),
        verdicts=verdicts(runs),
        caveats=caveats(runs),
        picture=base64.b64encode(picture.read_bytes()).decode(),
        summary=[(row, [column[row] for column in columns.values()]) for row in next(iter(columns.values()))],
        differing=differing,
        same=same,
        made=[*made[1], *made[0]],
        steps=[(run, samples_of(run)) for run in runs],
    )
    return text.encode("utf-8", "replace").decode("utf-8")
