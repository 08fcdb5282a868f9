"""Tasks whose prompts are read from files or the Hugging Face Hub; a problem names the file and the line."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.hub import snapshot
from python_trainer.tasks.base import RewardFunction, Task, check_text
from python_trainer.tasks.settings import TaskSettings

PROMPT_COLUMNS = ("prompt", "messages")
TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json"}  # read by the library datasets, as folders are
PLACES = f"a file (.jsonl, {', '.join(TABLES)}), a folder of such files, or an owner/name of the Hub"
HUB = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(/(?P<config>\w[\w.-]*))?(@(?P<revision>[\w./-]+))?")


class FileTaskSettings(TaskSettings):
    """Settings of tasks whose examples are read. A subclass makes examples of rows."""

    train_path: str | None = None
    """Training examples: a file (.jsonl, .json, .csv, .parquet), a folder of such files, or a data set of the Hub as
    `owner/name`, `owner/name/config` or `owner/name@revision`. `:SPLIT` at the end names a split or a part of one, as
    in `train.jsonl:train[:90%]`. Without it, a folder or data set has the split train."""
    test_path: str | None = None
    """Test examples, written like train_path; without `:SPLIT`, a folder or data set has the split test."""
    columns: dict[str, str] = Field({})
    """Name for the trainer and the reward functions -> column of the files: {prompt: question, answer: solution}. Other
    columns keep their names."""
    chat: bool = False
    """Give a prompt that is a string as one user message through the tokenizer's chat template."""

    @field_validator("train_path", "test_path", mode="before")
    @classmethod
    def _write_paths(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @model_validator(mode="after")
    def _has_files(self) -> "FileTaskSettings":
        missing = [field for field in ("train_path", "test_path") if getattr(self, field) is None]
        if missing:
            raise ValueError(f"task {self.name} needs {' and '.join(missing)}: {PLACES}")
        if len(set(self.columns.values())) < len(self.columns):
            raise ValueError(f"columns must name every column of the files once, got {self.columns}")
        return self

    def examples(self, source: str, rows: Sequence[tuple[int, dict[str, Any]]]) -> tuple[list[Example], list[str]]:
        """Makes examples of numbered rows; returns them and notes about the source."""
        raise NotImplementedError

    def check_files(self) -> None:
        """Raises UserError where a file does not exist; imports nothing heavy."""
        for field in ("train_path", "test_path"):
            place, _ = split_of(getattr(self, field), "")
            if not Path(place).exists() and not is_hub(place):
                raise UserError(f"task.{field}: there is no file {place}; allowed: {PLACES}")

    def judges(self, examples: Sequence[Example]) -> tuple[dict[str, RewardFunction], dict[str, float]]:
        """Returns the reward functions for these examples, and their weights, by name."""
        raise NotImplementedError

    def load(self) -> Task:
        assert self.train_path is not None and self.test_path is not None  # the validator sees to it
        train, notes = self._read(self.train_path, "train")
        train, gate = self._take_out(train)
        test, more = self._read(self.test_path, "test")
        functions, weights = self.judges([*train, *test, *gate])
        return Task(
            self.name,
            limited(train, self.train_size, self.train_path, "train_size"),
            limited(test, self.test_size, self.test_path, "test_size"),
            functions,
            gate,
            weights,
            list(dict.fromkeys(notes + more)),  # one file may serve twice
        )

    def _read(self, source: str, default: str) -> tuple[list[Example], list[str]]:
        place, split = split_of(source, default)
        lines = not is_hub(place) and not Path(place).is_dir() and Path(place).suffix not in TABLES
        source = source if lines else f"{place}:{split}"
        found = cut(source, read_rows(Path(place)), split) if lines else read_split(place, split)
        rows = [(number, self._named(source, row)) for number, row in found]
        examples, notes = self.examples(source, rows)
        if not lines:
            notes += changed_types(source, [row for _, row in rows])
        if not examples:
            raise UserError(f"{source}: no examples")
        examples = [as_chat(example) for example in examples] if self.chat else examples
        return examples, notes

    def _named(self, source: str, row: dict[str, Any]) -> dict[str, Any]:
        """Renames the columns of a row."""
        if missing := [theirs for theirs in self.columns.values() if theirs not in row]:
            raise UserError(f"task.columns: {source} has no column {missing[0]!r}; it has {', '.join(map(repr, row))}")
        rest = {name: value for name, value in row.items() if name not in self.columns.values()}
        if "messages" in self.columns and "prompt" not in self.columns:
            rest.pop("prompt", None)  # the prompt is what was named
        named = rest | {name: row[theirs] for name, theirs in self.columns.items()}
        for column in PROMPT_COLUMNS:  # Arrow gives all messages of a column the same keys
            if isinstance(messages := named.get(column), list) and all(isinstance(m, dict) for m in messages):
                named[column] = [{key: value for key, value in m.items() if value is not None} for m in messages]
        return named

    def _take_out(self, train: list[Example]) -> tuple[list[Example], list[Example]]:
        """Divides the training examples into those to train on and gate examples."""
        size = self.gate_size or 0
        if size >= len(train):
            raise UserError(f"gate_size {size} leaves nothing of {self.train_path}, which has {len(train)} examples")
        held_out = random.Random("gate/0").sample(range(len(train)), size)
        gate = [train[index] for index in held_out]  # in this order, which is random
        rest = sorted(set(range(len(train))) - set(held_out))
        return [train[index] for index in rest], gate


def split_of(source: str, default: str) -> tuple[str, str]:
    """Divides ``PLACE:SPLIT`` into both; without a split it is the default one, of a single file train."""
    found = re.fullmatch(r"(.+):([\w.+-]+(?:\[.*\])?)", source)
    if found is not None and not Path(source).exists() and (Path(found[1]).exists() or is_hub(found[1])):
        return found[1], found[2]
    return source, default if Path(source).is_dir() or is_hub(source) else "train"


def is_hub(place: str) -> bool:
    """Returns whether a place that is no file or folder names a data set of the Hub."""
    return (
        HUB.fullmatch(place) is not None and Path(place).suffix not in {*TABLES, ".jsonl"} and not Path(place).exists()
    )


def read_split(place: str, split: str) -> list[tuple[int, dict[str, Any]]]:
    """Reads a split by the library datasets: (number, row) of every row, from 1 on.

    Raises:
        UserError: it cannot be read, or the package is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{place}:{split} needs the package datasets: pip install datasets") from error
    datasets.disable_progress_bars()
    options = load_options(place)
    try:
        return list(enumerate(datasets.load_dataset(**options, split=split), start=1))
    except Exception as error:  # of readers of many formats
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        reason = " ".join(str(cause or error).split()) or type(error).__name__
        raise UserError(f"{place}, split {split}, cannot be read: {reason:.300}") from error


def changed_types(source: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns notes on columns with dates or large integers, of which the library datasets makes another type."""
    notes = []
    for column in rows[0] if rows else ():
        values = [row[column] for row in rows]
        if any(isinstance(value, date) for value in values):
            notes.append(f"{source}: column {column!r} is read as dates: reward functions get datetime, not text")
        if any(isinstance(value, float) and abs(value) >= 2**63 for value in values):
            notes.append(
                f"{source}: column {column!r} has numbers beyond 2^63, which are read as floats of 16 digits: write "
                "them as text"
            )
    return notes


def cut(source: str, rows: list[Any], split: str) -> list[Any]:
    """Takes the part of a file's rows that a split such as ``train[10:20]`` or ``train[:90%]`` names.

    Raises:
        UserError: it has another form.
    """
    found = re.fullmatch(r"train(?:\[(-?\d+)?(%)?:(-?\d+)?(%)?\])?", split)
    if found is None:
        raise UserError(f"{source}: a file has the split train and its parts, such as train[:90%], got {split!r}")

    def place(number: str | None, percent: str | None) -> int | None:
        return None if number is None else round(int(number) * len(rows) / 100) if percent else int(number)

    return rows[place(found[1], found[2]) : place(found[3], found[4])]


def load_options(place: str) -> dict[str, Any]:
    """Returns the arguments of ``datasets.load_dataset`` for a place; a data set of the Hub is fetched first."""
    if Path(place).suffix in TABLES:
        return {"path": TABLES[Path(place).suffix], "data_files": place}
    hub = HUB.fullmatch(place)
    if Path(place).is_dir() or hub is None:
        return {"path": place}
    folder = snapshot(hub["name"], hub["revision"], kind="dataset", setting="task.train_path", files=None)
    return {"path": str(folder), "name": hub["config"]}


def as_chat(example: Example) -> Example:
    """With the prompt as one user message, if it is text."""
    if isinstance(example.prompt, str):
        return replace(example, prompt=[{"role": "user", "content": example.prompt}])
    return example


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


def text_column(path: str, number: int, row: dict[str, Any], column: str) -> str:
    """Returns a column that must be a non-empty string."""
    if column not in row:
        raise UserError(f"{path}:{number}: no column {column!r}; the line has {', '.join(map(repr, row)) or 'none'}")
    if not isinstance(row[column], str) or not row[column]:
        raise UserError(f"{path}:{number}: {column} is {row[column]!r:.80}; allowed: a string that is not empty")
    check_text(f"{path}:{number}", column, row[column])
    return row[column]
