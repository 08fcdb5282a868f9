"""Runs the arms of a study in turns, over seeds, and reads what came of them.

Every arm of a seed is a process of its own that takes one step or one evaluation at a time. All training is charged,
filling a cache included; the tokens and seconds of an earlier run are kept apart. A run that was killed continues from
its checkpoint, a finished one is kept.
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

TUNING_SEED = 1000  # of the runs that choose learning rates; no other run has it
EARLIER_SEED = 100  # earlier runs have this seed and those after it
OTHER_WEIGHTS = "other weights"
SECONDS, TOKENS, ACCURACY = "time/training_s", "total/generated_tokens", "eval/accuracy"


def trainer_of(turns: Turns, config: str, overrides: Sequence[str], folder: Path) -> Trainer:
    """Make the trainer of one run, which goes on from its checkpoint and takes a turn at a time."""
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
        settings: overrides beyond those of the study. ``{work}`` is the folder of what the study prepares,
            ``{earlier}`` the run directory of the earlier run.
        after: name of the earlier run of the study that must be over first.
        rate: learning rate; None: tuned, with as many tries as every other arm.
        train: what runs in the process, with the arguments of :func:`train`.
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
        earlier: runs that arms begin after; no arms of their own.
        rates: learning rates that every arm tries on a seed of its own; empty: the rate of the settings.
        tuning_steps: steps of such a try.
        prepare: makes policies and files in the folder ``{work}``, where they are missing.
        columns: more figures of a run, by heading: a key of metrics.jsonl, of the last row that has it.
        measure: more figures of a finished run, by heading, and under OTHER_WEIGHTS what ``ranks.other_weights``
            returns; called once a run, and again while it returns none.
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
        fewer = any("rollout.prompts_per_step=" in text for arm in self.arms for text in arm.settings)
        assert fewer, f"study {self.name} lacks the rival with fewer prompts a step"


@dataclass(frozen=True)
class Run:
    """One training of a study: an arm, a seed, a learning rate.

    Attributes:
        folder: the run directory.
        overrides: all settings beyond the file of the study.
        earlier: run directory of the run that must be over first.
    """

    arm: Arm
    seed: int
    rate: float | None
    folder: Path
    overrides: Sequence[str]
    earlier: Path | None

    def finished(self) -> bool:
        return (self.folder / "summary.json").exists()


def fewer_prompts(prompts: int, *, parts: Sequence[int] = (2, 4), settings: Sequence[str] = ()) -> list[Arm]:
    """Make the simplest rivals: half and a quarter of the prompts a step.

    Args:
        prompts: of a step of the baseline.
        settings: overrides of the baseline.
    """
    names = {2: "half of the prompts", 4: "a quarter of the prompts"}
    return [Arm(names[part], [*settings, f"rollout.prompts_per_step={prompts // part}"]) for part in parts]


def at_rate(study: Study, rate: float | None) -> Study:
    """Give the baseline this learning rate, other arms their multiple of it, and tune none; None: no change."""
    if rate is None:
        return study
    first = study.arms[0].rate
    times = [arm.rate / first if arm.rate and first else 1.0 for arm in study.arms]
    arms = [replace(arm, rate=rate * factor) for arm, factor in zip(study.arms, times)]
    return replace(study, arms=arms, rates=())


class Harness:
    """The runs of a study below one folder.

    Args:
        output: folder of all studies' runs.
        overrides: further settings of every run.
        arms: names of the arms that are run; None: all.
        jobs: runs that take their turn at the same time.
        stop_after: seconds after which no round of turns begins; runs save and end, and a later call goes on.
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
        self.study, self.overrides, self.jobs = study, overrides, jobs
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
        """The run of an arm at its own or its tuned learning rate."""
        rate = self.best_rate(arm) if arm.rate is None and self.study.rates else arm.rate
        return self._run(arm, seed, rate, f"seed-{seed}", [], seed)

    def tuning_run(self, arm: Arm, rate: float) -> Run:
        """The run of a try; the earlier run is that of the first seed."""
        return self._run(arm, TUNING_SEED, rate, f"rate-{rate:g}", [f"max_steps={self.study.tuning_steps}"], 0)

    def earlier_run(self, name: str, number: int) -> Run:
        arm = next(arm for arm in self.study.earlier if arm.name == name)
        seed = EARLIER_SEED + number
        return self._run(arm, seed, arm.rate, f"seed-{seed}", [], number)

    def _run(self, arm: Arm, seed: int, rate: float | None, name: str, more: Sequence[str], number: int) -> Run:
        earlier = None if arm.after is None else self.earlier_run(arm.after, number).folder
        overrides = [*self.study.common, *arm.settings, *self.overrides, *more, f"seed={seed}"]
        if rate is not None:
            overrides.append(f"optimizer.learning_rate={rate:g}")
        overrides = [text.replace("{work}", str(self.work)).replace("{earlier}", str(earlier)) for text in overrides]
        slug = arm.name.replace(" %", "").replace(",", "").replace(" ", "-")
        return Run(arm, seed, rate, self.folder / slug / name, overrides, earlier)

    def best_rate(self, arm: Arm) -> float:
        """The rate of the highest mean accuracy over the second half of its evaluations; of equal ones the lowest."""

        def score(rate: float) -> tuple[float, float]:
            found = evaluations(self.tuning_run(arm, rate).folder)
            return fmean(accuracy for *_, accuracy in found[len(found) // 2 :]), -rate

        return max(self.study.rates, key=score)

    def _take_turns(self, arms: Sequence[Arm], number: int, runs: Sequence[Run]) -> None:
        """Train these runs, and the earlier ones they need, a turn each until all are over or it is late."""
        earlier = [self.earlier_run(name, number) for name in dict.fromkeys(arm.after for arm in arms if arm.after)]
        runs = [*earlier, *runs]
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
                    left = list(pool.map(lambda worker: worker.turn(), active))
                    active = [worker for worker, goes_on in zip(active, left) if goes_on]
                list(pool.map(lambda worker: worker.finish(), active))
        finally:
            for worker in active:
                worker.stop()

    def _is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def rows(self, seeds: int, *, measure: bool = True) -> list[dict[str, Any]]:
        """The figures of all runs that are over; without ``measure`` those that are known."""
        tuned = [arm for arm in self.study.arms if arm.rate is not None or self._is_tuned(arm)]
        runs = [self.run_of(arm, seed) for arm in tuned for seed in range(seeds)]
        return [row_of(self.study, run, measure=measure) for run in runs if run.finished()]

    def _is_tuned(self, arm: Arm) -> bool:
        return all(self.tuning_run(arm, rate).finished() for rate in self.study.rates)


def check_same(run: Run) -> None:
    """Keep the settings of a run beside it, and refuse to go on with a run of other settings."""
    path = run.folder.with_name(f"{run.folder.name}.json")
    if path.exists() and json.loads(path.read_text()) != list(run.overrides):
        raise SystemExit(f"{run.folder} was begun with other settings ({path}): move it away, or give another --output")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(run.overrides)))


def evaluations(folder: Path) -> list[tuple[int, float, float, float]]:
    """(step, generated tokens, seconds, accuracy) of every evaluation of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row.get(TOKENS, 0), row.get(SECONDS, 0.0), row[ACCURACY]) for row in rows if ACCURACY in row]


def row_of(study: Study, run: Run, *, measure: bool = True) -> dict[str, Any]:
    """The figures of a finished run; without ``measure`` those that are known."""
    found, summary = evaluations(run.folder), json.loads((run.folder / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    row: dict[str, Any] = {
        "study": study.name, "arm": run.arm.name, "seed": run.seed, "rate": run.rate, "steps": summary["steps"],
        "tokens": summary["generated_tokens"], "seconds": found[-1][2], "accuracy": summary["eval_accuracy_final"],
        "evaluations": found, "device": summary["device"],
        "reached": {f"{level:g}": reached(found, level) for level in study.levels},
    }  # fmt: skip
    more = {}
    for heading, key in study.columns.items():
        more[heading] = next((metric[key] for metric in reversed(metrics) if metric.get(key) is not None), None)
    if run.earlier is not None:
        last = evaluations(run.earlier)[-1]
        row |= {"earlier tokens": last[1], "earlier seconds": last[2]}
    whole, part = run.folder / "measured.json", run.folder / "other_weights.json"
    if study.measure is not None and measure and not whole.exists():
        measured = study.measure(run.folder)
        if measured:  # else it waits for another run
            whole.write_text(json.dumps(measured))
    if whole.exists():
        more |= json.loads(whole.read_text())
    elif part.exists():
        more[OTHER_WEIGHTS] = json.loads(part.read_text())
    return row | {"more": more}


def reached(found: Sequence[Sequence[float]], level: float) -> tuple[float, float] | None:
    """Tokens and seconds at the first of two successive evaluations that are at the level; None: there are none."""
    for before, after in pairwise(found):
        if min(before[3], after[3]) >= level:
            return before[1], before[2]
    return None


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % interval by Student's t; with one seed there is no interval."""

    mean: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean = fmean(values)
        if len(values) < 2:
            return cls(mean)
        reach = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - reach, mean + reach)

    def text(self, form: Callable[[float], str]) -> str:
        if self.low is None or self.high is None:
            return form(self.mean)
        return f"{form(self.mean)} [{form(self.low)}, {form(self.high)}]"


def paired(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Rows of two arms, seed by seed."""
    by_seed = {row["seed"]: row for row in others}
    return [(row, by_seed[row["seed"]]) for row in rows if row["seed"] in by_seed]
