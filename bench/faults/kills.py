"""SIGKILL and SIGTERM at random moments: to the trainer, one of two ranks."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.faults.case import VARIANTS, Case, Outcome, Place, with_
from bench.faults.training import STEPS, Ended, Training, saved_steps
from python_trainer.run_directory import read_metrics

KILLS = 3  # of one run, one after the other


@dataclass
class Moment:
    """Of a run, just before it is struck."""

    saved: int  # newest step with a checkpoint
    trained: bool  # it has gone on from where it was when it began


Strike = Callable[[random.Random, Training], Callable[[Ended], bool]]  # tells afterwards whether it hit
Judge = Callable[[Place, Outcome, Moment, Ended], None]


def cases(times: int, seed: int) -> Iterator[Case]:
    """``times`` runs of every variant for each signal."""
    for number in range(seed, seed + times):
        for variant in VARIANTS:
            yield Case("SIGKILL", variant, number, with_(struck, kill, judge_killed))
            yield Case("SIGTERM", variant, number, with_(struck, terminate, judge_terminated))


def struck(place: Place, case: Case, args: tuple[Strike, Judge]) -> Outcome:
    """A run and each resumption of it is struck; what it had saved is there, and it ends as if nothing had been."""
    strike, judge = args
    rng, outcome = random.Random(f"{case.fault}/{case.variant}/{case.seed}"), Outcome(times=0)
    untouched = place.untouched()
    for _ in range(KILLS):
        training = place.train(resume=place.run.exists())
        rows = training.steps()
        wait(rng, training, untouched)
        moment = Moment(max(saved_steps(place.run), default=0), training.steps() > rows)
        hit = strike(rng, training)
        ended = training.end()
        outcome.times += hit(ended)
        judge(place, outcome, moment, ended)
        place.check_newest(outcome, moment.saved)
        if (place.run / "summary.json").exists():
            break  # there is nothing left to strike
    place.check_resume(outcome, untouched)
    return outcome


def wait(rng: random.Random, training: Training, untouched: Path) -> None:
    """For a moment: while it is set up, in a step or a checkpoint, or while the model is written."""
    run = read_metrics(untouched)[-1]["time/wall_s"]
    whole = (untouched / "summary.json").stat().st_mtime - untouched.with_name("run.yaml").stat().st_mtime
    done = training.steps() - 1
    after = rng.randint(-1, STEPS) if done < 0 else rng.choice([-1, *range(done, STEPS)])
    training.wait_for_step(after)
    time.sleep(rng.uniform(0, max(whole - run, 0) if after < 0 else run / STEPS))


def kill(rng: random.Random, training: Training) -> Callable[[Ended], bool]:
    """One of the ranks."""
    rank = rng.randrange(len(training.processes))
    training.kill(signal.SIGKILL, rank)
    return lambda ended: training.processes[rank].exitcode == -signal.SIGKILL


def judge_killed(place: Place, outcome: Outcome, moment: Moment, ended: Ended) -> None:
    outcome.ended.append(f"{ended.code}: {ended.line}")
    outcome.expect(not ended.left, f"left: {', '.join(ended.left)}")


def terminate(rng: random.Random, training: Training) -> Callable[[Ended], bool]:
    """All ranks: torchrun passes it on."""
    for rank in range(len(training.processes)):
        training.kill(signal.SIGTERM, rank)
    return lambda ended: "SIGTERM" in ended.said or ended.code == -signal.SIGTERM


def judge_terminated(place: Place, outcome: Outcome, moment: Moment, ended: Ended) -> None:
    """Nothing waits for the signal before the run begins, or after its end."""
    over = "SIGTERM" not in ended.said
    place.check_end(outcome, ended, *([0, -signal.SIGTERM] if over else [0]))
    newest = max(saved_steps(place.run), default=0)
    outcome.expect(over or "is saved" in ended.said or newest == STEPS, "no word of saving")
    in_its_midst = moment.trained and moment.saved < STEPS
    outcome.expect(not (in_its_midst and over and ended.code), "ended without a word in the midst")
