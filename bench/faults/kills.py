"""SIGKILL and SIGTERM at random moments of a run: during set-up, a step, a checkpoint or the end."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bench.faults.case import VARIANTS, Case, Outcome, Place
from bench.faults.training import STEPS, Ended, Training, saved_steps
from python_trainer.run.directory import read_metrics

KILLS = 3  # of one run, in succession
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


def cases(times: int, seed: int) -> Iterator[Case]:
    """Yield ``times`` runs of every variant for each signal."""
    for number in range(seed, seed + times):
        for variant in VARIANTS:
            for kind in SIGNALS:
                yield Case(kind.name, variant, number, kill_and_resume)


def kill_and_resume(place: Place, case: Case) -> Outcome:
    """Kill a run and its resumptions; check that nothing saved is lost and that the final weights do not change."""
    rng = random.Random(f"{case.fault}/{case.variant}/{case.seed}")
    outcome = Outcome(times=0)
    untouched = place.untouched()
    number = signal.Signals[case.fault]
    for _ in range(KILLS):
        training = place.train(resume=place.run.exists())
        rows = training.steps()
        wait(rng, training, untouched)
        saved = max(saved_steps(place.run), default=0)
        trained = training.steps() > rows
        # one rank is killed by the kernel; torchrun passes SIGTERM to all of them
        ranks = [rng.randrange(len(training.processes))] if number == signal.SIGKILL else range(len(training.processes))
        for rank in ranks:
            training.kill(number, rank)
        ended = training.end()
        if number == signal.SIGKILL:
            outcome.times += training.processes[ranks[0]].exitcode == -number
            outcome.ended.append(f"{ended.code}: {ended.line}")
        else:
            outcome.times += "SIGTERM" in ended.output or ended.code == -number
            check_terminated(place, outcome, ended, stopped_early=trained and saved < STEPS)
        place.check_newest(outcome, saved)
        if (place.run / "summary.json").exists():
            break  # the run has finished
    place.check_resume(outcome, untouched)
    return outcome


def wait(rng: random.Random, training: Training, untouched: Path) -> None:
    """Wait for a moment during set-up, in a step or a checkpoint, or while the model is written."""
    run_s = read_metrics(untouched)[-1]["time/wall_s"]
    total_s = (untouched / "summary.json").stat().st_mtime - untouched.with_name("run.yaml").stat().st_mtime
    last_step = training.steps() - 1
    step = rng.randint(-1, STEPS) if last_step < 0 else rng.choice([-1, *range(last_step, STEPS)])
    training.wait_for_step(step)
    time.sleep(rng.uniform(0, max(total_s - run_s, 0) if step < 0 else run_s / STEPS))


def check_terminated(place: Place, outcome: Outcome, ended: Ended, *, stopped_early: bool) -> None:
    """Check the run after SIGTERM; the trainer does not handle it before the run begins or after its end."""
    unnoticed = "SIGTERM" not in ended.output
    place.check_end(outcome, ended, *([0, -signal.SIGTERM] if unnoticed else [0]))
    newest = max(saved_steps(place.run), default=0)
    outcome.expect(unnoticed or "is saved" in ended.output or newest == STEPS, "no word of saving")
    outcome.expect(not (stopped_early and unnoticed and ended.code), "ended without a word in the midst of training")
