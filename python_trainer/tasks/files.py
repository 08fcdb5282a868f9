"""Tasks whose prompts are read from files or the Hugging Face Hub; a problem names the file and the line."""

import glob
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from python_trainer.data import Example
from python_trainer.errors import UserError, on_one_line
from python_trainer.model.hub import snapshot
from python_trainer.settings import LOCAL
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import REWARDS, check_columns
from python_trainer.tasks.rows import convert_columns, read_csv, read_json, read_lines
from python_trainer.tasks.settings import TaskSettings

PROMPT_COLUMNS = ("prompt", "messages")
TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json"}  # read by the library datasets, as folders are
WRITTEN = {".json", ".jsonl", ".ndjson", ".csv", ".tsv"}  # read as they are
ALLOWED_SOURCES = f"a file (.jsonl, {', '.join(TABLES)}), a folder of such files, or an owner/name of the Hub"
HUB = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(/(?P<config>\w[\w.-]*))?(@(?P<revision>[\w./-]+))?")


class FileTaskSettings(TaskSettings):
    """Settings of the task. A prompt is a string or a list of chat messages, in the column "prompt" or "messages"."""

    name: str = "jsonl"
    reward: Annotated[str | list[str], REWARDS] = Field([])
    """Reward functions: `module:function` (the module may lie in the current folder); `math` compares with the column
    answer (pip install math-verify); `reward_model:PATH` runs a sequence-classification model of Transformers on the
    trainer's device; `environment` is the reward of task.environment. The first function that returns a value decides
    whether an answer is right: above 0.5. If it returns anything but 1, 0 and -1, no answer counts as right or wrong,
    and dynamic sampling and accelerators compare rewards."""
    reward_weights: list[float] | None = None
    """One weight per reward function; null: 1 each."""
    train_path: Annotated[str | None, LOCAL] = None
    """Training examples: a file (.jsonl, .json, .csv, .parquet), a folder of such files, or a Hub data set as
    `owner/name`, `owner/name/config` or `owner/name@revision`. A suffix `:SPLIT` selects a split or a part of one, as
    in `train.jsonl:train[:90%]`. The default is the split train."""
    test_path: Annotated[str | None, LOCAL] = None
    """Test examples, written like train_path. The default of folders and data sets is the split test."""
    columns: dict[str, str] = Field({})
    """New name -> column of the files: {prompt: question, answer: solution}. All other columns keep their names."""
    chat: bool = False
    """Turn each string prompt into one user message of the tokenizer's chat template."""

    @model_validator(mode="after")
    def _is_complete(self) -> "FileTaskSettings":
        missing = [field for field in ("train_path", "test_path") if getattr(self, field) is None]
        if missing:
            raise ValueError(f"task {self.name} needs {' and '.join(missing)}: {ALLOWED_SOURCES}")
        if not self.rewards:
            raise ValueError(f'task {self.name} needs reward: "math", "module:function", or a list of them')
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise ValueError(f"reward_weights needs a number for each of {self.rewards}, got {self.reward_weights}")
        return self

    @property
    def rewards(self) -> list[str]:
        return [self.reward] if isinstance(self.reward, str) else self.reward

    def check_files(self) -> None:
        """Raise UserError where a file does not exist; import nothing heavy."""
        for field in ("train_path", "test_path"):
            path, _ = split_of(getattr(self, field), "")
            if not Path(path).exists() and not is_hub(path):
                raise UserError(f"task.{field}: there is no file {path}; allowed: {ALLOWED_SOURCES}")

    def load(self) -> Task:
        train = self._read("train")
        test = self._read("test")
        size = self.gate_size or 0
        if size >= len(train):
            raise UserError(f"gate_size {size} leaves nothing of {self.train_path}, which has {len(train)} examples")
        held_out = random.Random("gate/0").sample(range(len(train)), size)
        gate = [train[index] for index in held_out]  # in this order, which is random
        for index in sorted(held_out, reverse=True):
            del train[index]
        functions = {Path(spec.rpartition(":")[2]).name: REWARDS.resolve(spec) for spec in self.rewards}
        if len(functions) < len(self.rewards):
            raise UserError(f"reward functions need different names, got {', '.join(self.rewards)}")
        weights = dict(zip(functions, self.reward_weights or []))
        task = Task(self.name, self._first(train, "train"), self._first(test, "test"), functions, gate, weights)
        for name, function in functions.items():
            check_columns(name, function, task)
        return task

    def load_test_set(self, task: Task, path: str) -> Task:
        test = self.model_copy(update={"test_path": path})._read("test")
        return replace(task, test=test[: self.test_size])

    def _first(self, examples: list[Example], split: str) -> list[Example]:
        """Return as many examples as ``train_size`` or ``test_size`` says."""
        size = getattr(self, f"{split}_size")
        if size is not None and size > len(examples):
            path = getattr(self, f"{split}_path")
            raise UserError(f"{split}_size is {size}, but {path} has {len(examples)} examples")
        return examples[:size]

    def _read(self, kind: str) -> list[Example]:
        """Read ``train_path`` or ``test_path``."""
        source = getattr(self, f"{kind}_path")
        path, split = split_of(source, kind)
        lines = not is_hub(path) and not Path(path).is_dir() and Path(path).suffix not in TABLES
        source = source if lines else f"{path}:{split}"
        text_columns = [self.columns.get(column, column) for column in PROMPT_COLUMNS]
        rows = cut(source, read_lines(Path(path)), split) if lines else read_split(kind, path, split, text_columns)
        if not rows:
            raise UserError(f"{source}: no examples; at least one is needed")
        places = [f"{source}:{number}" for number, _ in rows]
        return [self._example(place, self._named(place, row)) for place, (_, row) in zip(places, rows)]

    def _example(self, place: str, row: dict[str, Any]) -> Example:
        """Make the example of a row."""
        column = next((name for name in PROMPT_COLUMNS if name in row), None)
        if column is None:
            allowed = " or ".join(map(repr, PROMPT_COLUMNS))
            columns = ", ".join(map(repr, row)) or "none"
            raise UserError(f"{place}: no column {allowed}; the line has {columns} (task.columns can rename them)")
        prompt = row.pop(column)
        if self.chat and isinstance(prompt, str) and prompt:  # the task refuses an empty one
            prompt = [{"role": "user", "content": prompt}]
        return Example(prompt, row, place)

    def _named(self, place: str, row: dict[str, Any]) -> dict[str, Any]:
        """Rename the columns of a row."""
        if missing := [column for column in self.columns.values() if column not in row]:
            raise UserError(f"task.columns: {place} has no column {missing[0]!r}; it has {', '.join(map(repr, row))}")
        named = {name: value for name, value in row.items() if name not in self.columns.values()}
        if "messages" in self.columns and "prompt" not in self.columns:
            named.pop("prompt", None)  # the column that task.columns names is the prompt
        named |= {name: row[column] for name, column in self.columns.items()}
        for column in PROMPT_COLUMNS:  # Arrow gives all messages of a column the same keys
            if isinstance(messages := named.get(column), list) and all(isinstance(m, dict) for m in messages):
                named[column] = [{key: value for key, value in m.items() if value is not None} for m in messages]
        return named


def split_of(source: str, default: str) -> tuple[str, str]:
    """Divide ``PLACE:SPLIT``; without a split, it is train for a single file, else the default."""
    match = re.fullmatch(r"(.+):([\w.+-]+(?:\[.*\])?)", source)
    if match is not None and not Path(source).exists() and (Path(match[1]).exists() or is_hub(match[1])):
        return match[1], match[2]
    return source, default if Path(source).is_dir() or is_hub(source) else "train"


def is_hub(path: str) -> bool:
    """Return whether a path names a data set of the Hub, and no file or folder."""
    file = Path(path).exists() or Path(path).suffix in {*TABLES, ".jsonl"}
    return not file and HUB.fullmatch(path) is not None


def read_split(kind: str, path: str, split: str, text_columns: Sequence[str]) -> list[tuple[int, dict[str, Any]]]:
    """Read a split that the library datasets finds; return (number, row) of every row, from 1 on.

    Args:
        text_columns: columns of CSV files that hold text, even if it looks like numbers.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{path}:{split} needs the package datasets: pip install datasets") from error
    datasets.disable_progress_bars()
    options: dict[str, Any] = {"path": path}
    if Path(path).suffix in TABLES:
        options = {"path": TABLES[Path(path).suffix], "data_files": glob.escape(path)}
    elif is_hub(path) and (hub := HUB.fullmatch(path)):
        setting = {"train": "task.train_path", "test": "task.test_path or evaluation.sets"}[kind]
        folder = snapshot(hub["name"], hub["revision"], kind="dataset", setting=setting, files=None)
        options = {"path": str(folder), "name": hub["config"]}
    try:
        builder = datasets.load_dataset_builder(**options)
        rows = _read_as_written(builder, split, text_columns)
        if rows is None:
            rows = datasets.load_dataset(**options, split=split)
        return list(enumerate(rows, start=1))
    except UserError:
        raise
    except Exception as error:  # of readers of many formats
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        reason = on_one_line(cause or error)
        raise UserError(f"{path}, split {split}, cannot be read: {reason:.300}") from error


def _read_as_written(builder: Any, split: str, text_columns: Sequence[str]) -> list[dict[str, Any]] | None:
    """Read JSON and CSV files of a split without Arrow, which turns text into dates, and cells into numbers and nulls.

    Returns:
        The rows; None for other formats, compressed files, or where the data set describes its columns.
    """
    import datasets

    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in ("csv", "json") or builder.info.features:
        return None
    config = builder.config
    options = {"sep": config.sep} if kind == "csv" else {}
    plain = type(config)(name=config.name, version=config.version, data_files=config.data_files, **options)
    files = {str(name): [Path(file) for file in files] for name, files in config.data_files.items()}
    if config != plain or not {path.suffix for paths in files.values() for path in paths} <= WRITTEN:
        return None

    def read(name: str) -> list[dict[str, Any]]:
        if name not in split:  # a substring, such as train in train[:90%]: skip files of other splits
            return []
        if kind == "json":
            return [row for path in files[name] for row in read_json(path)]
        rows = [row for path in files[name] for row in read_csv(path, config.sep)]
        convert_columns(rows, text_columns)
        return rows

    rows = {name: read(name) for name in files}
    sizes = {name: len(split_rows) for name, split_rows in rows.items()}
    slices = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return [row for piece in slices for row in rows[piece.splitname][piece.from_ : piece.to]]


def cut(source: str, rows: list[Any], split: str) -> list[Any]:
    """Return the slice of a file's rows that a split such as ``train[10:20]`` or ``train[:90%]`` names."""
    match = re.fullmatch(r"train(?:\[(-?\d+)?(%)?:(-?\d+)?(%)?\])?", split)
    if match is None:
        raise UserError(f"{source}: a file has the split train and its parts, such as train[:90%], got {split!r}")

    def bound(number: str | None, percent: str | None) -> int | None:
        if number is None:
            return None
        return round(int(number) * len(rows) / 100) if percent else int(number)

    return rows[bound(match[1], match[2]) : bound(match[3], match[4])]
