"""Prompts from files or the Hub, judged by reward functions that the user names."""

import inspect
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.tasks.base import RewardFunction, check_names, check_prompt
from python_trainer.tasks.files import PROMPT_COLUMNS, FileTaskSettings
from python_trainer.tasks.rewards import REWARDS


class JSONLSettings(FileTaskSettings):
    """Settings of the task. A prompt is a string or a list of chat messages, in the column "prompt" or "messages"."""

    name: str = "jsonl"
    reward: Annotated[str | list[str], REWARDS] = Field([])
    """Reward functions as "module:function"; the module may lie in the current folder. "math" compares the value of an
    answer with column answer by math-verify (pip install math-verify); "reward_model:PATH" asks a
    sequence-classification model of Transformers, on the trainer's device; "environment" is task.environment's. The
    first one that gives an answer a value decides whether it is right: above 0.5. Where that is anything but 1, 0 and
    -1, nothing is right or wrong: dynamic sampling and accelerators go by rewards."""
    reward_weights: list[float] | None = None
    """One weight for each reward function; null: 1 each."""

    @property
    def rewards(self) -> list[str]:
        return [self.reward] if isinstance(self.reward, str) else self.reward

    @model_validator(mode="after")
    def _has_rewards(self) -> "JSONLSettings":
        if not self.rewards:
            raise ValueError(f'task {self.name} needs reward: "math", "module:function", or a list of them')
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise ValueError(f"reward_weights needs {len(self.rewards)} numbers, got {self.reward_weights}")
        return self

    def judges(self, examples: Sequence[Example]) -> tuple[dict[str, RewardFunction], dict[str, float]]:
        functions = {Path(spec.rpartition(":")[2]).name: REWARDS.resolve(spec) for spec in self.rewards}
        if len(functions) < len(self.rewards):
            raise UserError(f"reward functions need different names, got {', '.join(self.rewards)}")
        for name, function in functions.items():
            check_columns(name, function, examples, {"environment_reward"} if self.environment else set())
        return functions, dict(zip(functions, self.reward_weights or [1.0] * len(functions), strict=True))

    def examples(self, source: str, rows: Sequence[tuple[int, dict[str, Any]]]) -> tuple[list[Example], list[str]]:
        return read_prompts(source, rows)


def check_columns(name: str, function: Any, examples: Sequence[Example], added: Set[str]) -> None:
    """Raises UserError where a reward function cannot do without a column that no example has, and nobody adds."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin nothing is known
        return
    columns = {column for row in examples for column in row.columns}
    given = {"prompts", "completions", "completion_ids", *columns, *added}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing and examples:
        file = examples[0].place.rpartition(":")[0]
        has = ", ".join(map(repr, sorted(examples[0].columns))) or "no other columns"
        raise UserError(f"reward function {name} needs column {missing[0]!r}, which {file} lacks; it has {has}")


def read_prompts(source: Any, rows: Iterable[tuple[int, dict[str, Any]]]) -> tuple[list[Example], list[str]]:
    """Examples from numbered rows with a prompt (string or chat messages), and what the user may want to know.

    The other columns go to the reward functions; ``source``: what the rows are of, for messages.
    """
    examples: list[Example] = []
    numbers: list[int] = []
    for number, row in rows:
        column = next((name for name in PROMPT_COLUMNS if name in row), None)
        if column is None:
            wanted, has = " or ".join(map(repr, PROMPT_COLUMNS)), ", ".join(map(repr, row)) or "none"
            raise UserError(f"{source}:{number}: no column {wanted}; the line has {has} (task.columns can rename them)")
        prompt = row[column]
        check_prompt(f"{source}:{number}", column, prompt)
        columns = {name: value for name, value in row.items() if name != column}
        check_names(f"{source}:{number}", columns)
        examples.append(Example(prompt, columns, f"{source}:{number}"))
        numbers.append(number)
    return examples, _gaps(source, numbers, examples)


def _gaps(source: Any, numbers: Sequence[int], examples: Sequence[Example]) -> list[str]:
    """One note for each column that some lines have and others lack."""
    notes = []
    for column in dict.fromkeys(name for example in examples for name in example.columns):
        without = [number for number, example in zip(numbers, examples) if column not in example.columns]
        if without:
            notes.append(
                f"{source}: column {column!r} is missing on {len(without)} of {len(examples)} lines, the first is line "
                f"{without[0]}; reward functions get None there"
            )
    return notes
