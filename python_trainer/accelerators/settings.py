"""What the settings of all accelerators have in common."""

from typing import TYPE_CHECKING

from python_trainer.settings import Section

if TYPE_CHECKING:
    from python_trainer.tasks.base import Task


class Settings(Section):
    """Settings of an accelerator: the section ``accelerators.NAME`` of a configuration."""

    def splits(self, task: "Task") -> list[str]:
        """Splits of the task that the accelerator asks, beside train and test.

        Raises:
            UserError: one of them does not hold what it needs.
        """
        return []
