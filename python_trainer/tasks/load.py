"""From a ``TaskConfig`` to a ``Task``."""

from python_trainer.errors import UserError
from python_trainer.tasks.arithmetic import SIZES, arithmetic_task
from python_trainer.tasks.base import Task
from python_trainer.tasks.config import TaskConfig


def load_task(settings: TaskConfig) -> Task:
    """The task that the settings describe; ``UserError`` names a file, line or function that is no good."""
    if settings.name == "arithmetic":
        sizes = {split: getattr(settings, f"{split}_size") for split in SIZES}
        chosen = {f"{split}_size": SIZES[split] if size is None else size for split, size in sizes.items()}
        return arithmetic_task(settings.variant, settings.seed, **chosen)
    raise UserError(f"task {settings.name} is not available")
