"""The newest checkpoint damaged: the one before is taken, with a line; a run never begins anew because of it."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.faults.case import Case, Outcome, Place, with_
from python_trainer.checkpoint import list_checkpoints


def torn(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def flipped(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def zeroed(path: Path, rng: random.Random) -> None:
    """A block that never reached the disk."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(data)


def missing(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGES = {"torn": torn, "a bit flipped": flipped, "a block of zeros": zeroed, "a file missing": missing}
Damage = Callable[[Path, random.Random], None]


def cases(times: int, seed: int) -> Iterator[Case]:
    """``times`` of each damage to a file of the newest checkpoint, and to all checkpoints."""
    for number in range(seed, seed + times):
        for variant in ("plain", "all accelerators", "fsdp2"):
            for name, damage in DAMAGES.items():
                yield Case(f"newest checkpoint: {name}", variant, number, with_(newest, damage))
        for name, damage in DAMAGES.items():
            yield Case(f"all checkpoints: {name}", "plain", number, with_(every, damage))


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)


def newest(place: Place, case: Case, args: tuple[Damage]) -> Outcome:
    rng, outcome, untouched = random.Random(f"{case.fault}/{case.variant}/{case.seed}"), Outcome(), place.untouched()
    shutil.copytree(untouched.parent, place.run.parent, dirs_exist_ok=True)
    *_, before, last = list_checkpoints(place.run / "checkpoints")
    args[0](rng.choice(files_of(last)), rng)
    place.check_resume(outcome, untouched, say=f"going on from {before.name}")
    return outcome


def every(place: Place, case: Case, args: tuple[Damage]) -> Outcome:
    rng, outcome = random.Random(f"{case.fault}/{case.seed}"), Outcome()
    shutil.copytree(place.untouched().parent, place.run.parent, dirs_exist_ok=True)
    for checkpoint in list_checkpoints(place.run / "checkpoints"):
        args[0](rng.choice(files_of(checkpoint)), rng)
    rows = (place.run / "metrics.jsonl").read_bytes()
    ended = place.train(resume=True).end()
    place.check_end(outcome, ended, 2)
    outcome.expect("can be used" in ended.said, f"it did not say so: {ended.line}")
    outcome.expect((place.run / "metrics.jsonl").read_bytes() == rows, "the run was changed")
    return outcome
