"""No memory left for the trainer while it is at work: it gets a limit on its address space."""

import random
import resource
from collections.abc import Iterator
from contextlib import suppress

from bench.faults.case import Case, Outcome, Place
from bench.faults.training import STEPS, saved_steps


def cases(times: int, seed: int) -> Iterator[Case]:
    for number in range(seed, seed + times):
        for variant in ("plain", "all accelerators", "ppo"):
            yield Case("the trainer out of memory", variant, number, trainer)


def trainer(place: Place, case: Case) -> Outcome:
    """No more address space than it has."""
    rng, outcome, untouched = random.Random(f"memory/{case.seed}"), Outcome(), place.untouched()
    training = place.train()
    training.wait_for_step(rng.randint(1, STEPS // 2))
    before = max(saved_steps(place.run), default=0)
    for pid in training.pids:
        with suppress(ProcessLookupError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
    ended = training.end()
    outcome.times = int(ended.code != 0)  # where what it had was not enough
    place.check_end(outcome, ended, 0, 2)
    place.check_newest(outcome, before)
    place.check_resume(outcome, untouched)
    # an evaluation that failed is made at resume, when the row of its step has been written
    outcome.problems = [text for text in outcome.problems if "evaluations" not in text and "rows" not in text]
    return outcome
