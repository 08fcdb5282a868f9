"""Calls reward functions and checks what they return."""

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

from python_trainer.data import Example, Messages
from python_trainer.errors import UserError
from python_trainer.settings import Registry, copy_nested
from python_trainer.signals import OutOfTime, call_within
from python_trainer.tasks.base import OF_THE_TRAINER, RewardFunction, Task
from python_trainer.tasks.mathematics import math_reward

PACKAGE = Path(__file__).parents[1]


def environment_reward(
    prompts: Sequence, completions: Sequence, completion_ids: Sequence, environment_reward: Any = None, **_: object
) -> list[float]:
    """Returns what the environments of the answers gave, over all turns."""
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
    merit: list[float] | None = None  # the weighted sum, where the task has no right and wrong; else None


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
    """Starts the loop of all calls in a process: what functions keep, such as a client, belongs to its loop.

    It runs in a thread of its own, so that callers may have one that runs, as notebooks do.
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
    """Return what every function returned or raised; async ones run side by side after the others.

    A function that takes more seconds raised OutOfTime.
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


def _as_list(found: Any) -> Any:
    """Returns a list of what can be iterated in its order, such as an array; anything else as it is."""
    ordered = isinstance(found, Iterable) and not isinstance(found, (*TEXT, Mapping, Set))
    return list(found) if ordered else found


def _place(error: BaseException) -> str:
    """Names the line of a reward function that the error came through: `` (my_rewards.py:7)``.

    A function that was never entered has none, and one of this package needs none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    calls = [i for i, frame in enumerate(frames) if frame.filename == __file__]  # the last one is of the function
    inside = frames[calls[-1] + 1 :] if calls else []
    if not inside or PACKAGE in Path(inside[0].filename).parents:
        return ""
    return f" ({os.path.relpath(inside[0].filename)}:{inside[0].lineno})"


def _checked(name: str, arguments: dict[str, Any], found: Any, seconds: float | None) -> list[float | None]:
    """Returns the values of one function for all completions, or raises UserError about them."""
    count = len(arguments["completions"])
    if isinstance(found, OutOfTime):
        raise UserError(
            f"reward function {name} took longer than task.reward_seconds, {seconds:g} s, for {count} completions"
            f"{_place(found)}: raise that setting, or null sets no limit"
        ) from found
    if isinstance(found, BaseException):
        about, pattern = _place(found), r"unexpected keyword argument|missing \d+ required"
        call = isinstance(found, TypeError) and re.search(pattern, str(found))
        if call or isinstance(found, KeyError):  # a missing or an unexpected column
            about += f"; it is given {', '.join(arguments)}"
        raise UserError(f"reward function {name} raised {type(found).__name__}: {found}{about}") from found
    if not isinstance(found, list):
        raise UserError(f"reward function {name} returned {found!r:.60}; allowed: a list, a number for each completion")
    if len(found) != count:
        raise UserError(f"reward function {name} returned {len(found)} values for {count} completions")
    return [_value(value, name, row) for row, value in enumerate(found)]


def check_columns(name: str, function: Any, task: Task) -> None:
    """Raises UserError if a reward function cannot do without a column that no example has."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin nothing is known
        return
    given, examples = OF_THE_TRAINER | task.columns, task.train
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing and examples:
        file = examples[0].place.rpartition(":")[0]
        has = ", ".join(map(repr, sorted(examples[0].columns))) or "no other columns"
        raise UserError(f"reward function {name} needs column {missing[0]!r}, which {file} lacks; it has {has}")


def score(
    task: Task,
    examples: Sequence[Example],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    *,
    timeout: float | None = None,
) -> Scores:
    """Judges N completions; ``examples[i]`` is what completion i answers.

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
    texts, ids = list(completions), [list(row) for row in completion_ids]
    said = [
        text if isinstance(prompt, str) or isinstance(text, list) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    arguments = {"prompts": prompts, "completions": said, "completion_ids": ids, **columns}
    found = _call_all(task.reward_functions, arguments, timeout)
    rewards = {name: _checked(name, arguments, value, timeout) for name, value in found.items()}

    total: list[float] = []
    deciding: list[float] = []  # of each completion the value of the first function that gave one
    for row in range(len(texts)):
        values = {name: value for name, column in rewards.items() if (value := column[row]) is not None}
        if not values:
            where = examples[row].place or f"{examples[row].prompt!r:.60}"
            raise UserError(
                f"every reward function ({', '.join(rewards)}) returned None for completion {row}, to {where}; return "
                "a number from one of them, such as 0.0, or take the prompt out"
            )
        total.append(sum(task.reward_weights.get(name, 1.0) * value for name, value in values.items()))
        deciding.append(next(iter(values.values())))
    accuracy = [float(value > 0.5) for value in deciding]
    return Scores(rewards, total, accuracy, None if {-1.0, 0.0, 1.0}.issuperset(deciding) else total)
