"""What a report begins with: one sentence on each variant, and what keeps its numbers from being compared."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from python_trainer.report.intervals import Interval
from python_trainer.report.runs import BASELINE, Run, by_variant
from python_trainer.report.tables import difference


def verdicts(runs: Sequence[Run]) -> list[str]:
    """A sentence on each variant against the baseline; where there is nothing to compare, on each variant by itself."""
    variants = by_variant(runs)
    if BASELINE not in variants or len(variants) == 1:
        return [alone(name, mine) for name, mine in variants.items()]
    plain = variants[BASELINE]
    return [against(name, mine, plain) for name, mine in variants.items() if name != BASELINE]


def alone(name: str, runs: Sequence[Run]) -> str:
    """``run: accuracy 54.0 % -> 84.0 % in 12 steps, 110 s, 98,304 generated tokens``."""
    before, after = (_mean(runs, f"eval_accuracy_{part}") for part in ("start", "final"))
    gained = "no evaluation" if before is None or after is None else f"accuracy {before:.1%} -> {after:.1%}"
    steps, seconds, tokens = (_mean(runs, key) or 0.0 for key in ("steps", "training_s", "generated_tokens"))
    seeds = f", means of {len(runs)} seeds" if len(runs) > 1 else ""
    return f"{name}: {gained} in {steps:.0f} steps, {seconds:,.0f} s, {tokens:,.0f} generated tokens{seeds}"


def against(name: str, runs: Sequence[Run], plain: Sequence[Run]) -> str:
    """``all: 45 % fewer generated tokens, 30 % less time, accuracy 1.3 points lower (95 %: -2.2 to -0.4)``."""
    tokens = _change(_mean(runs, "generated_tokens"), _mean(plain, "generated_tokens"), "fewer", "more")
    seconds = _change(_mean(runs, "training_s"), _mean(plain, "training_s"), "less", "more")
    return f"{name}: {tokens} generated tokens, {seconds} time, {_accuracy(difference(runs, plain))}"


def _change(ours: float | None, theirs: float | None, less: str, more: str) -> str:
    if not ours or not theirs:
        return "an unknown number of" if less == "fewer" else "unknown"
    share = ours / theirs - 1
    return "as many" if abs(share) < 0.005 and less == "fewer" else f"{abs(share):.0%} {less if share < 0 else more}"


def _accuracy(change: Interval | None) -> str:
    if change is None:
        return "accuracy not comparable (no evaluations of the same prompts and seeds)"
    span = f"95 %: {100 * change.low:+.1f} to {100 * change.high:+.1f} points"
    if not change.resolved:
        return f"accuracy not told apart ({span})"
    return f"accuracy {abs(100 * change.value):.1f} points {'lower' if change.value < 0 else 'higher'} ({span})"


def caveats(runs: Sequence[Run]) -> list[str]:
    """What a reader of the numbers must know: variants that did not do the same, and runs that have not ended."""
    lines = [f"{run.label} has not ended: this is what there is up to step {run.summary['steps']}" for run in runs
             if not run.ended]  # fmt: skip
    steps = {name: fmean(run.summary["steps"] for run in mine) for name, mine in by_variant(runs).items()}
    if len(steps) > 1 and max(steps.values()) > 1.02 * min(steps.values()):
        made = ", ".join(f"{name} {count:.0f}" for name, count in steps.items())
        lines.append(
            f"the variants made different numbers of steps ({made}): differences of accuracy at the end are not "
            "between equal steps, nor equal numbers of tokens; compare the curves at equal seconds or tokens"
        )
    return lines


def _mean(runs: Sequence[Run], key: str) -> float | None:
    values: list[Any] = [run.summary[key] for run in runs]
    return None if None in values else fmean(values)
