"""Tables and pictures of finished runs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from python_trainer.errors import UserError
from python_trainer.evaluation import load_evaluations
from python_trainer.html_report import printable, write_page
from python_trainer.retrospective.picture import draw_history
from python_trainer.statistics import Interval, paired_difference
from python_trainer.telemetry import read_metrics, read_samples

BASELINE = "baseline"
TABLE_CHARACTERS = 400  # of a prompt or an answer on the terminal


@dataclass
class Run:
    """A finished run; ``name`` groups the seeds of one variant."""

    name: str
    folder: Path
    summary: dict[str, Any]
    curve: list[tuple[float, float]]  # (wall seconds without evaluations, accuracy)

    @property
    def label(self) -> str:
        """Variant and seed, or the folder."""
        return self.name if self.folder.name == self.name else f"{self.name} {self.folder.name}"


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Every finished run in these folders or below them, in the order of their paths.

    Raises:
        UserError: there is none.
    """
    runs = []
    for folder in folders:
        for path in sorted(folder.rglob("summary.json")) if folder.is_dir() else []:
            home = path.parent
            name = home.parent.name if home.name.startswith("seed-") else home.name
            rows = [row for row in read_metrics(home) if "eval/accuracy" in row]
            curve = [(row["time/training_s"], row["eval/accuracy"]) for row in rows]
            runs.append(Run(name, home, json.loads(path.read_text(encoding="utf-8")), curve))
    if not runs:
        raise UserError(f"no finished run (summary.json) in {', '.join(map(str, folders))}")
    return runs


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def show(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def facts(summaries: Sequence[dict[str, Any]], target: float | None) -> dict[str, str]:
    """What the table says about one variant: means over its seeds."""

    def column(name: str) -> float | None:
        return mean([summary[name] for summary in summaries])

    def share(seconds: float | None) -> str:
        return show(100 * (seconds or 0.0) / total if total else None, "{:.0f} %")

    total = column("training_s") or 0.0
    split = {"generation": column("rollout_s"), "training": column("train_s")}
    split["accelerators"] = mean([sum(summary["accelerator_s"].values()) for summary in summaries])
    split["everything else"] = max(total - sum(seconds or 0.0 for seconds in split.values()), 0.0)
    reached = {
        f"seconds to {target}": show(column("seconds_to_target"), "{:.1f}"),
        f"tokens generated to {target}": show(column("tokens_to_target"), "{:,.0f}"),
    }
    return {
        "seeds": str(len(summaries)),
        "accuracy before": show(column("eval_accuracy_start")),
        "accuracy after": show(column("eval_accuracy_final")),
        "steps": show(column("steps"), "{:.0f}"),
        "wall time, all (s)": show(column("wall_s"), "{:.1f}"),
        "wall time, without evaluation (s)": show(total, "{:.1f}"),
        "seconds per step": show(seconds_per_step(summaries)),
        **(reached if target else {}),
        "generated tokens": show(column("generated_tokens"), "{:,.0f}"),
        "prefilled tokens, computed": show(column("prefill_tokens"), "{:,.0f}"),
        "prefilled tokens, from cache": show(column("cached_tokens"), "{:,.0f}"),
        "trained tokens": show(column("trained_tokens"), "{:,.0f}"),
        **{
            f"share of {name}": show(100 * (s or 0.0) / total if total else None, "{:.0f} %")
            for name, s in split.items()
        },
    }


def seconds_per_step(summaries: Sequence[dict[str, Any]]) -> float:
    return fmean(summary["training_s"] / max(summary["steps"], 1) for summary in summaries)


def difference(runs: Sequence[Run], plain: Sequence[Run]) -> Interval | None:
    """Final accuracy minus that of the plain runs of the same seeds, paired by test prompt; None: not comparable."""
    before = {run.folder.name: load_evaluations(run.folder).get("final") for run in plain}
    pairs = [(load_evaluations(run.folder).get("final"), before.get(run.folder.name)) for run in runs]
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    if not known or len({len(values) for pair in known for values in pair}) != 1:
        return None
    after, plain_values = zip(*known)
    return paired_difference(after, plain_values)


def target_of(runs: Sequence[Run]) -> float | None:
    return next((run.summary["target_accuracy"] for run in runs if run.summary["target_accuracy"]), None)


def summary_columns(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Variant -> what the table says about it, by row; ratios compare with the plain run."""
    variants: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        variants.setdefault(run.name, []).append(run.summary)
    names = sorted(variants, key=lambda name: name != BASELINE)
    columns = {name: facts(variants[name], target_of(runs)) for name in names}
    if BASELINE in columns and len(columns) > 1:
        plain = variants[BASELINE]
        plain_target = mean([summary["seconds_to_target"] for summary in plain])
        for name, column in columns.items():
            speed = seconds_per_step(plain) / seconds_per_step(variants[name])
            change = None
            if name != BASELINE:
                change = difference(*([run for run in runs if run.name == kind] for kind in (name, BASELINE)))
            words = ("-", "-")
            if change is not None:
                resolved = f"{change.value:+.3f}" if change.resolved else "not resolved"
                words = (resolved, f"{change.low:+.3f} to {change.high:+.3f}")
            column["accuracy minus baseline"], column["95 % of it, paired by prompt"] = words
            column["steps per second, times baseline"] = show(speed, "{:.2f}x")
            if target_of(runs):
                own = mean([summary["seconds_to_target"] for summary in variants[name]])
                ratio = plain_target / own if plain_target is not None and own else None
                column["speed to target, times baseline"] = show(ratio, "{:.2f}x")
    return columns


def make_table(columns: dict[str, dict[str, str]]) -> Table:
    """One column per variant."""
    table = Table()
    table.add_column("")
    for name in columns:
        table.add_column(Text(name), justify="right")
    for key in next(iter(columns.values())):
        table.add_row(key, *(column[key] for column in columns.values()))
    return table


def samples_table(run: Run) -> Table | None:
    """The answers kept of a run's last step; None where there are none."""
    samples = read_samples(run.folder)
    if not samples:
        return None
    step = max(samples)
    table = Table(title=f"answers of step {step}", show_lines=True)
    for name in ("prompt", "answer", "reward", ""):
        table.add_column(name, justify="right" if name == "reward" else "left", overflow="fold")
    for sample in samples[step]:
        texts = [Text(printable(sample[key][:TABLE_CHARACTERS])) for key in ("prompt", "answer")]
        table.add_row(*texts, show(sample["reward"]), "right" if sample["accuracy"] > 0.5 else "wrong")
    return table


def draw(runs: Sequence[Run], path: Path) -> None:
    """Accuracy over wall time, one colour per variant, one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    names = sorted({run.name for run in runs}, key=lambda name: (name != BASELINE, name))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    labelled = set()
    for run in sorted(runs, key=lambda run: names.index(run.name)):
        if run.curve:
            label = None if run.name in labelled else run.name
            labelled.add(run.name)
            seconds, accuracy = zip(*run.curve)
            axes.plot(seconds, accuracy, marker=".", color=colours[run.name], label=label, linewidth=1.6)
    target = target_of(runs)
    if target:
        axes.axhline(target, color="0.6", linewidth=1, linestyle="--", label=f"target {target:g}")
    axes.set(xlabel="wall time without evaluations (s)", ylabel="accuracy on test prompts, sampled", ylim=(0, 1))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def informative_by_cut(folder: Path) -> dict[int, tuple[float, float]]:
    """Of a run with `rpo`: upper end of the cut in % -> (groups, those whose accuracies differ), over all steps."""
    counts: dict[int, tuple[float, float]] = {}
    for row in read_metrics(folder):
        for key, groups in row.items():
            if key.startswith("rpo/groups_cut_"):
                upper = int(key.removeprefix("rpo/groups_cut_"))
                before = counts.get(upper, (0.0, 0.0))
                counts[upper] = (before[0] + groups, before[1] + row[f"rpo/informative_cut_{upper}"])
    return counts


def draw_informative(runs: Sequence[Run], path: Path) -> bool:
    """Share of informative groups against the cut, one line per variant with 95 % intervals; False: nothing to draw."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name in sorted({run.name for run in runs}):
        total: dict[int, list[float]] = {}
        for run in runs:
            for upper, pair in informative_by_cut(run.folder).items() if run.name == name else ():
                total[upper] = [a + b for a, b in zip(total.get(upper, [0.0, 0.0]), pair)]
        if total:
            uppers = sorted(total)
            share = [total[upper][1] / total[upper][0] for upper in uppers]
            error = [1.96 * (p * (1 - p) / total[upper][0]) ** 0.5 for p, upper in zip(share, uppers)]
            axes.errorbar(uppers, share, error, marker=".", capsize=2, label=name)
    drawn = bool(axes.get_legend_handles_labels()[0])
    if drawn:
        axes.set(xlabel="tokens cut from the remembered answer, up to (%); 100: whole answers too",
                 ylabel="groups with right and wrong answers", ylim=(0, 1), xlim=(0, 103))  # fmt: skip
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left")
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return drawn


def report(folders: Sequence[Path], console: Console | None = None) -> None:
    """Prints the table of all runs in these folders, draws ``accuracy.png`` in the first, and ``report.html`` in all.

    Of a single run also a few answers. Where there is something to draw also ``informative.png`` (rpo) and
    ``history.png`` (rhyme). The page shows all of it, side by side.
    """
    console = console or Console()
    runs = find_runs(folders)
    columns = summary_columns(runs)
    samples = samples_table(runs[0]) if len(runs) == 1 else None
    if samples is not None:
        console.print(samples)
    console.print(make_table(columns))
    pictures = {}
    picture = folders[0] / "accuracy.png"
    draw(runs, picture)
    console.print(f"accuracy over wall time: {picture}", highlight=False, soft_wrap=True)
    picture = folders[0] / "informative.png"
    if draw_informative(runs, picture):
        pictures["informative groups against the cut"] = picture
    picture = folders[0] / "history.png"
    if draw_history([run.folder for run in runs], picture):
        pictures["stored answers over the steps"] = picture
    for words, picture in pictures.items():
        console.print(f"{words}: {picture}", highlight=False, soft_wrap=True)
    pages = [folder / "report.html" for folder in dict.fromkeys(folders)]
    write_page(runs, columns, pages, pictures=pictures, target=target_of(runs))
    for page in pages:
        console.print(f"all of it in a browser: {page}", highlight=False, soft_wrap=True)
