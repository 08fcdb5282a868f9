"""One HTML page on one run or several side by side: tables, curves, answers. It needs no network and no script."""

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from python_trainer.config import settings_used
from python_trainer.report.curve import AXES, COLOURS, SECONDS, STEP, TOKENS, colours_of, paint_accuracy, width_of
from python_trainer.report.runs import Run, accelerators_of, by_variant, counters_of
from python_trainer.report.tables import printable, verdict
from python_trainer.report.verdict import caveats, verdicts
from python_trainer.run_directory import read_metrics, read_samples, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = ("-", "--", ":", "-.")
INK = "#010203"  # drawn so by matplotlib, replaced by the colour of the page's text
SMOOTH_FROM = 60  # points of a curve; longer ones get a running mean in front of the points
SHOWN_STEPS = 8  # of a run, with sample answers


@dataclass(frozen=True)
class Chart:
    """Metrics that share a picture: the first solid, the next dashed, dotted."""

    title: str
    keys: tuple[str, ...]
    note: str = ""
    x: str = STEP


OVER = {STEP: "steps", SECONDS: "training time", TOKENS: "generated tokens"}


def over_everything(title: str, key: str, note: str) -> list[Chart]:
    return [Chart(f"{title} over {words}", (key,), note, x) for x, words in OVER.items()]


GROUPS: dict[str, list[Chart]] = {
    "Results": [
        *over_everything("Training accuracy", "accuracy", "of the answers that the policy has begun itself"),
        *over_everything("Reward", "reward", "mean of the answers that the policy has begun itself"),
        Chart("Continued answers", ("continued/accuracy", "continued/reward"), "accuracy, reward"),
    ],
    "Groups": [
        Chart("Spread of the reward", ("reward_std",), "mean standard deviation within a group"),
        Chart("Groups that teach nothing", ("frac_reward_zero_std",), "share of answers in groups of equal reward"),
        Chart("Dynamic sampling: rounds", ("sampling/rounds",)),
        Chart("Dynamic sampling: kept", ("sampling/kept_groups",), "share of the groups drawn"),
    ],
    "Update": [
        Chart("Loss", ("loss",)),
        Chart("Entropy", ("entropy",), "mean over answer tokens, nats"),
        Chart("KL", ("kl",), "to the reference policy, mean over answer tokens; 0 with beta 0"),
        Chart("Gradient norm", ("grad_norm",), "before clipping"),
        Chart("Clipped tokens", ("clip_ratio/low_mean", "clip_ratio/high_mean"), "share, below and above"),
        Chart("Importance ratio", ("importance_ratio/mean", "importance_ratio/max"), "unclamped, new to old policy"),
        Chart("Sampler against trainer",
              ("sampling/logp_difference/mean", "sampling/logp_difference/max"), "|difference of log-probability|"),
        Chart("Learning rate", ("learning_rate",)),
    ],
    "Critic": [
        Chart("Explained variance", ("explained_variance",), "of the returns, by the values"),
        Chart("Value loss", ("value_loss",)),
        Chart("Clipped values", ("clip_ratio/value",), "share of tokens"),
        Chart("Values and returns", ("values/mean", "returns/mean")),
    ],
    "Answers": [
        Chart("Length", tuple(f"completions/{part}_length" for part in ("mean", "min", "max")), "tokens"),
        Chart("Length of those that ended",
              tuple(f"completions/{part}_terminated_length" for part in ("mean", "min", "max")), "tokens"),
        Chart("Truncated", ("completions/clipped_ratio",), "share that reached the longest allowed"),
        Chart("Generated per answer", ("completions/generated_length",), "tokens; the rest was given"),
    ],
    "Speed": [
        Chart("Tokens per second", ("tokens_per_second",), "generated, over the whole step"),
        Chart("Tokens per second of generation", ("rollout_tokens_per_second",)),
        Chart("Seconds of a step", ("time/rollout_s", "time/train_s", "time/reward_s"),
              "generation, training, rewards"),
        Chart("Tokens of a step", ("tokens/generated", "tokens/trained", "tokens/prefill", "tokens/cached"),
              "generated, trained, prefilled, from cache"),
    ],
}  # fmt: skip
CURVE = "eval/accuracy"  # at the top of the page
SPLIT = ("rollout", "train", "reward", "checkpoint", "eval")  # parts of summary.json, in seconds
HOMES = {"rewards": "Reward functions", "time": "Speed", "tokens": "Speed"}
DRAWN_ELSEWHERE = ("time/wall_s", "time/training_s", "time/eval_s", "time/checkpoint_s", "total/")


def all_charts(
    keys: set[str], elsewhere: tuple[str, ...] = (), words: Mapping[str, str] = MappingProxyType({})
) -> dict[str, list[Chart]]:
    """Group -> charts that have something to show; metrics named nowhere above get a chart each, by their prefix.

    Args:
        elsewhere: beginnings of names of metrics that other pictures show.
        words: metric -> what it is, of those that are named nowhere above.
    """
    groups = {name: [chart for chart in charts if keys & set(chart.keys)] for name, charts in GROUPS.items()}
    rest = keys - {STEP, CURVE} - {key for charts in GROUPS.values() for chart in charts for key in chart.keys}
    for key in sorted(key for key in rest if not key.startswith((*DRAWN_ELSEWHERE, *elsewhere))):
        prefix, _, name = key.removeprefix("time/accelerator/").partition("/")
        if key.startswith("time/accelerator/"):
            groups.setdefault(prefix.removesuffix("_s"), []).append(Chart("Seconds of a step", (key,)))
        else:
            home = HOMES.get(prefix, prefix) if name else "Other"
            title = (name or key).replace("_", " ").replace("/", ": ")
            groups.setdefault(home, []).append(Chart(title, (key,), words.get(key, "")))
    return {name: charts for name, charts in groups.items() if charts}


def drawn(
    paint: Callable[["Axes"], None], *, label: str, size: tuple[float, float] = (4.4, 2.3), flexible: bool = False
) -> Markup:
    """An SVG for the page: what ``paint`` draws, in its text's colour; ``flexible`` margins for long labels."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    look: dict[Any, Any] = {f"{part}color": INK for part in ("text.", "axes.label", "xtick.", "ytick.", "axes.edge")}
    look |= {"svg.fonttype": "none", "svg.hashsalt": "rlkernels", "font.size": 9, "text.parse_math": False}
    with rc_context(look):
        figure = Figure(figsize=size, layout="constrained" if flexible else None)  # which draws twice
        axes = figure.add_subplot() if flexible else figure.add_axes((0.14, 0.2, 0.81, 0.7))
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None})
    svg = file.getvalue().replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    role = Markup('role="img" aria-label="{}"').format(label)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', lambda _: role, svg, count=1)
    return Markup(svg)  # made of numbers and escaped labels


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean over the newest 1/20 of the points; NaN where all of them are."""
    width, means = max(len(values) // 20, 2), []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(end - width, 0) : end] if not math.isnan(value)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


@dataclass(frozen=True)
class Line:
    """A metric of a run."""

    colour: str
    width: float
    style: str
    x: list[float]
    y: list[float]  # NaN where it was not finite


Curves = Sequence[tuple[str, float, list[dict[str, Any]]]]  # colour, width of the line, rows of metrics, per run


def lines_of(chart: Chart, curves: Curves) -> list[Line]:
    lines = []
    for colour, width, rows in curves:
        for style, key in zip(STYLES, chart.keys):
            points = [(row[chart.x], row[key]) for row in rows if key in row and row.get(chart.x) is not None]
            values = [math.nan if y is None else y for _, y in points]
            lines.append(Line(colour, width, style, [x for x, _ in points], values))
    return lines


def says_nothing(lines: Sequence[Line]) -> bool:
    """Whether no line has more than one point, or all have one and the same value."""
    return all(len(line.y) < 2 for line in lines) or len({y for line in lines for y in line.y}) < 2


def draw_chart(chart: Chart, lines: Sequence[Line]) -> Markup:
    def paint(axes: "Axes") -> None:
        for line in lines:
            colour, style, x, y = line.colour, line.style, line.x, line.y
            long = len(x) >= SMOOTH_FROM
            axes.plot(
                x,
                y,
                style,
                color=colour,
                linewidth=0.8 if long else line.width,
                alpha=0.35 if long else 1,
                marker="." if len(x) <= 12 else "",
                markersize=5,
            )
            if long:
                axes.plot(x, smooth(y), style, color=colour, linewidth=line.width)
        axes.set_xlabel(AXES[chart.x])
        axes.locator_params(nbins=5)
        axes.locator_params("x", integer=chart.x == STEP)
        axes.ticklabel_format(scilimits=(-3, 6), useOffset=False)
        axes.grid(color=INK, alpha=0.15, linewidth=0.6)

    return drawn(paint, label=chart.title)


def draw_curve(runs: Sequence[Run], x: str, target: float | None) -> Markup:
    """The curve that the page begins with."""

    def paint(axes: "Axes") -> None:
        paint_accuracy(axes, runs, x, target)
        if axes.get_legend_handles_labels()[0]:
            axes.figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)

    return drawn(paint, label=f"Test accuracy over {AXES[x]}", size=(7.2, 3.6), flexible=True)


def draw_split(runs: Sequence[Run]) -> Markup:
    """Where the time went: one bar per run."""
    parts = {part: [run.summary.get(f"{part}_s") or 0.0 for run in runs] for part in SPLIT}
    parts["accelerators"] = [sum(run.summary["accelerator_s"].values()) for run in runs]
    spent = [sum(column) for column in zip(*parts.values())]
    parts["other"] = [max(run.summary["wall_s"] - known, 0.0) for run, known in zip(runs, spent)]

    def paint(axes: "Axes") -> None:
        left = [0.0] * len(runs)
        for number, (part, seconds) in enumerate(parts.items()):
            axes.barh(range(len(runs)), seconds, left=left, color=COLOURS[number], label=part)
            left = [a + b for a, b in zip(left, seconds)]
        axes.set_yticks(range(len(runs)), [run.label for run in runs])
        axes.invert_yaxis()
        axes.set_xlabel("seconds of wall time, evaluations (eval) among them")
        axes.figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)

    return drawn(paint, label="Where the time went", size=(4.4, 1.3 + 0.3 * len(runs)), flexible=True)


def compare_rows(columns: Sequence[Mapping[str, str]]) -> tuple[list[tuple], list[tuple]]:
    """Rows (name, value per column): those whose values differ, those that agree."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1], [row for row in rows if len(set(row[1:])) == 1]


def samples_of(run: Run) -> list[tuple[int, list[dict[str, Any]]]]:
    """(step, answers) of up to SHOWN_STEPS steps, evenly spread, the last among them."""
    found = sorted(read_samples(run.folder).items())
    count = min(len(found), SHOWN_STEPS)
    return [found[round(i * (len(found) - 1) / max(count - 1, 1))] for i in range(count)] if count > 1 else found


def folded(group: Sequence[tuple[Chart, list[Line]]]) -> tuple[list[tuple[Chart, Markup]], list[tuple[Chart, Markup]]]:
    """Charts that show something, and those that say nothing; each drawn."""
    both: tuple[list[tuple[Chart, Markup]], list[tuple[Chart, Markup]]] = ([], [])
    for chart, lines in group:
        both[says_nothing(lines)].append((chart, draw_chart(chart, lines)))
    return both


def write_page(
    runs: Sequence[Run],
    columns: Mapping[str, Mapping[str, str]],
    pages: Sequence[Path],
    *,
    pictures: Mapping[str, Path],
    target: float | None,
) -> None:
    """Writes the page of these runs to every path of ``pages``.

    Args:
        columns: variant -> the summary table's column.
        pictures: words -> PNG files that go into the page.
        target: accuracy to mark in the charts.
    """
    variants = list(by_variant(runs))
    colours = colours_of(runs)
    tables = [(colours[run.name], width_of(variants.index(run.name), len(variants)), read_metrics(run.folder))
              for run in runs]  # fmt: skip
    kinds = accelerators_of(run.folder for run in runs)
    elsewhere = tuple(beginning for kind in kinds for picture in kind.pictures for beginning in picture.metrics)
    groups = all_charts({key for *_, rows in tables for row in rows for key in row}, elsewhere, counters_of(kinds))
    charts = {name: folded([(chart, lines_of(chart, tables)) for chart in group]) for name, group in groups.items()}
    differing, same = compare_rows([settings_used(run.folder) for run in runs])
    made = compare_rows([{"device": run.summary["device"], **run.summary["versions"]} for run in runs])
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"printable": printable, "verdict": verdict}
    text = environment.get_template("report.html.jinja").render(
        title=", ".join(columns),
        runs=runs,
        colours=colours,
        verdicts=verdicts(runs),
        caveats=caveats(runs),
        curves=[(AXES[x], draw_curve(runs, x, target)) for x in AXES],
        charts=charts,
        split=draw_split(runs),
        summary=[(row, [column[row] for column in columns.values()]) for row in next(iter(columns.values()))],
        differing=differing,
        same=same,
        made=[*made[1], *made[0]],
        steps=[(run, samples_of(run)) for run in runs],
        pictures={words: base64.b64encode(path.read_bytes()).decode() for words, path in pictures.items()},
    )
    for page in pages:
        write_text(page, text.encode("utf-8", "replace").decode("utf-8"))
