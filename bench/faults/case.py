"""One fault in one run, and what is asked of it."""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.faults.training import Ended, Fault, Training, differences, make_inputs, saved_steps, write_settings
from python_trainer.accelerators import ACCELERATORS
from python_trainer.checkpoint import load_newest
from python_trainer.errors import UserError

ALPHA = {"track_steps": 1, "first_step": 3, "every": 2, "gate_prompts": 8,
         "min_rise": -1, "min_cosine": 0, "min_skill": -1000}  # fmt: skip
CURRICULUM = {"least_gain": 0}  # chooses from the first step on
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ppo": {"algorithm": {"advantage": "gae", "beta": 0.1}, "critic": {"separate": True}},
    "rhyme": {"accelerators": {"enabled": ["rhyme"], "rhyme": {"database": "history.db"}}},
    "rpo": {"accelerators": {"enabled": ["rpo"]}},
    "drafts": {"accelerators": {"enabled": ["drafts"]}},
    "alpha": {"accelerators": {"enabled": ["alpha"], "alpha": ALPHA}},
    "curriculum": {"accelerators": {"enabled": ["curriculum"], "curriculum": CURRICULUM}},
    "all accelerators": {"accelerators": {"enabled": ACCELERATORS.names(), "alpha": ALPHA, "curriculum": CURRICULUM}},
    "ddp": {"parallel": "ddp"},
    "fsdp2": {"parallel": "fsdp2"},
}
SAVED = re.compile(r"step (\d+)(?: is saved|, which is saved)")


@dataclass
class Outcome:
    """What came of a fault."""

    problems: list[str] = field(default_factory=list)
    times: int = 1  # that it was injected
    ended: list[str] = field(default_factory=list)  # exit code and line of every run that it was in

    def expect(self, true: object, problem: str) -> None:
        if not true:
            self.problems.append(problem)


@dataclass
class Case:
    """A fault, the run that it is put into and the seed of its moment; ``run`` does it, in the place of the case."""

    fault: str
    variant: str
    seed: int
    run: Callable[["Place", "Case"], Outcome]


class Place:
    """The folder of a case, in that of all; runs of a variant without a fault are made once.

    Args:
        root: for everything.
        case: made anew.
    """

    def __init__(self, root: Path, case: Case):
        self.root, self.variant = root, case.variant
        self.folder = root / "cases" / re.sub(r"[^a-z0-9]+", "-", f"{case.fault}-{case.variant}-{case.seed}".lower())
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        make_inputs(root)

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    def train(
        self, *, changes: Mapping[str, Any] | None = None, fault: Fault | None = None, folder: Path | None = None,
        resume: bool = False, picture: bool = False,
    ) -> Training:  # fmt: skip
        """Starts the run of this variant."""
        return self._start(folder or self.run, changes, fault, resume, picture)

    def _start(
        self, folder: Path, changes: Mapping[str, Any] | None, fault: Fault | None, resume: bool, picture: bool
    ) -> Training:
        values = _merged(VARIANTS[self.variant], changes or {})
        rhyme = values.get("accelerators", {}).get("rhyme", {})
        if rhyme.get("database") == "history.db":
            database = folder.with_name(f"{folder.name}.db")
            values = _merged(values, {"accelerators": {"rhyme": {"database": str(database)}}})
        config = write_settings(self.root, folder.with_name(f"{folder.name}.yaml"), values)
        ranks = 2 if "parallel" in values else 1
        return Training(config, folder, resume=resume, fault=fault, ranks=ranks, picture=picture)

    def untouched(self, name: str = "", changes: Mapping[str, Any] | None = None) -> Path:
        """The run directory of the variant, with these changes under this name, that nothing was done to."""
        folder = self.root / "untouched" / f"{self.variant}{name and ' ' + name}".replace(" ", "-") / "run"
        if not (folder / "summary.json").exists():
            shutil.rmtree(folder.parent, ignore_errors=True)
            ended = self._start(folder, changes, None, False, False).end()
            if ended.code != 0 or ended.left:
                raise RuntimeError(f"the run without a fault failed: {ended.code} {ended.left} {ended.said}")
        return folder

    def check_end(self, outcome: Outcome, ended: Ended, *codes: int, lines: int = 1) -> None:
        """After a fault: the exit code, one clear line, nothing left, and what was said to be saved is there."""
        outcome.ended.append(f"{ended.code}: {ended.line}")
        outcome.expect(ended.code in codes, f"exit code {ended.code}: {ended.line}")
        outcome.expect(not ended.left, f"left: {', '.join(ended.left)}")
        outcome.expect("Traceback" not in ended.said, f"a traceback: {ended.line}")
        if ended.code == 2:
            count = sum(line.startswith("error: ") for line in ended.said.splitlines())
            outcome.expect(count == lines, f"{count} lines of errors")
        for step in map(int, SAVED.findall(ended.said)):
            outcome.expect(
                max(saved_steps(self.run), default=0) >= step, f"step {step} was said to be saved, and is not"
            )

    def check_newest(self, outcome: Outcome, least: int) -> None:
        """The newest checkpoint can be read, and is not older than ``least``."""
        told: list[str] = []
        try:
            load_newest(self.run / "checkpoints", told.append)
        except UserError as error:
            told.append(str(error))
        outcome.expect(not told, "; ".join(told))
        newest = max(saved_steps(self.run), default=0)
        outcome.expect(newest >= least, f"step {least} was saved, and now the newest is {newest}")

    def check_resume(
        self, outcome: Outcome, untouched: Path, changes: Mapping[str, Any] | None = None, say: str = ""
    ) -> None:
        """Resumed without the fault it ends as the run that nothing was done to."""
        ended = self.train(changes=changes, resume=True).end()
        outcome.expect(ended.code == 0, f"resume ended with {ended.code}: {ended.line}")
        outcome.expect(not ended.left, f"resume left {', '.join(ended.left)}")
        outcome.expect(say in ended.said, f"resume did not say {say!r}")
        outcome.problems += [f"after resume {what}" for what in differences(self.run, untouched)]

    def clear(self) -> None:
        """Where nothing went wrong, nothing is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for key, value in changes.items():
        found[key] = _merged(found.get(key, {}), value) if isinstance(value, Mapping) else value
    return found


def with_(run: Callable[..., Outcome], *args: Any) -> Callable[[Place, Case], Outcome]:
    """``run`` with further arguments."""
    return partial(run, args=args)
