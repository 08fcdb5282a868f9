"""Callbacks: what somebody else does at certain moments of a run."""

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
    """Optional methods, of which a subclass has what it needs. ``trainer`` is the run, to be looked at, not changed.

    They are called on the first rank only. An exception ends the run with a message that names the method; steps that
    are finished are saved first.
    """

    def on_rollouts(self, trainer: Any, step: int, rollouts: Sequence[Rollout]) -> None:
        """The answers of a step, scored, as the update will see them."""

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """After a step: its row of metrics.jsonl, with those of an evaluation where one was due."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation: ``eval/accuracy`` and so on. Step 0 is before the first step."""

    def on_save(self, trainer: Any, step: int, checkpoint: Path) -> None:
        """After a checkpoint was written."""

    def on_end(self, trainer: Any, summary: Mapping[str, Any]) -> None:
        """After a run came to its end: what is in summary.json."""


class Tracker(Callback):
    """Sends rows of metrics to an experiment tracker: a module with the functions of Weights & Biases."""

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
            settings = json.loads(hide_passwords(json.dumps(trainer.facts["settings"])))
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


def made(kind: type[Callback]) -> Callback:
    """One of these.

    Raises:
        UserError: it takes arguments, or fails otherwise.
    """
    try:
        return kind()
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"callback {kind.__name__} cannot be made without arguments: {what}") from error


def check_methods(kind: type[Callback]) -> None:
    """A method that is named like those above but is none of them would never be called.

    Raises:
        UserError: there is one.
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
        UserError: one cannot be made, or has a method that would never be called.
    """

    def __init__(self, given: Iterable[Callback | type[Callback] | str]):
        self.all = [one if isinstance(one, Callback) else made(CALLBACKS.resolve(one)) for one in given]
        for one in self.all:
            check_methods(type(one))

    def __bool__(self) -> bool:
        return bool(self.all)

    def call(self, method: str, *arguments: Any) -> None:
        """Calls a method of each.

        Raises:
            UserError: one raised an exception.
        """
        for callback in self.all:
            try:
                getattr(callback, method)(*arguments)
            except Exception as error:
                name = f"{type(callback).__name__}.{method}"
                raise UserError(f"callback {name} raised {type(error).__name__}: {error}") from error
