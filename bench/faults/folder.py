"""Two trainers in one folder: one of them trains, the other leaves with a line."""

import random
import time
from collections.abc import Iterator

from bench.faults.case import Case, Outcome, Place, with_


def cases(times: int, seed: int) -> Iterator[Case]:
    for number in range(seed, seed + times):
        yield Case("two trainers at once", "plain", number, with_(both, False))
        yield Case("two trainers at once, --resume", "plain", number, with_(both, True))


def both(place: Place, case: Case, args: tuple[bool]) -> Outcome:
    outcome, untouched = Outcome(), place.untouched()
    rng, (resume,) = random.Random(f"folder/{case.seed}"), args
    first = place.train(resume=resume)
    time.sleep(rng.choice([0.0, rng.uniform(0, 3)]))
    second = place.train(resume=resume)
    second.log = first.log  # of the same name
    ends = [training.end() for training in (first, second)]
    codes = sorted(ended.code if ended.code is not None else -1 for ended in ends)
    outcome.ended = [f"{ended.code}: {ended.line}" for ended in ends]
    # with --resume the second one may come when the first has ended
    outcome.expect(codes == [0, 2] or (resume and codes == [0, 0]), f"exit codes {codes}")
    outcome.expect("Traceback" not in ends[0].said, f"a traceback: {ends[0].line}")
    outcome.expect(not (ends[0].left or ends[1].left), f"left: {ends[0].left + ends[1].left}")
    place.check_resume(outcome, untouched)
    return outcome
