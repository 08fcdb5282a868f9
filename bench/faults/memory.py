"""No memory left for the trainer, or for a worker, while it is at work.

The trainer gets a limit on its address space. A worker of so small a policy needs nothing that it does not have, so one
of them takes all that there is, in the midst of its passes: up to a limit on its address space, or up to that of a
memory cgroup, where the kernel kills it.
"""

import os
import random
import resource
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.faults.case import Case, Outcome, Place, with_
from bench.faults.training import STEPS, saved_steps

CGROUPS = Path("/sys/fs/cgroup/memory")  # of version 1; one must be root to make one
CGROUP_BYTES = 1 << 22
PIECES = [1 << bits for bits in range(24, 8, -1)]  # bytes; what is smaller does not come from the system


def cases(times: int, seed: int) -> Iterator[Case]:
    for number in range(seed, seed + times):
        for variant in ("plain", "all accelerators", "ppo"):
            yield Case("the trainer out of memory", variant, number, trainer)
        yield Case("a worker out of memory", "workers", number, with_(worker, False))
        if os.access(CGROUPS / "cgroup.procs", os.W_OK):
            yield Case("a worker killed by the kernel, out of memory", "workers", number, with_(worker, True))


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


def worker(place: Place, case: Case, args: tuple[bool]) -> Outcome:
    """One of two, killed by the kernel or with a limit on its address space."""
    (killed,) = args
    rng, outcome, untouched = random.Random(f"worker memory/{case.seed}"), Outcome(), place.untouched()
    file, group = place.folder / "now", CGROUPS / f"rlkernels-{os.getpid()}"
    training = place.train(fault=Greed(file, rng.choice([0, 1 << 12, 1 << 16])))
    training.wait_for_step(rng.randint(1, STEPS // 2))
    before = max(saved_steps(place.run), default=0)
    if killed:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(CGROUP_BYTES))
    file.with_name("soon").write_text(str(group) if killed else "")
    file.with_name("soon").rename(file)
    ended = training.end()
    outcome.times = int(not file.exists())  # a worker has taken it
    place.check_end(outcome, ended, 2)
    outcome.expect("rollout worker" in ended.said and "out of memory" in ended.said, f"it did not say so: {ended.line}")
    place.check_newest(outcome, before)
    place.check_resume(outcome, untouched)
    if killed:
        group.rmdir()
    return outcome


class Greed:
    """Lets the first worker that finds a file take all memory there is.

    Args:
        file: holds the cgroup that the worker joins; empty: it limits its own address space.
        leave: bytes that it gives back, so that memory ends later.
    """

    def __init__(self, file: Path, leave: int):
        self.file, self.leave = file, leave

    def __call__(self) -> None:
        """In the trainer, before it starts workers."""
        from python_trainer.rollout.workers import pool

        pool.serve = partial(serve_greedily, self.file, self.leave)


def serve_greedily(file: Path, leave: int, connection: Connection, setup: Any) -> None:
    """Takes the place of ``serve`` in a worker."""
    from python_trainer.rollout.paged.engine import Session
    from python_trainer.rollout.workers import process

    step, kept = Session.step, list[bytes]()

    def greedy(session: Session) -> Any:
        with suppress(FileNotFoundError):
            group = file.rename(file.with_name("taken")).read_text()  # by one worker alone
            take_all(group, kept, leave)
        return step(session)

    Session.step = greedy  # type: ignore[method-assign, assignment]
    process.serve(connection, setup)


def take_all(group: str, kept: list[bytes], leave: int) -> None:
    """All memory of this process, but for some bytes; it is killed where it is in a cgroup."""
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
    spare = [bytes(leave)]
    for size in PIECES:
        with suppress(MemoryError):
            while True:
                kept.append(b"x" * size)
    spare.clear()
