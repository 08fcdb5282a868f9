"""The page of a study: a table of its arms, a picture, and the figures of every run."""

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


def write(name: str, about: str, studies: Sequence[Study], rows: Sequence[dict[str, Any]], results: Path) -> str:
    """Write NAME.md, NAME.jsonl and NAME.png, and return the page."""
    results.mkdir(parents=True, exist_ok=True)
    lines = [f"# {name}", "", about.strip(), ""]
    for study in studies:
        own = [row for row in rows if row["study"] == study.name]
        if own:
            lines += [f"## {study.name}", "", *tables(study, own), ""]
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
    """Return the rows of a study that :func:`write` has written."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def tables(study: Study, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: the arms, then other weights in place of trained ones where there are such figures."""
    weights = weights_table(rows)
    return [*table(study, rows), *([""] if weights else []), *weights]


def table(study: Study, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: a row for every arm, compared with the first one."""
    more = [heading for heading in dict.fromkeys(chain(*(row["more"] for row in rows))) if heading != OTHER_WEIGHTS]
    has_earlier = any("earlier tokens" in row for row in rows)
    head = ["", "rate", "seeds", "tokens", "s", "accuracy", "minus plain, points", "tokens to plain's end", "s"]
    head += [f"{what} to {level:g}" for level in study.levels for what in ("tokens", "s")]
    head += ["earlier run: tokens", "s"] if has_earlier else []
    plain = [row for row in rows if row["arm"] == study.arms[0].name]
    body = []
    for arm in study.arms:
        own = [row for row in rows if row["arm"] == arm.name]
        if not own:
            continue
        pairs = paired(own, plain) if arm is not study.arms[0] else []
        cells = [f"**{arm.name}**", "" if own[0]["rate"] is None else f"{own[0]['rate']:g}", str(len(own))]
        cells += [f"{fmean(row['tokens'] for row in own):,.0f}", f"{fmean(row['seconds'] for row in own):,.0f}",
                  f"{fmean(row['accuracy'] for row in own):.3f}"]  # fmt: skip
        differences = [100 * (row["accuracy"] - other["accuracy"]) for row, other in pairs]
        cells.append(Interval.of(differences).text("{:+.1f}".format) if pairs else "")
        cells += [to_plains_end(pairs, which) for which in (0, 1)]
        for level in study.levels:
            cells += [to_level(own, plain if pairs else [], level, which) for which in (0, 1)]
        if has_earlier:
            cells += [average(own, "earlier tokens", "{:,.0f}"), average(own, "earlier seconds", "{:,.0f}")]
        body.append([*cells, *(average([row["more"] for row in own], heading, "{:.3g}") for heading in more)])
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in ([*head, *more], *body)]
    return [lines[0], "|" + "---|" * len([*head, *more]), *lines[1:]]


def weights_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: the accuracy with other weights in place of the trained ones; nothing without such figures."""
    looked = [row for row in rows if OTHER_WEIGHTS in row["more"]]
    if not looked:
        return []
    runs = ", ".join(f"{row['arm']} {row['seed']}" for row in looked)
    found = [row["more"][OTHER_WEIGHTS] for row in looked]
    lines = [f"| weights | accuracy and its standard error: {runs} | share of the gain |", "|---|---|---|"]
    for name in found[0]:
        accuracies = ", ".join(f"{weights[name][0]:.3f} ± {weights[name][1]:.3f}" for weights in found)
        share = Interval.of([100 * share_of_gain(weights, name) for weights in found])
        lines.append(f"| {name} | {accuracies} | {share.text('{:.0f}'.format)} % |")
    return lines


def average(rows: Sequence[dict[str, Any]], key: str, form: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return form.format(fmean(values)) if values else ""


def to_level(rows: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], level: float, which: int) -> str:
    """The mean of tokens (0) or seconds (1) to a level; beside plain runs the ratio to them, a geometric mean."""
    there = at_level(rows, level, which)
    if len(there) < len(rows):
        return f"{len(there)} of {len(rows)}"
    text = f"{fmean(there):,.0f}"
    ratios = log_ratios([pair_of(pair, level) for pair in paired(rows, plain)], which)
    return f"{text} ({geometric(ratios)})" if ratios else text


def at_level(rows: Sequence[dict[str, Any]], level: float, which: int) -> list[float]:
    """Tokens (0) or seconds (1) to a level, of the runs that reach it."""
    found = [row["reached"][f"{level:g}"] for row in rows]
    return [counts[which] for counts in found if counts is not None]


def pair_of(pair: tuple[Any, Any], level: float) -> tuple[Any, Any]:
    """Tokens and seconds to a level, of each of a pair of runs; None where one does not reach it."""
    mine, theirs = (row["reached"][f"{level:g}"] for row in pair)
    return mine, theirs


def to_plains_end(pairs: Sequence[tuple[Any, Any]], which: int) -> str:
    """Tokens (0) or seconds (1) until the accuracy with which plain ends, as a share of what plain spends in all."""
    counts = []
    for row, other in pairs:
        own, (_, tokens, seconds, accuracy) = row["evaluations"], other["evaluations"][-1]
        counts.append((reached([*own, own[-1]], accuracy), (tokens, seconds)))  # the last evaluation counts alone
    ratios = log_ratios(counts, which)
    if len(ratios) < len(pairs):
        return f"{len(ratios)} of {len(pairs)}"
    return geometric(ratios) if ratios else ""


def log_ratios(pairs: Sequence[tuple[Any, Any]], which: int) -> list[float]:
    """Logarithms of the ratios of tokens (0) or seconds (1), of pairs that both have counts above 0."""
    there = [(mine[which], theirs[which]) for mine, theirs in pairs if mine is not None and theirs is not None]
    return [math.log(mine / theirs) for mine, theirs in there if min(mine, theirs) > 0]


def geometric(logs: Sequence[float]) -> str:
    """A geometric mean and its interval."""
    return Interval.of(logs).text(lambda x: f"{math.exp(x):.2f}")


def draw_seconds(study: Study, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the seconds to the last level: a bar for the mean of each arm, a dot for each seed."""
    from matplotlib.figure import Figure

    level, plain = study.levels[-1], [row for row in rows if row["arm"] == study.arms[0].name]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(arms)), layout="constrained")
    axes = figure.subplots()
    for place, arm in enumerate(arms):
        own = [row for row in rows if row["arm"] == arm]
        seconds = at_level(own, level, 1)
        times = log_ratios([pair_of(pair, level) for pair in paired(plain, own)], 1)
        text = "" if own == plain or not times else f"{plain[0]['arm']} takes {geometric(times)} times as long"
        if len(seconds) < len(own):
            text = f"{len(seconds)} of {len(own)} seeds"
        axes.barh(place, fmean(seconds or [0.0]), height=0.6, color=f"C{place}", alpha=0.5)
        axes.plot(seconds, [place] * len(seconds), "o", color=f"C{place}", markersize=5)
        axes.text(max(seconds, default=0.0), place, f"   {text}", va="center")
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds to accuracy {level:g}, without evaluations; {', '.join({row['device'] for row in rows})}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def draw(studies: Sequence[Study], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over tokens and over seconds; a row of pictures for every study, a line for every run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [study for study in studies if any(row["study"] == study.name for row in rows)]
    figure, axes = pyplot.subplots(len(shown), 2, figsize=(12, 4 * len(shown)), layout="constrained", squeeze=False)
    for pair, study in zip(axes, shown):
        for number, arm in enumerate(study.arms):
            own = [row for row in rows if row["study"] == study.name and row["arm"] == arm.name]
            for i, row in enumerate(own):
                style: dict[str, Any] = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
                label = None if i else arm.name
                for ax, place in zip(pair, (1, 2)):
                    points = row["evaluations"]
                    ax.plot([p[place] for p in points], [p[3] for p in points], linewidth=1.2, label=label, **style)
        pair[0].set(title=study.name, xlabel="generated tokens", ylabel="accuracy")
        pair[1].set(xlabel="seconds, without evaluations")
        pair[0].legend(fontsize=7)
        for ax in pair:
            ax.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
