"""SIGKILL and SIGTERM at random moments of a run: during set-up, a step, a checkpoint or the end."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bench.faults.case import VARIANTS, Case, Outcome, Place
from bench.faults.training import STEPS, Ended, Training, saved_steps
from python_trainer.run_directory import read_metrics

KILLS = 3  # of one run, one after the other
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


def cases(times: int, seed: int) -> Iterator[Case]:
    """``times`` runs of every variant for each signal."""
    for number in range(seed, seed + times):
        for variant in VARIANTS:
            for sent in SIGNALS:
                yield Case(sent.name, variant, number, kill_and_resume)


def kill_and_resume(place: Place, case: Case) -> Outcome:
    """Kill a run and its resumptions; nothing saved is lost, and the weights at the end are those of a quiet run."""
    rng, outcome = random.Random(f"{case.fault}/{case.variant}/{case.seed}"), Outcome(times=0)
    untouched, sent = place.untouched(), signal.Signals[case.fault]
    for _ in range(KILLS):
        training = place.train(resume=place.run.exists())
        rows = training.steps()
        wait(rng, training, untouched)
        saved, trained = max(saved_steps(place.run), default=0), training.steps() > rows
        # one rank is killed by the kernel; torchrun passes SIGTERM to all of them
        ranks = [rng.randrange(len(training.processes))] if sent == signal.SIGKILL else range(len(training.processes))
        for rank in ranks:
            training.kill(sent, rank)
        ended = training.end()
        if sent == signal.SIGKILL:
            outcome.times += training.processes[ranks[0]].exitcode == -sent
            outcome.ended.append(f"{ended.code}: {ended.line}")
        else:
            outcome.times += "SIGTERM" in ended.said or ended.code == -sent
            check_terminated(place, outcome, ended, stopped_early=trained and saved < STEPS)
        place.check_newest(outcome, saved)
        if (place.run / "summary.json").exists():
            break  # the run is over
    place.check_resume(outcome, untouched)
    return outcome


def wait(rng: random.Random, training: Training, untouched: Path) -> None:
    """Wait for a moment during set-up, in a step or a checkpoint, or while the model is written."""
    run = read_metrics(untouched)[-1]["time/wall_s"]
    whole = (untouched / "summary.json").stat().st_mtime - untouched.with_name("run.yaml").stat().st_mtime
    done = training.steps() - 1
    after = rng.randint(-1, STEPS) if done < 0 else rng.choice([-1, *range(done, STEPS)])
    training.wait_for_step(after)
    time.sleep(rng.uniform(0, max(whole - run, 0) if after < 0 else run / STEPS))


def check_terminated(place: Place, outcome: Outcome, ended: Ended, *, stopped_early: bool) -> None:
    """Check what SIGTERM left; the trainer does not handle it before the run begins or after its end."""
    unnoticed = "SIGTERM" not in ended.said
    place.check_end(outcome, ended, *([0, -signal.SIGTERM] if unnoticed else [0]))
    newest = max(saved_steps(place.run), default=0)
    outcome.expect(unnoticed or "is saved" in ended.said or newest == STEPS, "no word of saving")
    outcome.expect(not (stopped_early and unnoticed and ended.code), "ended without a word in the midst of training")
