"""Callbacks: code of the user that runs at certain moments of a run, and trackers of experiments."""

import importlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from python_trainer.data import Rollout
from python_trainer.errors import UserError, hide_passwords
from python_trainer.settings import Registry


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
        """Called after a checkpoint was written, but not for one that a signal wrote in the midst of a step."""

    def on_end(self, trainer: Any, summary: Mapping[str, Any]) -> None:
        """Called at the end of a run with the contents of summary.json."""


class Tracker(Callback):
    """Send rows of metrics to an experiment tracker whose module has the functions of Weights & Biases.

    A resumed run goes on with the tracker's run that it began.
    """

    module: ClassVar[str]

    def __init__(self) -> None:
        try:
            self.api = importlib.import_module(self.module)
        except ImportError as error:
            raise UserError(f"callback {self.module} needs its package: pip install {self.module}") from error
        self.run: Any = None

    def names(self, folder: str, run: str) -> dict[str, Any]:
        """Return the options by which the tracker tells this run from others, of the folder's name and the run's id."""
        raise NotImplementedError

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:  # later ones are in the row of their step
            self.on_step(trainer, step, metrics)

    def on_step(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if self.run is None:
            project = os.environ.get("WANDB_PROJECT", "python_trainer")
            # a setting on each line: in one line, the port of a URL to the next @ would look like a password
            settings = json.loads(hide_passwords(trainer.config.model_dump_json(indent=1)))
            names = self.names(trainer.folder.name, trainer.state.id)
            self.run = self.api.init(project=project, config=settings, resume="allow", **names)
        self.api.log(dict(metrics), step=step)

    def on_end(self, trainer: Any, summary: Mapping[str, Any]) -> None:
        if self.run is not None:
            self.api.finish()


class WandB(Tracker):
    """Weights & Biases, in the project that WANDB_PROJECT names."""

    module = "wandb"

    def names(self, folder: str, run: str) -> dict[str, Any]:
        return {"name": folder, "id": run, "allow_val_change": True}  # of settings, such as max_steps


class Trackio(Tracker):
    """trackio, in the project that WANDB_PROJECT names."""

    module = "trackio"

    def names(self, folder: str, run: str) -> dict[str, Any]:
        return {"name": f"{folder}-{run}"}  # the name is the id


TRACKERS = {"wandb": WandB, "trackio": Trackio}
CALLBACKS: Registry[type[Callback]] = Registry("callback", TRACKERS, classes=True, of=Callback)


def make_callbacks(plugins: Iterable[Callback | type[Callback] | str]) -> list[Callback]:
    """Return the callbacks of a run, from objects, classes without arguments, registered names or ``module:Class``.

    Raises:
        UserError: a callback cannot be made, or has a method that would never be called.
    """
    methods = [name for name in vars(Callback) if name.startswith("on_")]
    callbacks = []
    for plugin in plugins:
        callback = plugin if isinstance(plugin, Callback) else make_callback(plugin)
        for name in dir(callback):
            if name.startswith("on_") and name not in methods:
                name = f"{type(callback).__name__}.{name}"
                raise UserError(f"callback {name} would never be called: there are {', '.join(methods)}")
        callbacks.append(callback)
    return callbacks


def make_callback(plugin: type[Callback] | str) -> Callback:
    """Return the callback of a class without arguments, or of its name.

    Raises:
        UserError: it cannot be made.
    """
    kind = CALLBACKS.resolve(plugin)
    try:
        return kind()
    except UserError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"callback {kind.__name__} cannot be made without arguments: {problem}") from error
