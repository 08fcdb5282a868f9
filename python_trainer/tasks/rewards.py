"""Calls of reward functions, and checks of their results."""

import asyncio
import inspect
import math
import os
import re
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from python_trainer.data import Example, Messages, is_right
from python_trainer.errors import UserError
from python_trainer.process.signals import OutOfTime, call_within
from python_trainer.settings import Registry, copy_nested
from python_trainer.tasks.base import OF_THE_TRAINER, RewardFunction, Task
from python_trainer.tasks.mathematics import math_reward

PACKAGE = Path(__file__).parents[1]


def environment_reward(
    prompts: Sequence, completions: Sequence, completion_ids: Sequence, environment_reward: Any = None, **_: object
) -> list[float]:
    """Return what the environments of the answers gave, over all turns."""
    if environment_reward is None:
        raise UserError("reward environment needs task.environment, got null")
    return list(environment_reward)


REWARDS: Registry[RewardFunction] = Registry(
    "reward",
    {"math": math_reward, "environment": environment_reward},
    makers={"reward_model": "python_trainer.tasks.reward_model:RewardModel"},
    lazy=True,
)


@dataclass(frozen=True)
class Scores:
    """Values of the reward functions of a task for N completions."""

    rewards: dict[str, list[float | None]]  # raw value of every function, N each; None: does not apply
    total: list[float]  # weighted sum over the functions that apply, N
    accuracy: list[float]  # 1.0 where the first function that applies gives more than 0.5, else 0.0, N
    filter_scores: list[float] | None = None  # the weighted sum, if answers are not right or wrong; else None


LARGEST = 1e15  # value of a reward function: sums of squares stay finite in float32
TEXT = (str, bytes, bytearray)
ENDINGS = (Exception, SystemExit, asyncio.CancelledError, OutOfTime)  # of a function; sys.exit ends it, not the run


def _value(value: Any, name: str, row: int) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, TEXT) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST:
        raise UserError(
            f"reward function {name} returned {value!r:.80} for completion {row}; allowed: numbers to {LARGEST:g}, None"
        )
    return number


@lru_cache(maxsize=1)
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Start the event loop of all calls in a process, since a client that a function keeps belongs to its loop.

    It runs in a thread of its own, so that callers may have a running loop, as notebooks do.
    """
    loop = asyncio.new_event_loop()

    def work() -> None:
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a function; asyncio stops for them, and callers would wait
                continue

    threading.Thread(target=work, name="rewards", daemon=True).start()
    return loop


def _call_all(
    functions: Mapping[str, RewardFunction], arguments: dict[str, Any], seconds: float | None
) -> dict[str, Any]:
    """Return what every function returned or raised; async functions run concurrently after the others.

    The result of a function that takes more seconds is OutOfTime.
    """
    results: dict[str, Any] = {}
    for name, function in functions.items():
        try:
            results[name] = call_within(seconds, lambda: _as_list(function(**copy_nested(arguments))))  # noqa: B023
        except ENDINGS as error:
            results[name] = error

    async def finish(value: Any) -> Any:
        try:
            return _as_list(await value)
        except ENDINGS as error:
            return error

    waiting = {name: value for name, value in results.items() if inspect.isawaitable(value)}
    if waiting:
        loop = _event_loop(os.getpid())
        calls = {name: asyncio.run_coroutine_threadsafe(finish(value), loop) for name, value in waiting.items()}
        _, late = wait(calls.values(), seconds)
        results |= {name: OutOfTime() if call in late else call.result() for name, call in calls.items()}
        for call in late:
            call.cancel()
            _event_loop.cache_clear()  # the function may hold it
    return results


def _as_list(values: Any) -> Any:
    """Return ordered values, such as an array, as a list; anything else as it is."""
    ordered = isinstance(values, Iterable) and not isinstance(values, (*TEXT, Mapping, Set))
    return list(values) if ordered else values


def _place(error: BaseException) -> str:
    """Return the line of a reward function that the error came through: `` (my_rewards.py:7)``.

    A function that was never entered has none, and one of this package needs none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    calls = [i for i, frame in enumerate(frames) if frame.filename == __file__]  # the last one is of the function
    inside = frames[calls[-1] + 1 :] if calls else []
    if not inside or PACKAGE in Path(inside[0].filename).parents:
        return ""
    return f" ({os.path.relpath(inside[0].filename)}:{inside[0].lineno})"


def _checked(name: str, arguments: dict[str, Any], result: Any, seconds: float | None) -> list[float | None]:
    """Return the values of one function for all completions, or raise UserError about them.

    Args:
        result: what the function returned or raised.
    """
    count = len(arguments["completions"])
    if isinstance(result, OutOfTime):
        raise UserError(
            f"reward function {name} took longer than task.reward_seconds, {seconds:g} s, for {count} completions"
            f"{_place(result)}: raise that setting, or null sets no limit"
        ) from result
    if isinstance(result, BaseException):
        wrong_arguments = re.search(r"unexpected keyword argument|missing \d+ required", str(result))
        about = _place(result)
        if isinstance(result, KeyError) or (isinstance(result, TypeError) and wrong_arguments):
            about += f"; it is given {', '.join(arguments)}"  # one column is missing or unexpected
        raise UserError(f"reward function {name} raised {type(result).__name__}: {result}{about}") from result
    if not isinstance(result, list):
        raise UserError(
            f"reward function {name} returned {result!r:.60}; allowed: a list, a number for each completion"
        )
    if len(result) != count:
        raise UserError(f"reward function {name} returned {len(result)} values for {count} completions")
    return [_value(value, name, row) for row, value in enumerate(result)]


def required_columns(function: Any) -> list[str]:
    """Return the columns that a reward function cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin has no signature
        return []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty and p.name not in OF_THE_TRAINER]


def check_columns(name: str, function: Any, task: Task) -> None:
    """Raise UserError if a reward function cannot do without a column that no example has."""
    missing = [column for column in required_columns(function) if column not in task.columns]
    if missing and task.train:
        example = task.train[0]
        file = example.place.rpartition(":")[0]
        columns = ", ".join(map(repr, sorted(example.columns))) or "no other columns"
        raise UserError(f"reward function {name} needs column {missing[0]!r}, which {file} lacks; it has {columns}")


def score(
    task: Task,
    examples: Sequence[Example],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    *,
    timeout: float | None = None,
) -> Scores:
    """Score N completions; completion i answers ``examples[i]``.

    Every reward function is called once with keyword arguments ``prompts``, ``completions`` (text without the end
    token; ``[{"role": "assistant", "content": text}]`` where the prompt is a list of messages, as in TRL, and all
    messages after the prompt where an environment has written some), ``completion_ids`` and each column that any
    example of the task has, None where this one lacks it; all of length N. Each function gets lists and dicts of its
    own. Async functions run side by side.

    Args:
        timeout: seconds that a function may take; None: no limit.

    Raises:
        UserError: a function raises, takes too long, or returns the wrong length, NaN, infinity or no numbers; or no
            function applies to a completion.
    """
    prompts = [example.prompt for example in examples]
    names = task.columns.union(*(example.columns for example in examples))
    columns = {name: [example.columns.get(name) for example in examples] for name in sorted(names)}
    texts = list(completions)
    ids = [list(row) for row in completion_ids]
    messages = [
        text if isinstance(prompt, str) or isinstance(text, list) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    arguments = {"prompts": prompts, "completions": messages, "completion_ids": ids, **columns}
    returned = _call_all(task.reward_functions, arguments, timeout)
    rewards = {name: _checked(name, arguments, value, timeout) for name, value in returned.items()}

    total: list[float] = []
    deciding: list[float] = []  # of each completion the value of the first function that gave one
    for row in range(len(texts)):
        values = {name: value for name, column in rewards.items() if (value := column[row]) is not None}
        if not values:
            prompt = examples[row].place or f"{examples[row].prompt!r:.60}"
            raise UserError(
                f"every reward function ({', '.join(rewards)}) returned None for completion {row}, to {prompt}; return "
                "a number from one of them, such as 0.0, or take the prompt out"
            )
        total.append(sum(task.reward_weights.get(name, 1.0) * value for name, value in values.items()))
        deciding.append(next(iter(values.values())))
    accuracy = [float(is_right(value)) for value in deciding]
    return Scores(rewards, total, accuracy, None if {-1.0, 0.0, 1.0}.issuperset(deciding) else total)
