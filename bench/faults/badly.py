"""A reward function that hangs, leaves a process, writes to the terminal or ends the process."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.faults.case import Case, Outcome, Place, with_
from bench.faults.training import Training, differences

FILE = "FAULT_FILE"


def cases(times: int, seed: int) -> Iterator[Case]:
    for number in range(seed, seed + times):
        yield Case("a reward that hangs, with task.reward_timeout", "plain", number, timed_out)
        yield Case("a reward that hangs, SIGTERM twice", "plain", number, interrupted)
        yield Case("a reward that ends the process", "plain", number, ended_by_it)
        yield Case("a reward that forks", "plain", number, with_(harmless, "forks"))
        yield Case("a reward that writes to the terminal", "plain", number, with_(harmless, "writes"))


class _Fault:
    """Tells the reward function from where on it does what it should not."""

    def __init__(self, file: Path):
        self.file = file

    def __call__(self) -> None:
        os.environ[FILE] = str(self.file)


def _bad_from_step_3(place: Place, reward: str, **more: Any) -> tuple[Outcome, Path, dict[str, Any], Training]:
    values: dict[str, Any] = {"task": {"reward": f"bench.faults.rewards:{reward}", **more}}
    untouched = place.untouched(reward, values)
    file = place.folder / "bad"
    training = place.train(changes=values, fault=_Fault(file))
    training.wait_for_step(3)
    file.touch()
    return Outcome(), untouched, values, training


def timed_out(place: Place, case: Case) -> Outcome:
    outcome, untouched, values, training = _bad_from_step_3(place, "hangs", reward_timeout=2.0)
    ended = training.end()
    place.check_end(outcome, ended, 2)
    outcome.expect("reward_timeout" in ended.said and "is saved" in ended.said, f"it did not say so: {ended.line}")
    place.check_newest(outcome, 3)
    place.check_resume(outcome, untouched, values)
    return outcome


def interrupted(place: Place, case: Case) -> Outcome:
    outcome, untouched, values, training = _bad_from_step_3(place, "hangs")
    time.sleep(2)
    for _ in range(2):
        training.kill(signal.SIGTERM)
        time.sleep(1)
    ended = training.end()
    place.check_end(outcome, ended, 130)
    place.check_newest(outcome, 3)
    place.check_resume(outcome, untouched, values)
    return outcome


def ended_by_it(place: Place, case: Case) -> Outcome:
    outcome, untouched, values, training = _bad_from_step_3(place, "exits")
    place.check_end(outcome, training.end(), 7)  # nothing can be said any more
    place.check_newest(outcome, 3)
    place.check_resume(outcome, untouched, values)
    return outcome


def harmless(place: Place, case: Case, args: tuple[str]) -> Outcome:
    """The run is as without it, but for the name of the reward in its metrics."""
    outcome, values = Outcome(), {"task": {"reward": f"bench.faults.rewards:{args[0]}"}}
    ended = place.train(changes=values).end()
    place.check_end(outcome, ended, 0)
    outcome.problems += [text for text in differences(place.run, place.untouched()) if not text.startswith("rows")]
    return outcome
