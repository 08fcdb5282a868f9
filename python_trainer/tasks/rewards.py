"""Calls reward functions and checks what they return."""

import importlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from python_trainer.errors import UserError
from python_trainer.tasks.base import Example, RewardFunction, Task


@dataclass(frozen=True)
class Scores:
    """What the reward functions of a task say about N completions."""

    rewards: dict[str, list[float | None]]  # raw value of every function, N each; None: does not apply
    total: list[float]  # weighted sum over the functions that apply, N
    accuracy: list[float]  # 1.0 where the task's accuracy function gives more than 0.5, else 0.0, N


def import_reward(spec: str) -> RewardFunction:
    """The function ``module:function``; the module may lie in the current folder."""
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UserError(f'reward {spec!r} is not of the form "module:function"')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(f"reward {spec!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"reward {spec!r}: module {module_name} ({module.__file__}) has no function {function_name}")
    return function


def _value(value: object, name: str, row: int) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str):
        raise UserError(
            f"reward function {name} returned {value!r} for completion {row}; allowed: finite numbers, None"
        )
    return number


def _call(name: str, function: RewardFunction, prompts: list, texts: list, ids: list, columns: dict) -> list:
    try:
        values = list(function(prompts=prompts, completions=texts, completion_ids=ids, **columns))
    except Exception as error:
        raise UserError(f"reward function {name} raised {type(error).__name__}: {error}") from error
    if len(values) != len(texts):
        raise UserError(f"reward function {name} returned {len(values)} values for {len(texts)} completions")
    return [_value(value, name, row) for row, value in enumerate(values)]


def score(
    task: Task, examples: Sequence[Example], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
) -> Scores:
    """Judges N completions; ``examples[i]`` is what completion i answers.

    Every reward function is called once with keyword arguments ``prompts``, ``completions`` (text, special tokens
    left out), ``completion_ids`` and each column of the examples, all of length N. Raises ``UserError`` naming the
    function that raises or returns the wrong length, NaN or infinity, and where no function applies.
    """
    prompts = [example.prompt for example in examples]
    names = {column for example in examples for column in example.columns}
    columns = {name: [example.columns.get(name) for example in examples] for name in sorted(names)}
    texts, ids = list(completions), [list(row) for row in completion_ids]
    rewards = {n: _call(n, f, prompts, texts, ids, columns) for n, f in task.reward_functions.items()}

    total = []
    for row in range(len(texts)):
        values = {name: value[row] for name, value in rewards.items() if value[row] is not None}
        if not values:
            raise UserError(f"every reward function ({', '.join(rewards)}) returned None for completion {row}")
        total.append(sum(task.reward_weights.get(name, 1.0) * value for name, value in values.items()))
    accuracy = [float(value is not None and value > 0.5) for value in rewards[task.accuracy]]
    return Scores(rewards, total, accuracy)
