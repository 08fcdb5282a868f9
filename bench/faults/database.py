"""The retrospective database locked by another, on a disk that is full, cut off, taken away; PostgreSQL restarted."""

import os
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import _postgres
from bench.faults.case import VARIANTS, Case, Outcome, Place, with_
from bench.faults.training import STEPS, Training, saved_steps
from bench.faults.writes import small_disk

BUSY_SECONDS = 1  # how long the trainer waits here, for the fault that outlasts it


def cases(times: int, seed: int) -> Iterator[Case]:
    for number in range(seed, seed + times):
        yield Case("SQLite: locked for a while", "rhyme", number, with_(locked, 2.0, 60, (0,)))
        yield Case("SQLite: locked for too long", "rhyme", number, with_(locked, 8.0, BUSY_SECONDS, (2,)))
        yield Case("SQLite: cut off", "rhyme", number, with_(changed, cut))
        yield Case("SQLite: taken away", "rhyme", number, with_(changed, taken))
        yield Case("SQLite: its disk full", "rhyme", number, full)
        if _postgres.available():
            yield Case("PostgreSQL: restarted", "rhyme", number, restarted)


def file_of(place: Place) -> Path:
    return place.run.with_name(f"{place.run.name}.db")


def begun(place: Place, seed: int, **options: Any) -> tuple[Training, int]:
    """A run in its midst, and the newest step that it has saved."""
    training = place.train(**options)
    training.wait_for_step(random.Random(f"database/{seed}").randint(1, STEPS - 4))
    return training, max(saved_steps(place.run), default=0)


def locked(place: Place, case: Case, args: tuple[float, int, tuple[int, ...]]) -> Outcome:
    """Another writer holds the lock for some seconds."""
    seconds, patience, codes = args
    outcome, untouched = Outcome(), place.untouched()

    def wait_less() -> None:
        from python_trainer.accelerators.rhyme import reaching

        reaching.BUSY_SECONDS = patience

    training, before = begun(place, case.seed, fault=wait_less)
    other = sqlite3.connect(file_of(place), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    if codes == (0,):
        time.sleep(seconds)
        other.rollback()
    place.check_end(outcome, training.end(), *codes)
    other.close()
    place.check_newest(outcome, before)
    place.check_resume(outcome, untouched)
    return outcome


def cut(path: Path, rng: random.Random) -> None:
    """All files of the database end somewhere."""
    for file in (path, path.with_name(f"{path.name}-wal")):
        with suppress(FileNotFoundError):
            os.truncate(file, rng.randrange(100, max(file.stat().st_size, 101)))


def taken(path: Path, rng: random.Random) -> None:
    for name in ("", "-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)
    path.parent.joinpath(path.name).mkdir()


def changed(place: Place, case: Case, args: tuple[Callable[[Path, random.Random], None]]) -> Outcome:
    """The run ends with a line, and goes on with a database that is new."""
    outcome, untouched, path = Outcome(), place.untouched(), file_of(place)
    training, before = begun(place, case.seed)
    args[0](path, random.Random(f"cut/{case.seed}"))
    place.check_end(outcome, training.end(), 0, 2)
    place.check_newest(outcome, before)
    for name in ("", "-wal", "-shm"):
        file = path.with_name(path.name + name)
        file.rmdir() if file.is_dir() else file.unlink(missing_ok=True)
    place.check_resume(outcome, untouched)
    return outcome


def full(place: Place, case: Case) -> Outcome:
    """The database alone is on a disk that is too small."""
    outcome, untouched = Outcome(), place.untouched()
    disk, kilobytes = place.folder / "disk", random.Random(f"full/{case.seed}").randint(40, 140)
    file_of(place).symlink_to(disk / "history.db")
    with small_disk(disk, kilobytes):
        place.check_end(outcome, place.train().end(), 0, 2)
        place.check_newest(outcome, 0)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        place.check_resume(outcome, untouched)
    return outcome


def restarted(place: Place, case: Case) -> Outcome:
    """The server is killed under load, and comes back."""
    untouched, outcome = place.untouched(), Outcome()
    server = _postgres.start(place.folder / "server")
    changes = {"accelerators": {**VARIANTS["rhyme"]["accelerators"], "rhyme": {"database": server.get_uri()}}}
    training, before = begun(place, case.seed, changes=changes)
    server.cleanup()
    place.check_end(outcome, training.end(), 0, 2)
    place.check_newest(outcome, before)
    server = _postgres.start(place.folder / "server")
    try:
        place.check_resume(outcome, untouched, changes)
    finally:
        server.cleanup()
    return outcome
