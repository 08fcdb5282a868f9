"""Settings that all tasks share, and the tasks by name.

To add one: a file with a subclass of ``TaskSettings``, and a line in ``TASKS``. Third-party tasks: name the class as
``module:Class``.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, field_validator, model_validator

from python_trainer.environment import ENVIRONMENTS
from python_trainer.errors import UserError
from python_trainer.settings import Registry, Section
from python_trainer.tasks.base import Task

Size = Annotated[int, Field(ge=1)]
HOME = "python_trainer.tasks"
DEFAULT = "sums"
TASKS: Registry[type["TaskSettings"]] = Registry(
    "task",
    {
        "dataset": f"{HOME}.files:FileTaskSettings",
        "jsonl": f"{HOME}.files:FileTaskSettings",
        "lattice_paths": f"{HOME}.lattice_paths:LatticePathsSettings",
        "sums": f"{HOME}.sums:SumsSettings",
    },
    classes=True,
    of=f"{HOME}.settings:TaskSettings",
)


class TaskSettings(Section):
    """Prompts and rewards: the section ``task`` of a configuration, of which every task has a subclass.

    A subclass adds settings, imports nothing heavy, and loads the task. All it adds has a default.
    """

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, TASKS]
    """The task. Its own settings follow those that all tasks share."""
    train_size: Size | None = None
    """Number of training examples; null: the task's default, for files all rows."""
    gate_size: Annotated[int, Field(ge=0)] | None = None
    """Held-out examples for the gate of `alpha`; null: the task's default, for files none."""
    test_size: Size | None = None
    """Number of test examples; null: the task's default, for files all rows."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """More arguments for the tokenizer's chat template, such as {enable_thinking: false} or tools."""
    overlong: Literal["error", "drop"] = "error"
    """A prompt that leaves no room for an answer (in `sft`: for its reference answer) either ends the run (error), or
    the trainer leaves it out and says so (drop)."""
    reward_seconds: float | None = Field(3600.0, gt=0, le=1e9)
    """Seconds that a reward function may take for the answers of a step or an evaluation; null: no limit. If it takes
    longer, the run ends as if it had failed: the last finished step is saved."""
    environment: Annotated[str, ENVIRONMENTS] | None = None
    """Class that takes turns with the policy within an answer (docs/quickstart.md); null: an answer is one turn."""
    max_turns: int = Field(8, ge=1)
    """Turns of the policy in one answer, at most, with an environment."""

    @field_validator("name", mode="before")
    @classmethod
    def _name_the_class(cls, name: Any) -> Any:
        return TASKS.name_of(name)  # a subclass has a field of its own, without the registry

    def check_files(self) -> None:
        """Raise UserError where a file of the settings does not exist; import nothing heavy."""

    def load(self) -> Task:
        """Make the task.

        Raises:
            UserError: names a file, line or function that cannot be used.
        """
        raise UserError(f"task {self.name}: {type(self).__name__} must have a method load, which returns a Task")

    def load_test_set(self, task: Task, path: str) -> Task:
        """Return ``task``, which these settings have loaded, with up to ``test_size`` test examples of another place.

        Raises:
            UserError: names a file or line that cannot be used.
        """
        other = self.model_copy(update={"test_path": path, "test_size": None}).load()
        return replace(other, test=other.test[: self.test_size])

    @classmethod
    def kinds(cls) -> list[type[Section]]:
        return list(TASKS.registered())

    @classmethod
    def class_for(cls, values: Mapping[str, Any]) -> type["TaskSettings"]:
        """Return the settings of the named task, or of the default one."""
        return TASKS.resolve(values.get("name", DEFAULT)) if cls is TaskSettings else cls

    @model_validator(mode="wrap")
    @classmethod
    def _load_the_given(cls, values: Any, handler: ModelWrapValidatorHandler) -> Any:
        """Turn a :class:`Task` into settings that load it, under the name ``object:NAME``."""
        return given_task(values) if isinstance(values, Task) else handler(values)


def given_task(task: Task) -> TaskSettings:
    """Make the settings of a task that was made in Python, and register them for this process."""

    class GivenTask(TaskSettings):
        """A task that was made in Python; its prompts are all there are."""

        name: str = f"object:{task.name}"

        def load(self) -> Task:
            return task

    TASKS.register(f"object:{task.name}", GivenTask)
    return GivenTask()
