"""What a run adds to the retrospective database, whatever else it does."""

from pathlib import Path
from typing import Any

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.curriculum.earlier import EarlierRuns, runs_of
from python_trainer.accelerators.curriculum.settings import CurriculumSettings
from python_trainer.data import Rollout, by_group, fresh_ones


class Recorder(Accelerator):
    """Records the right answers of a run that takes none itself.

    A run that was begun without it is not recorded when it is resumed, which is said where a database is named.
    """

    settings: CurriculumSettings
    name = "recorder"  # curriculum itself is off
    watches = True
    numbers_prompts = False
    runs: EarlierRuns | None = None

    def begin(self, run: RunContext) -> None:
        if (runs := runs_of(self.settings, run.output_dir)) is not None:
            runs.reach(run)
        self.runs = runs

    def rehearse(self, context: StepContext) -> list[list[Rollout]]:
        if self.runs is None and self.settings.reads:  # resumed, and begun without a recorder
            self.load_state_dict({})
        if self.runs is not None and not self.runs.begun:
            self.runs.begin(context)
        return []

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        if self.runs is not None and (groups := list(by_group(fresh_ones(rollouts)).values())):
            self.runs.record(context, groups)
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        return {} if self.runs is None else self.runs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state or self.settings.reads) and (runs := runs_of(self.settings, Path())) is not None:
            runs.load_state_dict(state)
            self.runs = runs
