"""The report of runs, finished or not: a verdict on each variant, and the summary table.

They are written to the terminal and to an HTML page without network or script, beside the picture accuracy.png.
"""

import base64
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy
from jinja2 import Environment, FileSystemLoader
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from python_trainer.accelerators import ACCELERATORS
from python_trainer.config import settings_used
from python_trainer.data import is_right
from python_trainer.errors import UserError
from python_trainer.run.directory import (
    ENDS,
    Count,
    first_problem,
    on_all_prompts,
    read_evaluations,
    read_metrics,
    read_samples,
    read_text,
    write_text,
)
from rlkernels._files import replace_file
from rlkernels._text import escape_controls

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "baseline"
COLOURS = ("#3b82f6", "#e8731a", "#16a37a", "#d6409f", "#8b5cf6", "#a3860b", "#0ea5b7", "#ef4444")
AXES = {"time/training_s": "training time without evaluations (s)", "total/generated_tokens": "generated tokens"}
# figures of a run, to which the cost of the earlier runs that it learned from is added
CHARGED = {"training_s": "seconds", "seconds_to_target": "seconds", "time/training_s": "seconds",
           "generated_tokens": "tokens", "tokens_to_target": "tokens", "total/generated_tokens": "tokens"}  # fmt: skip
LINE_CHARACTERS = 200  # of a prompt or an answer on the terminal
SHOWN_STEPS = 8  # of a run, with sample answers


def report(folders: Sequence[Path], console: Console | None = None) -> None:
    """Print the table of all runs; write report.html and accuracy.png there, or beside the first of several."""
    console = console or Console()
    runs = find_runs(folders)
    rows = summary_rows(runs)
    table = Table("", *(Column(Text(escape_controls(name, keep="")), justify="right") for name in by_variant(runs)))
    for row in rows:
        table.add_row(*(Text(escape_controls(cell, keep="")) for cell in row))
    console.print(table)
    home = folders[0] if len(folders) == 1 else folders[0].absolute().parent
    picture, page = home / "accuracy.png", home / "report.html"
    png = BytesIO()
    draw_curves(runs).savefig(png, dpi=130)
    replace_file(picture, png.getvalue())
    write_text(page, render_page(runs, rows, png.getvalue()))
    lines = [*answer_lines(runs), *(f"note: {text}" for text in caveats(runs)), *verdicts(runs)]
    for line in [*lines, f"picture: {picture}", f"page: {page}"]:
        console.print(escape_controls(line, keep=""), highlight=False, markup=False, soft_wrap=True)


@dataclass
class Run:
    """A run; ``name`` groups the seeds of a variant. The summary of an unfinished run covers its steps so far.

    ``earlier`` is the cost, in ``seconds`` and ``tokens``, of the earlier runs that this one learned from.
    """

    name: str
    folder: Path
    summary: dict[str, Any]
    counters: dict[str, float]  # sums of the counters of all accelerators over its steps, by the words of their rows
    earlier: dict[str, float]
    ended: bool = True

    def charge(self, figure: str) -> float:
        """Return what the earlier runs add to a figure of this one."""
        return self.earlier.get(CHARGED.get(figure, ""), 0.0)

    def final_answers(self) -> list[float] | None:
        """Return the share of right answers to each test prompt after training; None before."""
        return read_evaluations(self.folder, self.summary["steps"]).get("final")

    @property
    def label(self) -> str:
        """Return variant and seed, or the folder."""
        return self.name if self.name.endswith(self.folder.name) else f"{self.name} {self.folder.name}"


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Return every run in these folders or below them, in the order of their paths."""
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(f"there is no folder {missing[0]}")
    paths = [path for folder in folders for path in sorted(folder.rglob("metrics.jsonl"))]
    homes = list(dict.fromkeys(path.parent.absolute() for path in paths))  # absolute: "." has no name
    variants = [home.parent if home.name.startswith("seed-") else home for home in homes]
    counts = Counter((variant.name, home.name) for variant, home in zip(variants, homes))
    repeated = {name for (name, _), count in counts.items() if count > 1}  # x/run and y/run are not of one variant
    runs = []
    for variant, home in zip(variants, homes):
        name = variant.name
        if name in repeated:
            name = str(variant.relative_to(os.path.commonpath([folder.parent for folder in variants])))
        if not (rows := read_metrics(home)):
            continue
        summary, ended = summary_of(home, rows)
        # the texts of plug-ins are in the run's summary: a report imports nothing that a run names
        texts = registered_counters() | summary["counters"]
        counters = {text: sum(row.get(metric) or 0.0 for row in rows) for metric, text in texts.items()}
        runs.append(Run(name, home, summary, counters, earlier_cost(rows), ended))
    if not runs:
        raise UserError(f"no run (metrics.jsonl) in {', '.join(map(str, folders))}")
    return runs


def earlier_cost(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds and tokens of earlier runs that accelerators have counted."""
    return {
        unit: sum(value or 0.0 for row in rows for name, value in row.items() if name.endswith(f"/earlier_{unit}"))
        for unit in ("seconds", "tokens")
    }


def summary_of(folder: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return the summary of a run, from its rows until summary.json is written; and whether the run has ended."""
    last = rows[-1]
    settings = settings_used(folder)
    written = read_summary(folder / "summary.json")
    ended = bool(written) and written["steps"] >= last["step"]

    def total(metric: str) -> float:
        return sum(row.get(metric) or 0.0 for row in rows)

    # all on the same prompts: only the final evaluation of a finished run answers more
    start, *later = [row for row in rows if row.get("eval/accuracy") is not None] or [{}]
    final = later[-1] if later else {}
    names = json.loads(settings.get("accelerators.enabled", "[]"))
    names = map(str, names) if isinstance(names, list) else ()
    target = json.loads(settings.get("evaluation.target_accuracy", "null"))
    return {
        "steps": last["step"],
        **{f"{clock}_s": last.get(f"time/{clock}_s") or 0.0 for clock in ("wall", "training")},
        **{f"{part}_s": total(f"time/{part}_s") for part in ("rollout", "train")},
        "accelerator_s": {name: total(f"time/accelerator/{name}_s") for name in names},
        **{f"{kind}_tokens": total(f"tokens/{kind}") for kind in ("generated", "prefill", "cached", "trained")},
        **{f"eval_accuracy_{part}": row.get("eval/accuracy") for part, row in (("start", start), ("final", final))},
        "evaluation": {"final": {name: value for name, value in final.items() if name.startswith("eval/")}},
        "seconds_to_target": None, "tokens_to_target": None,
        "target_accuracy": target if isinstance(target, float | int) else None,
        "device": "-", "versions": {}, "counters": {},
        **(written if ended else {}),  # older runs may have written less
    }, ended  # fmt: skip


class Summary(BaseModel):
    """The part of summary.json that a report reads; older runs may have written less."""

    model_config = ConfigDict(extra="allow", strict=True)
    steps: Count
    wall_s: float = 0.0
    training_s: float = 0.0
    rollout_s: float = 0.0
    train_s: float = 0.0
    accelerator_s: dict[str, float] = {}
    generated_tokens: float = 0.0
    prefill_tokens: float = 0.0
    cached_tokens: float = 0.0
    trained_tokens: float = 0.0
    eval_accuracy_start: float | None = None
    eval_accuracy_final: float | None = None
    evaluation: dict[str, dict[str, float | None]] = {}
    seconds_to_target: float | None = None
    tokens_to_target: float | None = None
    target_accuracy: float | None = None
    device: str = "-"
    versions: dict[str, str] = {}
    counters: dict[str, str] = {}


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary that a run wrote at its end; empty without one. UserError if a report cannot use it."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        values = json.loads(text)
        Summary.model_validate(values)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({first_problem(error)})") from error
    return values


def registered_counters() -> dict[str, str]:
    """Return the text of each metric's row, for the shipped accelerators."""
    return {metric: text for kind in ACCELERATORS.registered() for metric, text in kind.counters.items()}


def by_variant(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs of each variant: the baseline first, others in their order."""
    variants: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.name != BASELINE):
        variants.setdefault(run.name, []).append(run)
    return variants


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def difference_of_runs(after: Sequence[Any], before: Sequence[Any]) -> Interval:
    """Return the mean of ``after - before`` over pairs of runs, with a bootstrap interval.

    Every resample draws prompts, the same for all runs, and pairs of runs, each with replacement. So the interval
    covers other prompts and other seeds. Three pairs show little of the spread between seeds: it is then too narrow.

    Args:
        after, before: for each pair of runs the values of the same prompts, each [N].
    """
    pairs = [(numpy.asarray(a, dtype=numpy.float64), numpy.asarray(b)) for a, b in zip(after, before, strict=True)]
    lengths = {len(values) for pair in pairs for values in pair}
    if len(lengths) != 1 or not lengths.pop():
        raise ValueError("runs must answer the same prompts, at least one, to be compared")
    values = numpy.stack([a - b for a, b in pairs], 1)  # [N, runs]
    distinct, counts = numpy.unique(values, axis=0, return_counts=True)  # equal rows are drawn at once
    generator = numpy.random.default_rng(0)
    means = generator.multinomial(len(values), counts / len(values), size=10_000) @ distinct / len(values)
    runs = values.shape[1]
    weights = generator.multinomial(runs, [1 / runs] * runs, size=len(means)) / runs
    low, high = numpy.quantile((means * weights).sum(1), [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


def mean_of(runs: Sequence[Run], key: str) -> float | None:
    """Return the mean over seeds, with the cost of earlier runs; None if a seed has no value."""
    values: list[Any] = [run.summary[key] for run in runs]
    return None if None in values else fmean(value + run.charge(key) for value, run in zip(values, runs))


def show(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def pair_seeds(runs: Sequence[Run], plain: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Return the runs and plain runs of the seeds that both have, in one order; none without such seeds."""
    plain_of = {run.folder.name: run for run in plain}
    paired = [run for run in runs if run.folder.name in plain_of]
    return paired, [plain_of[run.folder.name] for run in paired]


def comparable(runs: Sequence[Run], plain: Sequence[Run]) -> tuple[Sequence[Run], Sequence[Run]]:
    """Return the runs and plain runs of the seeds that both have; all of them, if they share none."""
    same_seeds, plain_of_them = pair_seeds(runs, plain)
    return (same_seeds, plain_of_them) if same_seeds else (runs, plain)


def compare_accuracy(runs: Sequence[Run], plain: Sequence[Run]) -> Interval | None:
    """Return final accuracy minus that of the plain runs of the same seeds; None if they cannot be paired."""
    answers = [(run.final_answers(), baseline.final_answers()) for run, baseline in zip(*pair_seeds(runs, plain))]
    pairs = [(after, before) for after, before in answers if after is not None and before is not None]
    if not pairs or len({len(values) for pair in pairs for values in pair}) != 1:
        return None
    return difference_of_runs(*zip(*pairs))


def verdicts(runs: Sequence[Run]) -> list[str]:
    """Return a sentence on each variant against the baseline; without a baseline, on each variant by itself."""
    variants = by_variant(runs)
    if BASELINE not in variants or len(variants) == 1:
        return [describe_variant(name, seeds) for name, seeds in variants.items()]
    plain = variants[BASELINE]
    return [describe_against(name, seeds, plain) for name, seeds in variants.items() if name != BASELINE]


def describe_variant(name: str, runs: Sequence[Run]) -> str:
    """Return ``run: accuracy 54.0 % -> 84.0 % in 12 steps, 110 s, 98,304 generated tokens``.

    Rewards take the place of an accuracy that stays 0, as it does where no answer is right or wrong.
    """
    start, final = (mean_of(runs, f"eval_accuracy_{end}") for end in ENDS)
    gain = "no evaluation" if start is None else f"accuracy {start:.1%} -> {show(final, '{:.1%}')}"
    # None: the run has not ended, or wrote less
    rewards = [[on_all_prompts(run.summary["evaluation"].get(end, {}), "reward") for run in runs] for end in ENDS]
    if start == final == 0 and None not in chain(*rewards):
        start, final = map(fmean, rewards)
        gain = f"reward {start:.3f} -> {final:.3f}"
    steps, seconds, tokens = (mean_of(runs, key) or 0.0 for key in ("steps", "training_s", "generated_tokens"))
    seeds = f", means of {len(runs)} seeds" if len(runs) > 1 else ""
    return f"{name}: {gain} in {steps:.0f} steps, {seconds:,.0f} s, {tokens:,.0f} generated tokens{seeds}"


def describe_against(name: str, runs: Sequence[Run], plain: Sequence[Run]) -> str:
    """Return ``rhyme: 45 % fewer generated tokens, 30 % less time, accuracy 1.3 points lower (95 %: -2.2 to -0.4)``."""

    def change(key: str, fewer: str, unit: str) -> str:
        value, baseline = (mean_of(each, key) for each in comparable(runs, plain))
        if not value or not baseline:
            return f"{unit} unknown"
        share = value / baseline - 1
        return f"{abs(share):.0%} {fewer if share < 0 else 'more'} {unit}"

    difference = compare_accuracy(runs, plain)
    if difference is None:
        accuracy = "accuracy not comparable (no evaluations of the same prompts and seeds)"
    else:
        span = f"95 %: {100 * difference.low:+.1f} to {100 * difference.high:+.1f} points"
        direction = "lower" if difference.value < 0 else "higher"
        significant = not difference.low <= 0 <= difference.high
        points = f"{abs(100 * difference.value):.1f} points {direction}" if significant else "not told apart"
        accuracy = f"accuracy {points} ({span})"
    tokens = change("generated_tokens", "fewer", "generated tokens")
    seconds = change("training_s", "less", "time")
    return f"{name}: {tokens}, {seconds}, {accuracy}"


def caveats(runs: Sequence[Run]) -> list[str]:
    """Return the reasons why numbers are not comparable, or not final."""
    lines = [f"{run.label} has not ended: the report covers its {run.summary['steps']} steps so far" for run in runs
             if not run.ended]  # fmt: skip
    for run in runs:
        if run.earlier["tokens"]:
            tokens, seconds = (show(run.earlier[unit] or None, "{:,.0f}") for unit in ("tokens", "seconds"))
            lines.append(
                f"{run.label} learned from earlier runs: their {tokens} tokens and {seconds} s count as its own"
            )
    variants = by_variant(runs)
    steps = {name: fmean(run.summary["steps"] for run in its_runs) for name, its_runs in variants.items()}
    if len(steps) > 1 and max(steps.values()) > 1.02 * min(steps.values()):
        counts = ", ".join(f"{name} {count:.0f}" for name, count in steps.items())
        lines.append(f"the variants made different numbers of steps ({counts}): compare the curves, not the ends")
    seeds = {name: {run.folder.name for run in its_runs} for name, its_runs in variants.items()}
    plain = seeds.get(BASELINE, set())
    if others := [name for name in seeds if seeds[name] & plain and seeds[name] != plain]:
        lines.append(
            f"{', '.join(others)} and {BASELINE} have other seeds: comparisons are of seeds that both have, columns "
            "are means over all seeds of a variant"
        )
    return lines


def table_rows(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Return rows (name, value per column); "-" where a column has none."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, "-") for column in columns)) for name in names]


def summary_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return rows (name, mean over the seeds of each variant), as text, without rows of nothing but 0 and -."""
    variants = by_variant(runs)
    rows = table_rows([summary_column(seeds, variants.get(BASELINE)) for seeds in variants.values()])
    return [row for row in rows if not {*row[1:]} <= {"-", "0", "0 %"}]


def summary_column(runs: Sequence[Run], plain: Sequence[Run] | None) -> dict[str, str]:
    """Return the mean over the seeds of one variant, as text, by row."""
    total = fmean(run.summary["training_s"] for run in runs)  # without earlier runs
    seconds_of = {
        "generation": mean_of(runs, "rollout_s"),
        "training": mean_of(runs, "train_s"),
        "accelerators": fmean(sum(run.summary["accelerator_s"].values()) for run in runs),
    }
    change = None if plain is None or plain is runs else compare_accuracy(runs, plain)
    to_target = mean_of(runs, "seconds_to_target")
    speed = None
    if plain:
        seconds, baseline_seconds = (mean_of(each, "seconds_to_target") for each in comparable(runs, plain))
        speed = baseline_seconds / seconds if baseline_seconds and seconds else None
    column = {
        "seeds": str(len(runs)),
        "accuracy before": show(mean_of(runs, "eval_accuracy_start")),
        "accuracy after": show(mean_of(runs, "eval_accuracy_final")),
        "accuracy minus baseline": (
            "-" if change is None else f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
        ),
    }
    finals = [run.summary.get("evaluation", {}).get("final", {}) for run in runs]
    for name in finals[0]:
        metric = name.removeprefix("eval/")
        if metric != "accuracy" and not name.startswith("eval_all/") and all(name in final for final in finals):
            column[f"{metric} after"] = show(fmean(final.get(f"eval_all/{metric}", final[name]) for final in finals))
    column |= {
        "steps": show(mean_of(runs, "steps"), "{:.0f}"),
        "seconds, all": show(mean_of(runs, "wall_s"), "{:.1f}"),
        "seconds without evaluation": show(mean_of(runs, "training_s"), "{:.1f}"),
        "seconds to target": show(to_target, "{:.1f}"),
        "tokens to target": show(mean_of(runs, "tokens_to_target"), "{:,.0f}"),
        "speed to target, times baseline": show(speed, "{:.2f}"),
    }
    for kind in ("generated", "prefill", "cached", "trained"):
        column[f"{kind} tokens"] = show(mean_of(runs, f"{kind}_tokens"), "{:,.0f}")
    for name, seconds in seconds_of.items():
        share = 100 * (seconds or 0.0) / total if total else None
        column[f"share of {name}"] = show(share, "{:.0f} %")
    for text in dict.fromkeys(text for run in runs for text in run.counters):
        column[text] = show(fmean(run.counters.get(text, 0.0) for run in runs), "{:,.0f}")
    return column


def draw_curves(runs: Sequence[Run]) -> "Figure":
    """Draw accuracy over seconds and over tokens: a colour per variant, a line per seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    target = next((run.summary["target_accuracy"] for run in runs if run.summary["target_accuracy"]), None)
    for axes, (x, words) in zip(panels, AXES.items()):
        for colour, (name, seeds) in zip(COLOURS * len(runs), by_variant(runs).items()):
            charged = ", after an earlier run" if any(run.earlier["tokens"] for run in seeds) else ""
            text = re.sub("^_", " _", escape_controls(name, keep="")).replace("$", r"\$")  # no formula
            label: str | None = text + charged
            for run in seeds:
                rows = [row for row in read_metrics(run.folder) if None not in (row.get(x), row.get("eval/accuracy"))]
                if rows:
                    points = [row[x] + run.charge(x) for row in rows], [row["eval/accuracy"] for row in rows]
                    axes.plot(*points, marker=".", color=colour, label=label)
                    label = None
        if target is not None:
            axes.axhline(target, color="0.5", linewidth=1, linestyle="--", label=f"target {target:g}")
        axes.set_xlabel(words)
        axes.locator_params("x", nbins=5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy on test prompts")
    if panels[0].get_legend_handles_labels()[0]:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def samples_of(run: Run) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return (step, answers) of up to SHOWN_STEPS steps, evenly spread, the last among them."""
    steps = sorted(read_samples(run.folder).items())
    places = numpy.linspace(0, len(steps) - 1, min(len(steps), SHOWN_STEPS))
    return [steps[place] for place in places.round().astype(int)]


def answers_of(run: Run) -> list[tuple[str, str, str]]:
    """Return (prompt, answer before training, answer after) of test prompts; none before the last evaluation."""
    answers = read_evaluations(run.folder, run.summary["steps"], "samples")
    start, final = (answers.get(name, []) for name in ENDS)
    rows = []
    for first, last in zip(start, final):
        if first.get("prompt") == last.get("prompt"):
            rows.append((str(first.get("prompt")), str(first.get("answer")), str(last.get("answer"))))
    return rows


def answer_lines(runs: Sequence[Run]) -> list[str]:
    """Return the answers before and after training for the terminal; none of several runs, whose page has them."""
    lines = []
    for row in answers_of(runs[0]) if len(runs) == 1 else ():
        prompt, start, final = (shorten(text, LINE_CHARACTERS, placeholder=" ...") for text in row)
        lines += [f"prompt: {prompt}", f"  before: {start}", f"  after:  {final}"]
    return lines


def render_page(runs: Sequence[Run], summary: Sequence[Sequence[str]], picture: bytes) -> str:
    """Return the page: verdict, curves (``picture``, a PNG file), summary, sample answers, settings, versions."""
    variants = list(by_variant(runs))
    settings = table_rows([settings_used(run.folder) for run in runs])
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: escape_controls(value) if type(value) is str else value,  # not the markup of macros
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["right"] = is_right
    text = environment.get_template("report.html.jinja").render(
        title=", ".join(variants),
        runs=runs,
        variants=variants,
        verdicts=verdicts(runs),
        caveats=caveats(runs),
        picture=base64.b64encode(picture).decode(),
        summary=summary,
        differing=[row for row in settings if len({*row[1:]}) > 1],
        same=[row[:2] for row in settings if len({*row[1:]}) == 1],
        made=table_rows([{"device": run.summary["device"], **run.summary["versions"]} for run in runs]),
        steps=[(run, samples_of(run)) for run in runs],
        answers=[(run, rows) for run in runs if (rows := answers_of(run))],
    )
    return text.encode("utf-8", "replace").decode("utf-8")
