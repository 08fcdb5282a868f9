"""From a ``TaskConfig`` to a ``Task``."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.tasks import gsm8k, jsonl
from python_trainer.tasks.arithmetic import SIZES, arithmetic_task
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import import_reward
from python_trainer.tasks.settings import TaskConfig


def load_task(settings: TaskConfig) -> Task:
    """The task that the settings describe; ``UserError`` names a file, line or function that is no good."""
    if settings.name == "arithmetic":
        chosen = {split: getattr(settings, f"{split}_size") for split in SIZES}
        sizes = {f"{split}_size": SIZES[split] if size is None else size for split, size in chosen.items()}
        return arithmetic_task(settings.variant, settings.seed, **sizes)
    rewards = {"accuracy": gsm8k.accuracy}
    if settings.name == "jsonl":
        rewards = {spec.rpartition(":")[2]: import_reward(spec) for spec in settings.rewards}
        if len(rewards) < len(settings.rewards):
            raise UserError(f"reward functions need different names, got {', '.join(settings.rewards)}")
    accuracy = settings.accuracy or next(iter(rewards))
    if accuracy not in rewards:
        raise UserError(f"accuracy {accuracy!r} is no reward function; allowed: {', '.join(rewards)}")
    notes: list[str] = []
    train, gate = _train_and_gate(settings, notes)
    test = _limited(_read(settings, settings.test_path, notes), settings.test_size, settings.test_path, "test_size")
    weights = dict(zip(rewards, settings.reward_weights or [1.0] * len(rewards), strict=True))
    notes = list(dict.fromkeys(notes))  # one file may serve twice
    return Task(settings.name, train, test, rewards, gate, weights, accuracy, settings.reward_timeout, notes)


def _read(settings: TaskConfig, path: Path | None, notes: list[str]) -> list[Example]:
    """The examples of a file; adds to the notes what the user may want to know about it."""
    assert path is not None  # TaskConfig sees to it
    if settings.name == "gsm8k":
        examples = gsm8k.read_problems(path, settings.prompt_template)
    else:
        examples, found = jsonl.read_prompts(path, settings.prompt_column)
        notes += found
    return [_as_chat(example) for example in examples] if settings.chat else examples


def _as_chat(example: Example) -> Example:
    if isinstance(example.prompt, str):
        return replace(example, prompt=[{"role": "user", "content": example.prompt}])
    return example


def _train_and_gate(settings: TaskConfig, notes: list[str]) -> tuple[Sequence[Example], Sequence[Example]]:
    train = _read(settings, settings.train_path, notes)
    if settings.gate_path:
        gate = _read(settings, settings.gate_path, notes)
        random.Random(f"gate order/{settings.seed}").shuffle(gate)  # the gate's bound holds for prompts in random order
        gate = _limited(gate, settings.gate_size, settings.gate_path, "gate_size")
    else:
        size = settings.gate_size or 0
        if size >= len(train):
            raise UserError(
                f"gate_size {size} leaves nothing of {settings.train_path}, which has {len(train)} examples"
            )
        held_out = random.Random(f"gate/{settings.seed}").sample(range(len(train)), size)
        gate = [train[index] for index in held_out]  # in this order, which is random
        rest = sorted(set(range(len(train))) - set(held_out))
        train = [train[index] for index in rest]
    return _limited(train, settings.train_size, settings.train_path, "train_size"), gate


def _limited(examples: list[Example], size: int | None, path: Path | None, field: str) -> list[Example]:
    if size is not None and size > len(examples):
        raise UserError(f"{field} is {size}, but {path} has {len(examples)} examples")
    return examples[:size]
