"""Tables of runs."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from python_trainer.report.intervals import Interval, difference_of_runs
from python_trainer.report.runs import BASELINE, Kind, Run, accelerators_of, by_variant, counters_of, target_of
from python_trainer.run_directory import load_evaluations, read_samples

TABLE_CHARACTERS = 400  # of a prompt or an answer on the terminal


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def show(value: float | None, form: str = "{:.3f}") -> str:
    return "-" if value is None else form.format(value)


def facts(
    runs: Sequence[Run], target: float | None, accelerators: Sequence[Kind], measured: Sequence[str]
) -> dict[str, str]:
    """What the table says about one variant: means over its seeds."""
    summaries = [run.summary for run in runs]

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
        **{
            f"{name.removeprefix('eval/')} after": show(mean([final_results(run).get(name) for run in runs]))
            for name in measured
        },
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
        **{words: show(value, "{:,.0f}") for words, value in accelerator_facts(runs, accelerators).items()},
    }


def final_results(run: Run) -> dict[str, float]:
    """Metrics of the evaluation at the end; the reward only where it is something else than the accuracy."""
    found = dict(run.summary.get("evaluation", {}).get("final", {}))
    if found.get("eval/reward") == found.get("eval/accuracy"):
        found.pop("eval/reward", None)
    return found


def accelerator_facts(runs: Sequence[Run], accelerators: Sequence[Kind]) -> dict[str, float | None]:
    """What accelerators did: words -> mean over the runs. Rows in which no run has anything are left out of tables."""
    counters = counters_of(accelerators)
    rows = {words: mean([run.counters.get(metric, 0.0) for run in runs]) for metric, words in counters.items()}
    for kind in accelerators:
        columns = [kind.columns(run.summary) for run in runs]
        rows |= {words: mean([column.get(words) for column in columns]) for words in columns[0]}
    return rows


def seconds_per_step(summaries: Sequence[dict[str, Any]]) -> float:
    return fmean(summary["training_s"] / max(summary["steps"], 1) for summary in summaries)


def difference(runs: Sequence[Run], plain: Sequence[Run]) -> Interval | None:
    """Final accuracy minus that of the plain runs of the same seeds, paired by both; None: not comparable."""
    before = {run.folder.name: load_evaluations(run.folder).get("final") for run in plain}
    pairs = [(load_evaluations(run.folder).get("final"), before.get(run.folder.name)) for run in runs]
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    if not known or len({len(values) for pair in known for values in pair}) != 1:
        return None
    after, plain_values = zip(*known)
    return difference_of_runs(after, plain_values)


def summary_columns(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Variant -> what the table says about it, by row; ratios compare with the plain run."""
    of_variant = by_variant(runs)
    variants = {name: [run.summary for run in mine] for name, mine in of_variant.items()}
    accelerators = accelerators_of(run.folder for run in runs)
    found = list(dict.fromkeys(metric for run in runs for metric in final_results(run) if metric != "eval/accuracy"))
    columns = {name: facts(of_variant[name], target_of(runs), accelerators, found) for name in variants}
    if BASELINE in columns and len(columns) > 1:
        plain = variants[BASELINE]
        plain_target = mean([summary["seconds_to_target"] for summary in plain])
        for name, column in columns.items():
            speed = seconds_per_step(plain) / seconds_per_step(variants[name])
            change = None
            if name != BASELINE:
                change = difference(of_variant[name], of_variant[BASELINE])
            words = ("-", "-")
            if change is not None:
                resolved = f"{change.value:+.3f}" if change.resolved else "not resolved"
                words = (resolved, f"{change.low:+.3f} to {change.high:+.3f}")
            column["accuracy minus baseline"], column["95 % of it, prompts and seeds"] = words
            column["steps per second, times baseline"] = show(speed, "{:.2f}x")
            if target_of(runs):
                own = mean([summary["seconds_to_target"] for summary in variants[name]])
                ratio = plain_target / own if plain_target is not None and own else None
                column["speed to target, times baseline"] = show(ratio, "{:.2f}x")
    rows = accelerator_facts(runs, accelerators)
    idle = [words for words in rows if all(column[words] == "0" for column in columns.values())]
    return {name: {key: v for key, v in column.items() if key not in idle} for name, column in columns.items()}


def idle_accelerators(runs: Sequence[Run]) -> list[str]:
    """A line on each accelerator that was on and did nothing in all runs of a variant."""
    lines = []
    for kind in accelerators_of(run.folder for run in runs):
        for name, mine in by_variant(run for run in runs if kind.name in run.summary["accelerators"]).items():
            if kind.advice and not any(run.counters.get(counter) for run in mine for counter in kind.counters):
                lines.append(f"{kind.name} had nothing to do in {name}: {kind.advice}")
    return lines


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
        table.add_row(*texts, show(sample["reward"]), verdict(sample["accuracy"]))
    return table


def verdict(accuracy: float | None) -> str:
    """In a word; none where nothing is right or wrong."""
    return "" if accuracy is None else "right" if accuracy > 0.5 else "wrong"


def printable(text: str) -> str:
    """Control characters as escapes, so that no answer can move a cursor or end a document."""
    return "".join(c if c in "\n\t" or c.isprintable() or c == " " else repr(c)[1:-1] for c in text)
