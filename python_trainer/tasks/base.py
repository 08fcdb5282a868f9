"""What a task is: prompts and reward functions."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from python_trainer.data import Example
from python_trainer.errors import UserError

PROMPT = 'a string that is not empty, or a list of messages {"role": "user", "content": "..."}'
OF_THE_TRAINER = {"prompts", "completions", "completion_ids", "environment_reward"}  # what reward functions get
# f(prompts, completions, completion_ids, **dataset_columns) -> list[float | None], one per completion; it may be async.
# Of a prompt that is a list of messages the completion is one too. As in TRL.
RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """Prompts to train on, prompts to test on, and how answers are judged.

    Raises:
        UserError: the task has a field that cannot be trained on; the message gives field, value and allowed values.
    """

    name: str
    train: Sequence[Example]
    test: Sequence[Example]
    # name -> function; their (weighted) sum is the reward. A completion is right if the first of them that gives it a
    # value gives more than 0.5; where that is anything but 1, 0 or -1, nothing is right or wrong
    reward_functions: dict[str, RewardFunction]
    gate: Sequence[Example] = ()  # held-out prompts for decisions during training; disjoint from train and test
    reward_weights: dict[str, float] = field(default_factory=dict)  # by name; a function without one counts once

    def __post_init__(self) -> None:
        def wrong(what: str, allowed: str, got: Any) -> UserError:
            return UserError(f"task {self.name}: {what} must be {allowed}, got {got!r:.80}")

        for split in ("train", "test", "gate"):
            for number, example in enumerate(getattr(self, split)):
                if not isinstance(example, Example):
                    raise wrong(f"{split}[{number}]", "an Example", example)
                check_example(example.place or f"task {self.name}: {split}[{number}]", example)
        functions, weights = self.reward_functions, self.reward_weights
        if not isinstance(functions, Mapping) or not functions:
            raise wrong("reward_functions", "a dict of names and functions, of one or more", functions)
        for name, function in functions.items():
            if not isinstance(name, str) or not callable(function):
                raise wrong(f"reward_functions[{name!r}]", "a function, under a name", function)
        if not isinstance(weights, Mapping) or not weights.keys() <= functions.keys():
            raise wrong("reward_weights", f"a dict with names in reward_functions ({', '.join(functions)})", weights)
        for name, weight in weights.items():
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                raise wrong(f"reward_weights[{name!r}]", "a finite number", weight)

    @cached_property
    def columns(self) -> set[str]:
        """Return the names of the columns that any example has."""
        return {name for split in (self.train, self.test, self.gate) for example in split for name in example.columns}

    @cached_property
    def fingerprint(self) -> str:
        """Hash the training prompts in their order: what a run stores by prompt number belongs to this hash."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.train:
            digest.update(json.dumps(example.prompt, default=str).encode() + b"\n")  # Parquet has dates
        return digest.hexdigest()


def check_example(place: str, example: Example) -> None:
    """Raise UserError for a prompt that is neither text nor messages, or a column that hides one of the trainer's."""
    prompt = example.prompt
    if not (is_chat(prompt) or (isinstance(prompt, str) and prompt)):
        raise UserError(f"{place}: prompt is {prompt!r:.80}; allowed: {PROMPT}")
    for text in [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]:
        check_text(place, "prompt", text)
    answer = example.columns.get("answer")
    ends = prompt[-1]["content"] if isinstance(prompt, list) and prompt[-1]["role"] == "assistant" else None
    if answer is not None and ends is not None and str(answer).strip() == ends.strip():
        raise UserError(
            f"{place}: the last message of the prompt is the column answer, {answer!r:.60}; take it out of the messages"
        )
    if reserved := OF_THE_TRAINER & example.columns.keys():
        raise UserError(f"{place}: column {min(reserved)!r} has a name that reward functions get from the trainer")


def is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) for m in value)
        and all(isinstance(m.get(key), str) for m in value for key in ("role", "content"))
    )


def check_text(place: str, column: str, text: str) -> None:
    r"""Raise UserError for what no tokenizer takes: half of a character, as JSON's \ud83d by itself."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: {column} is no Unicode text: {error}") from error
