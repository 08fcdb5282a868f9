"""Run the arms of a study in turns, over seeds, and read their results.

Each arm of a seed has its own process, which takes one step or one evaluation at a time. All training is charged,
filling a cache included; the tokens and seconds of an earlier run are listed separately. A killed run continues from
its checkpoint; a finished run is not repeated.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from scipy import stats

from bench._turns import Turns, Worker
from python_trainer import Trainer, load_config

TUNING_SEED = 1000  # seed of the runs that choose learning rates; no other run has it
EARLIER_SEED = 100  # seed of the first earlier run; the next ones count up
OTHER_WEIGHTS = "other weights"
SECONDS = "time/training_s"
TOKENS = "total/generated_tokens"
ACCURACY = "eval/accuracy"


def trainer_of(turns: Turns, config: str, overrides: Sequence[str], folder: Path) -> Trainer:
    """Make the trainer of one run, which resumes from its checkpoint and takes one turn at a time."""
    quiet = Console(quiet=True)
    settings = load_config(config, overrides)
    return Trainer(settings, folder, resume=True, callbacks=[turns], console=quiet, timer=turns.clock)


def train(turns: Turns, config: str, overrides: Sequence[str], folder: Path) -> None:
    """Train one run to its end."""
    trainer_of(turns, config, overrides, folder).run()


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: as in the table.
        settings: overrides beyond those of the study. ``{work}`` is the folder that the study prepares,
            ``{earlier}`` the run directory of the earlier run.
        after: name of the earlier run of the study that must finish first.
        rate: learning rate; None: tuned, with as many tries as every other arm.
        train: function that runs in the process, with the arguments of :func:`train`.
    """

    name: str
    settings: Sequence[str] = ()
    after: str | None = None
    rate: float | None = None
    train: Callable[..., None] = train


@dataclass(frozen=True)
class Study:
    """Arms that are compared on one task.

    Attributes:
        name: of its folder and its section.
        config: file of settings.
        common: overrides of all arms.
        arms: the first is the baseline.
        levels: accuracies to which tokens and seconds are counted.
        earlier: runs that must finish before some arms begin; they are no arms.
        rates: learning rates that every arm tries on TUNING_SEED; empty: the rate of the settings.
        tuning_steps: steps of such a try.
        prepare: makes the missing policies and files in the folder ``{work}``.
        columns: further columns, by heading: a key of metrics.jsonl, read from the last row that has it.
        measure: further columns of a finished run, by heading, and under OTHER_WEIGHTS the result of
            ``ranks.other_weights``; called until it returns any.
    """

    name: str
    config: str
    common: Sequence[str]
    arms: Sequence[Arm]
    levels: Sequence[float]
    earlier: Sequence[Arm] = ()
    rates: Sequence[float] = ()
    tuning_steps: int = 0
    prepare: Callable[[Path], None] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    measure: Callable[[Path], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        has_fewer_prompts = any("rollout.prompts_per_step=" in text for arm in self.arms for text in arm.settings)
        assert has_fewer_prompts, f"study {self.name} lacks the rival with fewer prompts a step"


@dataclass(frozen=True)
class Run:
    """One training run of a study: an arm, a seed, a learning rate.

    Attributes:
        folder: the run directory.
        overrides: all settings beyond the file of the study.
        earlier: run directory of the run that must finish first.
    """

    arm: Arm
    seed: int
    rate: float | None
    folder: Path
    overrides: Sequence[str]
    earlier: Path | None

    def finished(self) -> bool:
        return (self.folder / "summary.json").exists()


def fewer_prompts(prompts: int, *, divisors: Sequence[int] = (2, 4), settings: Sequence[str] = ()) -> list[Arm]:
    """Make the simplest rivals: arms with half and a quarter of the prompts a step.

    Args:
        prompts: number in a step of the baseline.
        settings: overrides of the baseline.
    """
    names = {2: "half of the prompts", 4: "a quarter of the prompts"}
    return [Arm(names[divisor], [*settings, f"rollout.prompts_per_step={prompts // divisor}"]) for divisor in divisors]


def at_rate(study: Study, rate: float | None) -> Study:
    """Give the baseline this learning rate and other arms their multiple of it, without tuning; None: no change."""
    if rate is None:
        return study
    baseline_rate = study.arms[0].rate
    factors = [arm.rate / baseline_rate if arm.rate and baseline_rate else 1.0 for arm in study.arms]
    arms = [replace(arm, rate=rate * factor) for arm, factor in zip(study.arms, factors)]
    return replace(study, arms=arms, rates=())


class Harness:
    """The runs of a study below one folder.

    Args:
        output: folder of all studies' runs.
        overrides: further settings of every run.
        arms: names of the arms to run; None: all.
        jobs: runs that train at the same time.
        stop_after: seconds after which no round of turns begins; runs save and stop, and a later call resumes them.
    """

    def __init__(
        self,
        study: Study,
        output: Path,
        overrides: Sequence[str] = (),
        arms: Sequence[str] | None = None,
        *,
        jobs: int = 1,
        stop_after: float = math.inf,
    ):
        self.study = study
        self.overrides = overrides
        self.jobs = jobs
        self.deadline = time.monotonic() + stop_after
        self.folder = output.absolute() / study.name
        self.work = output.absolute() / "work"
        self.arms = [arm for arm in study.arms if arms is None or arm.name in arms]

    def run_all(self, seeds: int) -> None:
        """Prepare, choose the learning rates, and train every arm on every seed."""
        if self.study.prepare is not None:
            self.work.mkdir(parents=True, exist_ok=True)
            self.study.prepare(self.work)
        tuned = [arm for arm in self.arms if arm.rate is None] if self.study.rates else []
        self._take_turns(tuned, 0, [self.tuning_run(arm, rate) for arm in tuned for rate in self.study.rates])
        for seed in range(seeds):
            if self._is_late():
                return  # rates may not be chosen yet
            self._take_turns(self.arms, seed, [self.run_of(arm, seed) for arm in self.arms])

    def run_of(self, arm: Arm, seed: int) -> Run:
        """Return the run of an arm at its fixed or tuned learning rate."""
        rate = self.best_rate(arm) if arm.rate is None and self.study.rates else arm.rate
        return self._run(arm, seed, rate, f"seed-{seed}", [], earlier_number=seed)

    def tuning_run(self, arm: Arm, rate: float) -> Run:
        """Return the run that tries a learning rate, after the earlier run of the first seed."""
        settings = [f"max_steps={self.study.tuning_steps}"]
        return self._run(arm, TUNING_SEED, rate, f"rate-{rate:g}", settings, earlier_number=0)

    def earlier_run(self, name: str, number: int) -> Run:
        arm = next(arm for arm in self.study.earlier if arm.name == name)
        seed = EARLIER_SEED + number
        return self._run(arm, seed, arm.rate, f"seed-{seed}", [], earlier_number=number)

    def _run(
        self, arm: Arm, seed: int, rate: float | None, name: str, settings: Sequence[str], *, earlier_number: int
    ) -> Run:
        earlier = None if arm.after is None else self.earlier_run(arm.after, earlier_number).folder
        overrides = [*self.study.common, *arm.settings, *self.overrides, *settings, f"seed={seed}"]
        if rate is not None:
            overrides.append(f"optimizer.learning_rate={rate:g}")
        overrides = [text.replace("{work}", str(self.work)).replace("{earlier}", str(earlier)) for text in overrides]
        slug = arm.name.replace(" %", "").replace(",", "").replace(" ", "-")
        return Run(arm, seed, rate, self.folder / slug / name, overrides, earlier)

    def best_rate(self, arm: Arm) -> float:
        """Return the rate with the highest mean accuracy in the second half of its evaluations, the lowest of ties."""

        def score(rate: float) -> tuple[float, float]:
            accuracies = [accuracy for *_, accuracy in evaluations(self.tuning_run(arm, rate).folder)]
            return fmean(accuracies[len(accuracies) // 2 :]), -rate

        return max(self.study.rates, key=score)

    def _take_turns(self, arms: Sequence[Arm], number: int, runs: Sequence[Run]) -> None:
        """Train these runs and their earlier runs, one turn each, until all have finished or the time is up."""
        earlier_names = dict.fromkeys(arm.after for arm in arms if arm.after)
        runs = [*(self.earlier_run(name, number) for name in earlier_names), *runs]
        for run in runs:
            check_same(run)
        waiting = [run for run in runs if not run.finished()]
        active: list[Worker] = []
        try:
            with ThreadPoolExecutor(self.jobs) as pool:
                while (waiting or active) and not self._is_late():
                    ready = [run for run in waiting if run.earlier is None or (run.earlier / "summary.json").exists()]
                    waiting = [run for run in waiting if run not in ready]
                    active += [Worker(run.arm.train, self.study.config, run.overrides, run.folder) for run in ready]
                    unfinished = list(pool.map(lambda worker: worker.turn(), active))
                    active = [worker for worker, is_unfinished in zip(active, unfinished) if is_unfinished]
                list(pool.map(lambda worker: worker.finish(), active))
        finally:
            for worker in active:
                worker.stop()

    def _is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def rows(self, seeds: int, *, measure: bool = True) -> list[dict[str, Any]]:
        """Return a row for each finished run; without ``measure`` only with figures that were measured before."""
        tuned = [arm for arm in self.study.arms if arm.rate is not None or self._is_tuned(arm)]
        runs = [self.run_of(arm, seed) for arm in tuned for seed in range(seeds)]
        return [row_of(self.study, run, measure=measure) for run in runs if run.finished()]

    def _is_tuned(self, arm: Arm) -> bool:
        return all(self.tuning_run(arm, rate).finished() for rate in self.study.rates)


def check_same(run: Run) -> None:
    """Store the settings of a run in a file next to it; refuse to resume a run of other settings."""
    path = run.folder.with_name(f"{run.folder.name}.json")
    if path.exists() and json.loads(path.read_text()) != list(run.overrides):
        raise SystemExit(f"{run.folder} was begun with other settings ({path}): move it away, or give another --output")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(run.overrides)))


def evaluations(folder: Path) -> list[tuple[int, float, float, float]]:
    """Return (step, generated tokens, seconds, accuracy) of every evaluation of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row.get(TOKENS, 0), row.get(SECONDS, 0.0), row[ACCURACY]) for row in rows if ACCURACY in row]


def row_of(study: Study, run: Run, *, measure: bool = True) -> dict[str, Any]:
    """Return the row of a finished run; without ``measure`` only with figures that were measured before."""
    path = evaluations(run.folder)
    summary = json.loads((run.folder / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    row: dict[str, Any] = {
        "study": study.name, "arm": run.arm.name, "seed": run.seed, "rate": run.rate, "steps": summary["steps"],
        "tokens": summary["generated_tokens"], "seconds": path[-1][2], "accuracy": summary["eval_accuracy_final"],
        "evaluations": path, "device": summary["device"],
        "reached": {f"{level:g}": reached(path, level) for level in study.levels},
    }  # fmt: skip
    more = {}
    for heading, key in study.columns.items():
        more[heading] = next((metric[key] for metric in reversed(metrics) if metric.get(key) is not None), None)
    if run.earlier is not None:
        _, tokens, seconds, _ = evaluations(run.earlier)[-1]
        row |= {"earlier tokens": tokens, "earlier seconds": seconds}
    measured_path = run.folder / "measured.json"
    unfinished_path = run.folder / "other_weights.json"  # by a measurement that was killed
    if study.measure is not None and measure and not measured_path.exists():
        measured = study.measure(run.folder)
        if measured:  # else it waits for another run
            measured_path.write_text(json.dumps(measured))
    if measured_path.exists():
        more |= json.loads(measured_path.read_text())
    elif unfinished_path.exists():
        more[OTHER_WEIGHTS] = json.loads(unfinished_path.read_text())
    return row | {"more": more}


def reached(path: Sequence[Sequence[float]], level: float) -> tuple[float, float] | None:
    """Return tokens and seconds at the first of two successive evaluations at the level; None: there are none."""
    for (_, tokens, seconds, accuracy), (*_, next_accuracy) in pairwise(path):
        if min(accuracy, next_accuracy) >= level:
            return tokens, seconds
    return None


@dataclass(frozen=True)
class Interval:
    """Mean over seeds and its 95 % interval by Student's t; one seed has no interval."""

    mean: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean = fmean(values)
        if len(values) < 2:
            return cls(mean)
        half_width = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half_width, mean + half_width)

    def text(self, form: Callable[[float], str]) -> str:
        if self.low is None or self.high is None:
            return form(self.mean)
        return f"{form(self.mean)} [{form(self.low)}, {form(self.high)}]"


def paired(rows: Sequence[Mapping[str, Any]], other_rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Return pairs of rows of two arms that have the same seed."""
    by_seed = {row["seed"]: row for row in other_rows}
    return [(row, by_seed[row["seed"]]) for row in rows if row["seed"] in by_seed]
