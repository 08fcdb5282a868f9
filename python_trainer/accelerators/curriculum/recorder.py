"""What a run adds to the retrospective database, whatever else it does."""

from pathlib import Path
from typing import Any

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.curriculum.earlier import EarlierRuns
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.data import Rollout, by_group, fresh_ones


class Recorder(Accelerator):
    """Records the right answers of a run that takes none itself."""

    settings: CurriculumSettings
    name = "recorder"  # curriculum itself is off

    def begin(self, run: RunContext) -> None:
        self._start(run.output_dir)
        run.once(self.runs.reach)

    def _start(self, folder: Path) -> None:
        assert self.settings.database is not None
        self.runs = EarlierRuns(self.settings.database, folder)

    def rehearse(self, context: StepContext) -> list[list[Rollout]]:
        if not self.runs.begun:
            self.runs.begin(context)
        return []

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        if groups := list(by_group(fresh_ones(rollouts)).values()):
            self.runs.record(context, groups)
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        return self.runs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start(Path())
        self.runs.load_state_dict(state)
