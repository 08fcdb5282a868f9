"""What a report says in words and numbers: a verdict on each variant, and the summary table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy
from rich.table import Table
from rich.text import Text

from python_trainer.report.runs import BASELINE, Run, by_variant, counters_of
from python_trainer.run_directory import load_evaluations


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """Returns whether the interval excludes 0."""
        return not self.low <= 0 <= self.high


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
    kinds, counts = numpy.unique(values, axis=0, return_counts=True)  # equal rows are drawn together
    generator = numpy.random.default_rng(0)
    means = generator.multinomial(len(values), counts / len(values), size=10_000) @ kinds / len(values)
    runs = values.shape[1]
    weights = generator.multinomial(runs, [1 / runs] * runs, size=len(means)) / runs
    low, high = numpy.quantile((means * weights).sum(1), [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


def mean_of(runs: Sequence[Run], key: str) -> float | None:
    """Return the mean over seeds; None if a seed has no value."""
    values: list[Any] = [run.summary[key] for run in runs]
    return None if None in values else fmean(values)


def show(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def compare_accuracy(runs: Sequence[Run], plain: Sequence[Run]) -> Interval | None:
    """Return final accuracy minus that of the plain runs of the same seeds; None if they cannot be paired."""
    before = {run.folder.name: load_evaluations(run.folder).get("final") for run in plain}
    pairs = [(load_evaluations(run.folder).get("final"), before.get(run.folder.name)) for run in runs]
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    if not known or len({len(values) for pair in known for values in pair}) != 1:
        return None
    after, plain_values = zip(*known)
    return difference_of_runs(after, plain_values)


def verdicts(runs: Sequence[Run]) -> list[str]:
    """Return a sentence on each variant against the baseline; without a baseline, on each variant by itself."""
    variants = by_variant(runs)
    if BASELINE not in variants or len(variants) == 1:
        return [describe_alone(name, mine) for name, mine in variants.items()]
    plain = variants[BASELINE]
    return [describe_against(name, mine, plain) for name, mine in variants.items() if name != BASELINE]


def describe_alone(name: str, runs: Sequence[Run]) -> str:
    """Return ``run: accuracy 54.0 % -> 84.0 % in 12 steps, 110 s, 98,304 generated tokens``.

    Rewards take the place of an accuracy that stays 0, as it does where no answer is right or wrong.
    """
    before, after = (mean_of(runs, f"eval_accuracy_{part}") for part in ("start", "final"))
    gained = "no evaluation" if before is None or after is None else f"accuracy {before:.1%} -> {after:.1%}"
    found = [run.summary["evaluation"] for run in runs]
    if before == after == 0 and all("start" in evaluations for evaluations in found):  # has them once a run has ended
        first, last = (fmean(evaluations[part]["eval/reward"] for evaluations in found) for part in ("start", "final"))
        gained = f"reward {first:.3f} -> {last:.3f}"
    steps, seconds, tokens = (mean_of(runs, key) or 0.0 for key in ("steps", "training_s", "generated_tokens"))
    seeds = f", means of {len(runs)} seeds" if len(runs) > 1 else ""
    return f"{name}: {gained} in {steps:.0f} steps, {seconds:,.0f} s, {tokens:,.0f} generated tokens{seeds}"


def describe_against(name: str, runs: Sequence[Run], plain: Sequence[Run]) -> str:
    """Return ``rhyme: 45 % fewer generated tokens, 30 % less time, accuracy 1.3 points lower (95 %: -2.2 to -0.4)``."""

    def change(key: str, less: str, unit: str) -> str:
        ours, theirs = mean_of(runs, key), mean_of(plain, key)
        if not ours or not theirs:
            return f"{unit} unknown"
        share = ours / theirs - 1
        return f"{abs(share):.0%} {less if share < 0 else 'more'} {unit}"

    found = compare_accuracy(runs, plain)
    if found is None:
        accuracy = "accuracy not comparable (no evaluations of the same prompts and seeds)"
    else:
        span = f"95 %: {100 * found.low:+.1f} to {100 * found.high:+.1f} points"
        direction = "lower" if found.value < 0 else "higher"
        points = f"{abs(100 * found.value):.1f} points {direction}" if found.resolved else "not told apart"
        accuracy = f"accuracy {points} ({span})"
    tokens, seconds = change("generated_tokens", "fewer", "generated tokens"), change("training_s", "less", "time")
    return f"{name}: {tokens}, {seconds}, {accuracy}"


def caveats(runs: Sequence[Run]) -> list[str]:
    """Return what keeps the numbers from being compared, or from being final."""
    lines = [f"{run.label} has not ended: the report covers its {run.summary['steps']} steps so far" for run in runs
             if not run.ended]  # fmt: skip
    steps = {name: fmean(run.summary["steps"] for run in mine) for name, mine in by_variant(runs).items()}
    if len(steps) > 1 and max(steps.values()) > 1.02 * min(steps.values()):
        made = ", ".join(f"{name} {count:.0f}" for name, count in steps.items())
        lines.append(f"the variants made different numbers of steps ({made}): compare the curves, not the ends")
    return lines


def summary_columns(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Return variant -> row -> mean over its seeds, as text. Rows that say nothing anywhere are left out."""
    variants = by_variant(runs)
    columns = {name: summary_column(mine, variants.get(BASELINE)) for name, mine in variants.items()}
    rows = dict.fromkeys(row for column in columns.values() for row in column)  # supervised steps have no reward
    kept = [row for row in rows if any(column.get(row, "-") not in ("-", "0", "0 %") for column in columns.values())]
    return {name: {row: column.get(row, "-") for row in kept} for name, column in columns.items()}


def summary_column(runs: Sequence[Run], plain: Sequence[Run] | None) -> dict[str, str]:
    """Return row -> mean over the seeds of one variant, as text."""
    total = mean_of(runs, "training_s") or 0.0
    parts = {"generation": mean_of(runs, "rollout_s"), "training": mean_of(runs, "train_s")}
    parts["accelerators"] = fmean(sum(run.summary["accelerator_s"].values()) for run in runs)
    change = None if plain is None or plain is runs else compare_accuracy(runs, plain)
    own, base = mean_of(runs, "seconds_to_target"), None if plain is None else mean_of(plain, "seconds_to_target")
    found = {
        "seeds": str(len(runs)),
        "accuracy before": show(mean_of(runs, "eval_accuracy_start")),
        "accuracy after": show(mean_of(runs, "eval_accuracy_final")),
        "accuracy minus baseline": (
            "-" if change is None else f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
        ),
    }
    finals = [run.summary.get("evaluation", {}).get("final", {}) for run in runs]
    for name in finals[0]:
        if name != "eval/accuracy" and all(name in final for final in finals):
            found[f"{name.removeprefix('eval/')} after"] = show(fmean(final[name] for final in finals))
    found |= {
        "steps": show(mean_of(runs, "steps"), "{:.0f}"),
        "seconds, all": show(mean_of(runs, "wall_s"), "{:.1f}"),
        "seconds without evaluation": show(total, "{:.1f}"),
        "seconds to target": show(own, "{:.1f}"),
        "tokens to target": show(mean_of(runs, "tokens_to_target"), "{:,.0f}"),
        "speed to target, times baseline": show(base / own if base and own else None, "{:.2f}"),
    }
    for kind in ("generated", "prefill", "cached", "trained"):
        found[f"{kind} tokens"] = show(mean_of(runs, f"{kind}_tokens"), "{:,.0f}")
    for name, seconds in parts.items():
        found[f"share of {name}"] = show(100 * (seconds or 0.0) / total if total else None, "{:.0f} %")
    for metric, words in counters_of(run.folder for run in runs).items():
        found[words] = show(fmean(run.counters.get(metric, 0.0) for run in runs), "{:,.0f}")
    return found


def make_table(columns: dict[str, dict[str, str]]) -> Table:
    """Return one column per variant."""
    table = Table()
    table.add_column("")
    for name in columns:
        table.add_column(Text(name), justify="right")
    for row in next(iter(columns.values())):
        table.add_row(row, *(column[row] for column in columns.values()))
    return table


def judge(accuracy: float | None) -> str:
    """Return right or wrong; nothing for tasks without right and wrong."""
    return "" if accuracy is None else "right" if accuracy > 0.5 else "wrong"


def escape_controls(text: str) -> str:
    """Escape control characters, so that no answer can move a cursor or end a document."""
    return "".join(c if c in "\n\t" or c.isprintable() or c == " " else repr(c)[1:-1] for c in text)
