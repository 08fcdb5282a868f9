"""One fault in one run, and the checks after it."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.training import Ended, Training, differences, make_inputs, saved_steps, write_settings
from python_trainer.accelerators import ACCELERATORS
from python_trainer.errors import UserError
from python_trainer.run.checkpoint import load_newest

ALPHA = {"track_steps": 1, "first_step": 3, "every": 2, "refuse": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ppo": {"algorithm": {"advantage": "gae", "beta": 0.1}, "critic": {"separate": True}},
    "rhyme": {"accelerators": {"enabled": ["rhyme"], "rhyme": {"database": "history.db"}}},
    "rpo": {"accelerators": {"enabled": ["rpo"]}},
    "drafts": {"accelerators": {"enabled": ["drafts"]}},
    "alpha": {"accelerators": {"enabled": ["alpha"], "alpha": ALPHA}},
    "all accelerators": {"accelerators": {"enabled": ACCELERATORS.names, "alpha": ALPHA}},
    "ddp": {"parallel": "ddp"},
    "fsdp2": {"parallel": "fsdp2"},
}
SAVED = re.compile(r"step (\d+)(?: is saved|, which is saved)")


@dataclass
class Outcome:
    """The result of a fault.

    Attributes:
        problems: every broken promise, in words; empty: the run survived.
        times: how often the fault was injected.
        ended: exit code and line of every run that the fault hit.
    """

    problems: list[str] = field(default_factory=list)
    times: int = 1
    ended: list[str] = field(default_factory=list)

    def expect(self, condition: object, problem: str) -> None:
        if not condition:
            self.problems.append(problem)


@dataclass
class Case:
    """A fault, the variant of its run, and the seed of its moment; ``run`` injects it."""

    fault: str
    variant: str
    seed: int
    run: Callable[["Place", "Case"], Outcome]


class Place:
    """The folder of a case. The undisturbed run of each variant is made once and shared by all cases.

    Args:
        root: folder of all cases.
        case: its folder is emptied.
    """

    def __init__(self, root: Path, case: Case):
        self.root = root
        self.variant = case.variant
        self.folder = root / "cases" / re.sub(r"[^a-z0-9]+", "-", f"{case.fault}-{case.variant}-{case.seed}".lower())
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        make_inputs(root)

    @property
    def run(self) -> Path:
        """Return the run directory."""
        return self.folder / "run"

    def train(self, *, resume: bool = False, folder: Path | None = None) -> Training:
        """Start the run of this variant."""
        folder = folder or self.run
        values = VARIANTS[self.variant]
        if self.variant == "rhyme":
            database = str(folder.with_name(f"{folder.name}.db"))
            values = {"accelerators": {**values["accelerators"], "rhyme": {"database": database}}}
        config = write_settings(self.root, folder.with_name(f"{folder.name}.yaml"), values)
        return Training(config, folder, resume=resume, ranks=2 if "parallel" in values else 1)

    def untouched(self) -> Path:
        """Return the run directory of an undisturbed run of this variant."""
        folder = self.root / "untouched" / self.variant.replace(" ", "-") / "run"
        if not (folder / "summary.json").exists():
            shutil.rmtree(folder.parent, ignore_errors=True)
            ended = self.train(folder=folder).end()
            if ended.code != 0:
                raise RuntimeError(f"the run without a fault failed: {ended.code} {ended.output}")
        return folder

    def check_end(self, outcome: Outcome, ended: Ended, *codes: int) -> None:
        """Check the exit code, that one line gives the reason, and that "is saved" is true."""
        outcome.ended.append(f"{ended.code}: {ended.line}")
        outcome.expect(ended.code in codes, f"exit code {ended.code}: {ended.line}")
        outcome.expect("Traceback" not in ended.output, f"a traceback: {ended.line}")
        if ended.code == 2:
            count = sum(line.startswith("error: ") for line in ended.output.splitlines())
            outcome.expect(count == 1, f"{count} lines of errors")
        for step in map(int, SAVED.findall(ended.output)):
            outcome.expect(
                max(saved_steps(self.run), default=0) >= step, f"step {step} was said to be saved, and is not"
            )

    def check_newest(self, outcome: Outcome, min_step: int) -> None:
        """Check that the newest checkpoint can be read, and is of step ``min_step`` or later."""
        warnings: list[str] = []
        try:
            load_newest(self.run / "checkpoints", warnings.append)
        except UserError as error:
            warnings.append(str(error))
        outcome.expect(not warnings, "; ".join(warnings))
        newest = max(saved_steps(self.run), default=0)
        outcome.expect(newest >= min_step, f"step {min_step} was saved, and now the newest is {newest}")

    def check_resume(self, outcome: Outcome, untouched: Path) -> None:
        """Resume the run to its end, and compare it with the undisturbed one."""
        ended = self.train(resume=True).end()
        outcome.expect(ended.code == 0, f"resume ended with {ended.code}: {ended.line}")
        outcome.problems += [f"after resume {difference}" for difference in differences(self.run, untouched)]

    def clear(self) -> None:
        """Remove the folder of a case without problems."""
        shutil.rmtree(self.folder, ignore_errors=True)
