"""Tasks whose prompts are read, of JSONL files for one; a problem names the file, the line and what is allowed."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.tasks.checking import check_text
from python_trainer.tasks.settings import TaskSettings


@dataclass(frozen=True)
class Splits:
    """Examples of a task, and what the user may want to know about the files."""

    train: Sequence[Example]
    gate: Sequence[Example]
    test: Sequence[Example]
    notes: Sequence[str]


class SplitTaskSettings(TaskSettings):
    """Settings of tasks whose examples are read, from files or elsewhere. A subclass reads one source of them."""

    chat: bool = False
    """Give a prompt that is a string as one user message through the tokenizer's chat template."""
    train_half: Literal["first", "second"] | None = None
    """Half of the training examples to take, so that `sft` can have the other one; null: all of them."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System message in front of every prompt that is a list of messages and has none."""

    def sources(self) -> tuple[Any, Any, Any]:
        """Where training, gate and test examples are; None for the gate: among those for training."""
        raise NotImplementedError

    def read(self, source: Any) -> tuple[list[Example], list[str]]:
        """The examples of a source, and notes about it."""
        raise NotImplementedError

    def splits(self) -> Splits:
        """The examples of all sources.

        Raises:
            UserError: a source that cannot be read or holds too few examples.
        """
        train_source, gate_source, test_source = self.sources()
        train, notes = self._read(train_source)
        train = self._half(train)
        if gate_source is not None:
            gate, more = self._read(gate_source)
            notes += more
            # the gate's bound holds for prompts in random order
            random.Random(f"gate order/{self.seed}").shuffle(gate)
            gate = limited(gate, self.gate_size, gate_source, "gate_size")
        else:
            train, gate = self._taken_out(train, train_source)
        test, more = self._read(test_source)
        notes += more
        return Splits(
            limited(train, self.train_size, train_source, "train_size"),
            gate,
            limited(test, self.test_size, test_source, "test_size"),
            list(dict.fromkeys(notes)),  # one file may serve twice
        )

    def _read(self, source: Any) -> tuple[list[Example], list[str]]:
        examples, notes = self.read(source)
        examples = [as_chat(example) for example in examples] if self.chat else examples
        if self.system_prompt is not None:
            if all(isinstance(example.prompt, str) for example in examples):
                raise UserError(
                    f"task.system_prompt is for chat messages, but all prompts of {source} are strings; task.chat: "
                    "true makes messages of them"
                )
            examples = [with_system(example, self.system_prompt) for example in examples]
        return examples, list(notes)

    def _half(self, train: list[Example]) -> list[Example]:
        """The half of the training examples that is asked for."""
        middle = (len(train) + 1) // 2
        return {None: train, "first": train[:middle], "second": train[middle:]}[self.train_half]

    def _taken_out(self, train: list[Example], source: Any) -> tuple[list[Example], list[Example]]:
        """Training examples, some of which become gate examples."""
        size = self.gate_size or 0
        if size >= len(train):
            raise UserError(f"gate_size {size} leaves nothing of {source}, which has {len(train)} examples")
        held_out = random.Random(f"gate/{self.seed}").sample(range(len(train)), size)
        gate = [train[index] for index in held_out]  # in this order, which is random
        rest = sorted(set(range(len(train))) - set(held_out))
        return [train[index] for index in rest], gate


class FileTaskSettings(SplitTaskSettings):
    """Settings of tasks from files."""

    train_path: Path | None = None
    """JSONL file with the training examples."""
    test_path: Path | None = None
    """JSONL file with the test examples."""
    gate_path: Path | None = None
    """JSONL file with the gate examples; null: gate_size examples are taken out of the training file."""

    @model_validator(mode="after")
    def _has_files(self) -> "FileTaskSettings":
        files = [field for field in ("train_path", "test_path") if getattr(self, field) is None]
        if files:
            raise ValueError(f"task {self.name} needs {' and '.join(files)}: a JSONL file")
        return self

    def sources(self) -> tuple[Path | None, Path | None, Path | None]:
        return self.train_path, self.gate_path, self.test_path


def as_chat(example: Example) -> Example:
    """With the prompt as one user message, if it is text."""
    if isinstance(example.prompt, str):
        return replace(example, prompt=[{"role": "user", "content": example.prompt}])
    return example


def with_system(example: Example, text: str) -> Example:
    """With a system message in front, if the prompt is a list of messages without one."""
    if isinstance(example.prompt, str) or example.prompt[0]["role"] == "system":
        return example
    return replace(example, prompt=[{"role": "system", "content": text}, *example.prompt])


def limited(examples: list[Example], size: int | None, source: Any, field: str) -> list[Example]:
    """The first ``size`` of them."""
    if size is not None and size > len(examples):
        raise UserError(f"{field} is {size}, but {source} has {len(examples)} examples")
    return examples[:size]


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON: {error}; allowed: one JSON object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: {type(row).__name__} {line[:60]!r}; allowed: one JSON object a line")
        rows.append((number, row))
    if not rows:
        raise UserError(f"{path}: no examples; at least one line with a JSON object is needed")
    return rows


def text_column(path: Path, number: int, row: dict[str, Any], column: str) -> str:
    """A column that must be a non-empty string."""
    if column not in row:
        raise UserError(f"{path}:{number}: no column {column!r}; the line has {', '.join(map(repr, row)) or 'none'}")
    if not isinstance(row[column], str) or not row[column]:
        raise UserError(f"{path}:{number}: {column} is {row[column]!r:.80}; allowed: a string that is not empty")
    check_text(f"{path}:{number}", column, row[column])
    return row[column]
