"""A compact PPO / GRPO trainer on rlkernels: ``python -m python_trainer --help``, docs/quickstart.md.

Nothing heavy is imported before one of the names here is used.
"""

from typing import TYPE_CHECKING, Any

import rlkernels._waiting  # noqa: F401 before torch

if TYPE_CHECKING:
    from python_trainer.accelerators.base import Accelerator as Accelerator
    from python_trainer.accelerators.settings import AcceleratorSettings as AcceleratorSettings
    from python_trainer.config import Config as Config
    from python_trainer.config import load_config as load_config
    from python_trainer.data import Example as Example
    from python_trainer.run.callbacks import Callback as Callback
    from python_trainer.tasks.base import Task as Task
    from python_trainer.tasks.settings import TaskSettings as TaskSettings
    from python_trainer.trainer import Trainer as Trainer

_PLACES = {
    "Accelerator": "accelerators.base",
    "AcceleratorSettings": "accelerators.settings",
    "Callback": "run.callbacks",
    "Config": "config",
    "Example": "data",
    "Task": "tasks.base",
    "TaskSettings": "tasks.settings",
    "Trainer": "trainer",
    "load_config": "config",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
