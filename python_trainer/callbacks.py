"""Callbacks: code of the user that runs at certain moments of a run, and trackers of experiments."""

import importlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from python_trainer.data import Rollout
from python_trainer.errors import UserError, hide_passwords
from python_trainer.registry import Registry


class Callback:
    """Base class of callbacks; a subclass defines the methods that it needs.

    ``trainer`` is the run; a callback may read it and must not change it. Rank 0 alone calls the methods. An exception
    ends the run with a message that names the method; the last finished step is saved first.
    """

    def on_rollouts(self, trainer: Any, step: int, rollouts: Sequence[Rollout]) -> None:
        """Called with the scored rollouts of a step, before the update."""

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a step with its row of metrics.jsonl, including those of an evaluation if one was due."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation with ``eval/accuracy`` and so on; step 0 is before the first step."""

    def on_save(self, trainer: Any, step: int, checkpoint: Path) -> None:
        """Called after a checkpoint was written."""

    def on_end(self, trainer: Any, summary: Mapping[str, Any]) -> None:
        """Called at the end of a run with the contents of summary.json."""


class Tracker(Callback):
    """Sends rows of metrics to an experiment tracker whose module has the functions of Weights & Biases."""

    module: ClassVar[str]

    def __init__(self) -> None:
        try:
            self.api = importlib.import_module(self.module)
        except ImportError as error:
            raise UserError(f"callback {self.module} needs its package: pip install {self.module}") from error
        self.run: Any = None

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:  # later ones are in the row of their step
            self.on_step(trainer, step, metrics)

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if self.run is None:
            project = os.environ.get("WANDB_PROJECT", "python_trainer")
            settings = json.loads(hide_passwords(trainer.config.model_dump_json()))
            self.run = self.api.init(project=project, name=trainer.folder.name, config=settings)
        self.api.log(dict(metrics), step=step)

    def on_end(self, trainer: Any, summary: Mapping[str, Any]) -> None:
        if self.run is not None:
            self.api.finish()


class WandB(Tracker):
    """Weights & Biases, in the project that WANDB_PROJECT names."""

    module = "wandb"


class Trackio(Tracker):
    """trackio, in the project that WANDB_PROJECT names."""

    module = "trackio"


HOME = "python_trainer.callbacks"
CALLBACKS: Registry[type[Callback]] = Registry(
    "callback", {"wandb": f"{HOME}:WandB", "trackio": f"{HOME}:Trackio"}, classes=True, of=Callback
)


def make_callback(kind: type[Callback]) -> Callback:
    """Makes a callback of a class.

    Raises:
        UserError: the class takes arguments, or fails otherwise.
    """
    try:
        return kind()
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"callback {kind.__name__} cannot be made without arguments: {what}") from error


def check_methods(kind: type[Callback]) -> None:
    """Checks that every method ``on_...`` is one that would be called.

    Raises:
        UserError: a method would never be called.
    """
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(kind):
        if name.startswith("on_") and name not in known:
            raise UserError(f"callback {kind.__name__}.{name} would never be called: there are {', '.join(known)}")


class Callbacks:
    """All callbacks of a run, in their order.

    Args:
        given: objects, classes without arguments, registered names or ``module:Class``.

    Raises:
        UserError: a callback cannot be made, or has a method that would never be called.
    """

    def __init__(self, given: Iterable[Callback | type[Callback] | str]):
        self.all = [one if isinstance(one, Callback) else make_callback(CALLBACKS.resolve(one)) for one in given]
        for one in self.all:
            check_methods(type(one))

    def __bool__(self) -> bool:
        return bool(self.all)

    def call(self, method: str, *arguments: Any) -> None:
        """Calls a method of each callback.

        Raises:
            UserError: a callback raised an exception.
        """
        for callback in self.all:
            try:
                getattr(callback, method)(*arguments)
            except Exception as error:
                name = f"{type(callback).__name__}.{method}"
                raise UserError(f"callback {name} raised {type(error).__name__}: {error}") from error
