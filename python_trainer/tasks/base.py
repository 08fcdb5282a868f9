"""What a task is: prompts and reward functions."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from python_trainer.data import Example, Messages

# f(prompts, completions, completion_ids, **dataset_columns) -> list[float | None], one per completion; it may be async.
# Of a prompt that is a list of messages the completion is one too. As in TRL, but for the arguments rewards.OF_TRL.
RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """Prompts to train on, prompts to test on, and how answers are judged."""

    name: str
    train: Sequence[Example]
    test: Sequence[Example]
    reward_functions: dict[str, RewardFunction]  # name -> function; their (weighted) sum is the reward
    gate: Sequence[Example] = ()  # held-out prompts for decisions during training; disjoint from train and test
    reward_weights: dict[str, float] = field(default_factory=dict)  # by name; a function without one counts once
    # raw task accuracy of one completion is reward_functions[accuracy] > 0.5
    accuracy: str = "accuracy"
    reward_timeout: float | None = None  # seconds for one call of a reward function
    notes: Sequence[str] = ()  # what the user may want to know about the files
    # whether somebody said which function decides what is right; if not, one that gives more than 1, 0, -1 does not
    accuracy_chosen: bool = True

    @cached_property
    def fingerprint(self) -> str:
        """Of the training prompts in their order: what a run knows of prompts by their numbers is of these."""
        digest = hashlib.blake2b(digest_size=16)
        for example in self.train:
            digest.update(json.dumps(example.prompt).encode() + b"\n")
        return digest.hexdigest()


def completion_text(completion: str | Messages) -> str:
    """What a completion says, for reward functions that take texts and messages alike."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
