"""The page of a study: a table of its arms, a picture, and a row of figures for every run."""

import json
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from bench._runner import commit
from bench.studies.harness import OTHER_WEIGHTS, Interval, Study, paired, reached
from bench.studies.ranks import share_of_gain

RESULTS = Path(__file__).parent / "results"
SECONDS_OF = "CPU seconds of one thread; on a GPU seconds of the run's own turns, which shared it under --jobs"


def write_page(name: str, about: str, studies: Sequence[Study], rows: Sequence[dict[str, Any]], results: Path) -> str:
    """Write NAME.md, NAME.jsonl and NAME.png, and return the page."""
    results.mkdir(parents=True, exist_ok=True)
    lines = [f"# {name}", "", about.strip(), ""]
    for study in studies:
        study_rows = [row for row in rows if row["study"] == study.name]
        if study_rows:
            lines += [f"## {study.name}", "", *tables(study, study_rows), ""]
    devices = ", ".join(sorted({row["device"] for row in rows}))
    lines += [f"{devices}; commit {commit()}. Seconds: {SECONDS_OF}, without evaluations. Levels: held by two "
              "evaluations in succession. Brackets: 95 % over seeds by Student's t, pairs of the same seed.", "",
              f"![accuracy over tokens and seconds]({name}.png)"]  # fmt: skip
    page = "\n".join(lines) + "\n"
    (results / f"{name}.md").write_text(page)
    (results / f"{name}.jsonl").write_text("".join(json.dumps(row | {"commit": commit()}) + "\n" for row in rows))
    draw(studies, rows, results / f"{name}.png")
    return page


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a study that :func:`write_page` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def tables(study: Study, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Markdown tables of the arms and, if measured, of other weights in place of trained ones."""
    lines = table(study, rows)
    for arm in study.arms:
        measured = [row for row in rows if row["arm"] == arm.name and OTHER_WEIGHTS in row["more"]]
        lines += ["", *weights_table(arm.name, measured)] if measured else []
    return lines


def table(study: Study, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Markdown table with a row for every arm, compared with the first one."""
    headings = dict.fromkeys(chain(*(row["more"] for row in rows)))
    more = [heading for heading in headings if heading != OTHER_WEIGHTS]
    has_earlier = any("earlier tokens" in row for row in rows)
    head = ["", "rate", "seeds", "tokens", "s", "accuracy", "minus plain, points", "tokens to plain's end", "s"]
    head += [f"{unit} to {level:g}" for level in study.levels for unit in ("tokens", "s")]
    head += ["earlier run: tokens", "s"] if has_earlier else []
    plain = [row for row in rows if row["arm"] == study.arms[0].name]
    body = []
    for arm in study.arms:
        arm_rows = [row for row in rows if row["arm"] == arm.name]
        if not arm_rows:
            continue
        pairs = paired(arm_rows, plain) if arm is not study.arms[0] else []
        rate = arm_rows[0]["rate"]
        cells = [f"**{arm.name}**", "" if rate is None else f"{rate:g}", str(len(arm_rows))]
        for key, form in (("tokens", "{:,.0f}"), ("seconds", "{:,.0f}"), ("accuracy", "{:.3f}")):
            cells.append(average(arm_rows, key, form))
        differences = [100 * (row["accuracy"] - plain_row["accuracy"]) for row, plain_row in pairs]
        cells.append(Interval.of(differences).text("{:+.1f}".format) if pairs else "")
        cells += [to_plains_end(pairs, column) for column in (0, 1)]
        for level in study.levels:
            cells += [to_level(arm_rows, plain if pairs else [], level, column) for column in (0, 1)]
        if has_earlier:
            cells += [average(arm_rows, "earlier tokens", "{:,.0f}"), average(arm_rows, "earlier seconds", "{:,.0f}")]
        body.append([*cells, *(average([row["more"] for row in arm_rows], heading, "{:.3g}") for heading in more)])
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in ([*head, *more], *body)]
    return [lines[0], "|" + "---|" * len([*head, *more]), *lines[1:]]


def weights_table(arm: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Markdown table of an arm's accuracies with other weights in place of the trained ones."""
    seeds = ", ".join(str(row["seed"]) for row in rows)
    other_weights = [row["more"][OTHER_WEIGHTS] for row in rows]
    lines = [f"| {arm}: weights | accuracy ± standard error, seeds {seeds} | share of the gain |", "|---|---|---|"]
    for name in other_weights[0]:
        cells = ", ".join(f"{weights[name][0]:.3f} ± {weights[name][1]:.3f}" for weights in other_weights)
        share = Interval.of([100 * share_of_gain(weights, name) for weights in other_weights])
        lines.append(f"| {name} | {cells} | {share.text('{:z.0f}'.format)} % |")
    return lines


def average(rows: Sequence[dict[str, Any]], key: str, form: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return form.format(fmean(values)) if values else ""


def to_level(rows: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], level: float, column: int) -> str:
    """Return the mean of tokens (0) or seconds (1) to a level, with its geometric mean ratio to plain runs, if any."""
    counts = at_level(rows, level, column)
    if len(counts) < len(rows):
        return f"{len(counts)} of {len(rows)}"
    text = f"{fmean(counts):,.0f}"
    ratios = log_ratios([pair_of(pair, level) for pair in paired(rows, plain)], column)
    return f"{text} ({geometric(ratios)})" if ratios else text


def at_level(rows: Sequence[dict[str, Any]], level: float, column: int) -> list[float]:
    """Return tokens (0) or seconds (1) to a level, of the runs that reach it."""
    counts = [row["reached"][f"{level:g}"] for row in rows]
    return [count[column] for count in counts if count is not None]


def pair_of(pair: tuple[Any, Any], level: float) -> tuple[Any, Any]:
    """Return tokens and seconds to a level for each run of a pair; None for a run that does not reach it."""
    run, baseline = pair
    key = f"{level:g}"
    return run["reached"][key], baseline["reached"][key]


def to_plains_end(pairs: Sequence[tuple[Any, Any]], column: int) -> str:
    """Return tokens (0) or seconds (1) until plain's final accuracy, as a share of all that plain spends."""
    counts = []
    for row, plain_row in pairs:
        path = row["evaluations"]
        _, tokens, seconds, accuracy = plain_row["evaluations"][-1]
        counts.append((reached([*path, path[-1]], accuracy), (tokens, seconds)))  # the last one needs no second
    ratios = log_ratios(counts, column)
    if len(ratios) < len(pairs):
        return f"{len(ratios)} of {len(pairs)}"
    return geometric(ratios) if ratios else ""


def log_ratios(pairs: Sequence[tuple[Any, Any]], column: int) -> list[float]:
    """Return logarithms of the ratios of tokens (0) or seconds (1), of pairs whose counts are both above 0."""
    counts = [(run[column], other[column]) for run, other in pairs if run is not None and other is not None]
    return [math.log(count / other) for count, other in counts if min(count, other) > 0]


def geometric(logs: Sequence[float]) -> str:
    """Format a geometric mean and its interval."""
    return Interval.of(logs).text(lambda x: f"{math.exp(x):.2f}")


def draw_seconds(study: Study, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the seconds to the last level: a bar for the mean of each arm, a dot for each seed."""
    from matplotlib.figure import Figure

    level = study.levels[-1]
    plain = [row for row in rows if row["arm"] == study.arms[0].name]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(arms)), layout="constrained")
    axes = figure.subplots()
    for place, arm in enumerate(arms):
        arm_rows = [row for row in rows if row["arm"] == arm]
        seconds = at_level(arm_rows, level, 1)
        slowdowns = log_ratios([pair_of(pair, level) for pair in paired(plain, arm_rows)], 1)
        text = (
            ""
            if arm_rows == plain or not slowdowns
            else f"{plain[0]['arm']} takes {geometric(slowdowns)} times as long"
        )
        if len(seconds) < len(arm_rows):
            text = f"{len(seconds)} of {len(arm_rows)} seeds"
        axes.barh(place, fmean(seconds or [0.0]), height=0.6, color=f"C{place}", alpha=0.5)
        axes.plot(seconds, [place] * len(seconds), "o", color=f"C{place}", markersize=5)
        axes.text(max(seconds, default=0.0), place, f"   {text}", va="center")
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds to accuracy {level:g}, without evaluations; {', '.join({row['device'] for row in rows})}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def draw(studies: Sequence[Study], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy over tokens and over seconds: a row of pictures for each study, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [study for study in studies if any(row["study"] == study.name for row in rows)]
    figure, axes = pyplot.subplots(len(shown), 2, figsize=(12, 4 * len(shown)), layout="constrained", squeeze=False)
    for axes_pair, study in zip(axes, shown):
        for number, arm in enumerate(study.arms):
            arm_rows = [row for row in rows if row["study"] == study.name and row["arm"] == arm.name]
            for i, row in enumerate(arm_rows):
                style: dict[str, Any] = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
                label = None if i else arm.name
                for ax, column in zip(axes_pair, (1, 2)):
                    points = row["evaluations"]
                    ax.plot([p[column] for p in points], [p[3] for p in points], linewidth=1.2, label=label, **style)
        axes_pair[0].set(title=study.name, xlabel="generated tokens", ylabel="accuracy")
        axes_pair[1].set(xlabel="seconds, without evaluations")
        axes_pair[0].legend(fontsize=7)
        for ax in axes_pair:
            ax.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
