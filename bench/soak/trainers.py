"""Four trainers that write to one retrospective database for long, while one of them is killed now and then."""

import argparse
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import _postgres
from bench.faults.training import Ended, Training, make_inputs, saved_steps, write_settings
from python_trainer.accelerators.rhyme.database import KEEP_SHARE, ROW_BYTES, RetrospectiveDatabase
from python_trainer.accelerators.rhyme.records import pack_tensors
from python_trainer.run_directory import read_metrics

TRAINERS = 4
DATABASES = ("sqlite", "postgresql")
KILL_SECONDS = 30.0  # from one kill to the next, in the mean


@dataclass
class Seat:
    """A trainer, and what came of those that sat here before."""

    config: Path
    folder: Path
    training: Training
    ended: list[Ended]
    started: float = field(default_factory=time.time)

    def next(self) -> None:
        """Goes on after its end."""
        self.ended.append(self.training.end())
        self.started = time.time()
        self.training = Training(self.config, self.folder, resume=self.folder.exists())

    def wait_until_it_trains(self) -> None:
        rows = self.folder / "metrics.jsonl"
        while self.training.alive() and not (rows.exists() and rows.stat().st_mtime > self.started):
            time.sleep(0.05)
        self.training.wait_for_step(self.training.steps())


def run(args: argparse.Namespace) -> dict[str, Any]:
    root = args.work_dir.resolve() / args.database
    shutil.rmtree(root, ignore_errors=True)
    make_inputs(root)
    bound = int((args.megabytes or args.minutes) * (1 << 20))
    with database(args.database, root) as url:
        RetrospectiveDatabase(url)
        seats, kills = train(root, url, args.minutes * 60, bound, random.Random(f"soak/{args.seed}"))
        problems, store = judge(seats, url, bound), RetrospectiveDatabase(url)
        runs, kept = len(store.runs()), sum(stored.rollouts for stored in store.runs())
        size = store.bytes() / 2**20
    steps = sum(max(saved_steps(seat.folder), default=0) for seat in seats)
    said = f"{steps:,} steps, {kills} kills; {runs} runs with {kept:,} answers kept, {size:.2f} of {bound / 2**20:g} MB"
    name = {"sqlite": "SQLite file", "postgresql": "PostgreSQL database"}[args.database]
    return {"what": f"{TRAINERS} trainers on one {name}", "found": said, "problems": problems, "steps": steps,
            "kills": kills}  # fmt: skip


def train(root: Path, url: str, seconds: float, bound: int, rng: random.Random) -> tuple[list[Seat], int]:
    seats = []
    for seed in range(TRAINERS):
        folder = root / f"trainer-{seed}" / "run"
        config = write_settings(root, folder.with_name("run.yaml"), settings(url, seed, bound))
        seats.append(Seat(config, folder, Training(config, folder), []))
    end, kills, due = time.monotonic() + seconds, 0, rng.expovariate(1 / KILL_SECONDS)
    begun = time.monotonic()
    while time.monotonic() < end:
        time.sleep(0.2)
        if time.monotonic() - begun > due:
            due += rng.expovariate(1 / KILL_SECONDS)
            seat = rng.choice(seats)
            seat.training.kill(signal.SIGKILL)
            seat.next()
            kills += 1
        if not all(seat.training.alive() for seat in seats):
            break  # judge says why
    for seat in seats:
        seat.wait_until_it_trains()
    for seat in seats:
        seat.training.kill(signal.SIGTERM)
    for seat in seats:
        seat.ended.append(seat.training.end())
    return seats, kills


def settings(url: str, seed: int, bound: int) -> dict[str, Any]:
    rhyme = {"database": url, "max_database_bytes": bound, "refresh_steps": 50}
    return {
        "seed": seed,
        "max_steps": 10**7,
        "optimizer": {"learning_rate": 1e-5},
        "evaluation": {"eval_steps": 0},
        "save": {"save_steps": 20},
        "accelerators": {"enabled": ["rhyme"], "rhyme": rhyme},
    }


def judge(seats: list[Seat], url: str, bound: int) -> list[str]:
    """What is wrong with how they ended, or with what the database holds."""
    problems = []
    for number, seat in enumerate(seats):
        *before, last = seat.ended
        problems += [f"trainer {number} ended with {e.code}: {e.line}" for e in before if e.code != -signal.SIGKILL]
        if last.code != 0 or "is saved" not in last.said:
            problems.append(f"trainer {number} ended with {last.code}: {last.line}")
        problems += [f"trainer {number} left {', '.join(e.left)}" for e in seat.ended if e.left]
    store = RetrospectiveDatabase(url, create=False)
    trajectories = {stored.id: store.trajectory(stored.id) for stored in store.runs()}
    held = sorted([record.step for record in records] for records in trajectories.values())
    made = sorted(list(range(1, int(read_metrics(seat.folder)[-1]["step"]) + 1)) for seat in seats)
    gone = [steps for steps in made if steps not in held]
    if any(steps not in made for steps in held) or len(held) + len(gone) != len(made):
        said = ([(len(steps), steps[-1:]) for steps in side] for side in (held, made))
        problems.append("steps in the database and their last: {}, in the runs: {}".format(*said))
    elif gone:  # whole runs may go where trajectories alone are too much
        sizes = [
            len(pack_tensors(record.sketch | record.outcomes)) + ROW_BYTES
            for records in trajectories.values()
            for record in records
        ]
        if sum(map(len, made)) * max(sizes, default=0) <= KEEP_SHARE * bound:
            problems.append(f"{len(gone)} runs went, though all steps had room")
    if store.bytes() > bound:
        problems.append(f"the database holds {store.bytes()} bytes of {bound}")
    store.samples()  # all tensors can be read
    if "://" not in url:
        with sqlite3.connect(url) as connection:
            said = connection.execute("PRAGMA integrity_check").fetchone()[0]
        problems += [] if said == "ok" else [f"integrity_check: {said}"]
    return problems


@contextmanager
def database(kind: str, root: Path) -> Iterator[str]:
    """A new one: its path or URL."""
    if kind == "sqlite":
        yield str(root / "history.db")
        return
    if not _postgres.available():
        raise SystemExit(f"no PostgreSQL server here: {_postgres.INSTALL}")
    server = _postgres.start(root / "server")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
