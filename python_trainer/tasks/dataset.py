"""Prompts from Parquet, CSV, JSON or JSONL files, or of the Hugging Face Hub, through the library datasets."""

from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.hub import is_hub_id, snapshot
from python_trainer.tasks.jsonl import PROMPT_COLUMNS, RewardedSettings, read_prompts

BUILDERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
ALLOWED = f"a file ({', '.join(BUILDERS)}), a folder of such files, or an owner/name of the Hub"


class DatasetSettings(RewardedSettings):
    """Settings of the task."""

    name: str = "dataset"
    dataset: str | None = None
    """A file (.parquet, .csv, .json, .jsonl), a folder of such files, or an id of the Hub (`owner/name`)."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a data set of the Hub; null for its default branch."""
    dataset_config: str | None = None
    """Configuration of a data set that has several."""
    train_split: str = "train"
    """Split with the training examples; may be cut, as in train[:90%]. A file is one split, named train."""
    test_split: str = "test"
    """Split with the test examples."""
    gate_split: str | None = None
    """Split with the gate examples; null: gate_size examples are taken out of the training split."""
    streaming: bool = False
    """Read no more rows than train_size, gate_size and test_size say, instead of fetching the whole data set first."""
    columns: dict[str, str] = Field({})
    """Name for the trainer and the reward functions -> column of the data set: {prompt: question, answer: solution}.
    Other columns keep their names; the prompt is "prompt" or "messages"."""

    @model_validator(mode="after")
    def _has_dataset(self) -> "DatasetSettings":
        if self.dataset is None:
            raise ValueError(f"task dataset needs dataset: {ALLOWED}")
        if self.streaming and None in (self.train_size, self.test_size):
            raise ValueError("streaming needs train_size and test_size")
        if self.streaming and self.gate_split and self.gate_size is None:
            raise ValueError("streaming needs gate_size with gate_split, got null")
        if len(set(self.columns.values())) < len(self.columns):
            raise ValueError(f"columns must name every column of the data set once, got {self.columns}")
        return self

    def sources(self) -> tuple[str | None, str | None, str | None]:
        gate = self.gate_split and f"{self.dataset}:{self.gate_split}"
        return f"{self.dataset}:{self.train_split}", gate, f"{self.dataset}:{self.test_split}"

    def read(self, source: str) -> tuple[list[Example], list[str]]:
        assert self.dataset is not None  # the validator sees to it
        split = source.removeprefix(f"{self.dataset}:")
        rows = ((number, self._named(source, row)) for number, row in enumerate(self._rows(split), start=1))
        examples, notes = read_prompts(source, rows)
        if not examples:
            raise UserError(f"{source}: no examples")
        return examples, notes

    def _named(self, source: str, row: dict[str, Any]) -> dict[str, Any]:
        """A row under the names of ``columns``, and messages without the keys that other messages have."""
        if missing := [theirs for theirs in self.columns.values() if theirs not in row]:
            raise UserError(f"task.columns: {source} has no column {missing[0]!r}; it has {', '.join(map(repr, row))}")
        rest = {name: value for name, value in row.items() if name not in self.columns.values()}
        if "messages" in self.columns and "prompt" not in self.columns:
            rest.pop("prompt", None)  # the prompt is what was named
        named = rest | {name: row[theirs] for name, theirs in self.columns.items()}
        for column in PROMPT_COLUMNS:
            if isinstance(messages := named.get(column), list) and all(isinstance(m, dict) for m in messages):
                named[column] = [{key: value for key, value in m.items() if value is not None} for m in messages]
        return named

    def _rows(self, split: str) -> list[dict[str, Any]]:
        """The rows of a split, of a stream no more than can be needed.

        Raises:
            UserError: the package is missing, or the data set cannot be read.
        """
        try:
            import datasets
        except ImportError as error:
            raise UserError("task dataset needs the package datasets: pip install datasets") from error
        datasets.disable_progress_bars()
        place = self._place()
        most = max((self.train_size or 0) + (self.gate_size or 0), self.test_size or 0)
        most *= 2 if self.train_half else 1
        try:
            found = datasets.load_dataset(**place, split=split, streaming=self.streaming)
            return list(islice(found, most) if self.streaming else found)
        except Exception as error:  # of readers of many formats
            cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
            reason = " ".join(str(cause or error).split()) or type(error).__name__
            raise UserError(f"task.dataset: {self.dataset}, split {split}, cannot be read: {reason:.300}") from error

    def _place(self) -> dict[str, Any]:
        """What ``load_dataset`` is told: files here, or those of the Hub, which are fetched first unless streamed."""
        assert self.dataset is not None
        name, path = {"name": self.dataset_config}, Path(self.dataset)
        if path.is_file() and path.suffix in BUILDERS:
            return {"path": BUILDERS[path.suffix], "data_files": str(path)}
        if path.is_dir():
            return {"path": str(path)} | name
        if path.exists() or not is_hub_id(self.dataset):
            raise UserError(f"task.dataset: {self.dataset} is no data set here; allowed: {ALLOWED}")
        if self.streaming:
            return {"path": self.dataset, "revision": self.dataset_revision} | name
        folder = snapshot(self.dataset, self.dataset_revision, kind="dataset", setting="task.dataset", files=None)
        return {"path": str(folder)} | name
