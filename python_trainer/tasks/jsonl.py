"""Reads JSONL files with prompts; every problem names the file, the line and what is allowed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from python_trainer.data import Example
from python_trainer.errors import UserError

PROMPT_COLUMNS = ("prompt", "messages")


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
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
    return row[column]


def is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) for m in value)
        and all(isinstance(m.get(key), str) for m in value for key in ("role", "content"))
    )


def read_prompts(path: Path, prompt_column: str | None) -> tuple[list[Example], list[str]]:
    """Examples from lines with a prompt (string or chat messages), and what the user may want to know about them.

    The other columns go to the reward functions.
    """
    examples, numbers = [], []
    for number, row in read_rows(path):
        candidates = (prompt_column,) if prompt_column else PROMPT_COLUMNS
        column = next((name for name in candidates if name in row), None)
        if column is None:
            has = ", ".join(map(repr, row)) or "none"
            raise UserError(f"{path}:{number}: no column {' or '.join(map(repr, candidates))}; the line has {has}")
        prompt = row[column]
        if not (is_chat(prompt) or (isinstance(prompt, str) and prompt)):
            raise UserError(
                f"{path}:{number}: {column} is {prompt!r:.80}; allowed: a string that is not empty, or a list of "
                'messages {"role": "user", "content": "..."}'
            )
        columns = {name: value for name, value in row.items() if name != column}
        if reserved := {"prompts", "completions", "completion_ids"} & columns.keys():
            raise UserError(
                f"{path}:{number}: column {min(reserved)!r} has a name that reward functions get from the trainer"
            )
        examples.append(Example(prompt, columns))
        numbers.append(number)
    return examples, _gaps(path, numbers, examples)


def _gaps(path: Path, numbers: Sequence[int], examples: Sequence[Example]) -> list[str]:
    """One note for each column that some lines have and others lack."""
    notes = []
    for column in dict.fromkeys(name for example in examples for name in example.columns):
        without = [number for number, example in zip(numbers, examples) if column not in example.columns]
        if without:
            notes.append(
                f"{path}: column {column!r} is missing on {len(without)} of {len(examples)} lines, the first is line "
                f"{without[0]}; reward functions get None there"
            )
    return notes
