"""Rows of JSON and CSV files as they are written: text stays text."""

import csv
import io
import json
import math
import sys
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from python_trainer.errors import UserError

Row = dict[str, Any]


def read_text(path: Path, newline: str | None = None) -> str:
    """Read a file of UTF-8 text, with or without the mark that programs of Windows begin files with.

    Args:
        newline: as of ``open``.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            return file.read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def read_lines(path: Path) -> list[tuple[int, Row]]:
    """Read a file with a JSON object a line; return (line number, object) of every line that is not blank.

    Raises:
        UserError: the file cannot be read, or a line is no object.
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON: {error}; allowed: one JSON object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: {type(row).__name__} {line[:60]!r}; allowed: one JSON object a line")
        rows.append((number, row))
    return rows


def read_json(path: Path) -> list[Row]:
    """Read a JSON file: a list of objects, an object of columns (lists of equal lengths), or an object a line.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError):  # of several lines
        return [row for _, row in read_lines(path)]
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        if len(lists) < len(content) or len({len(values) for values in lists}) != 1:
            return [content]
        content = [dict(zip(content, values)) for values in zip(*lists)]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise UserError(f"{path}: {type(content).__name__}; allowed: a list of JSON objects, or one object a line")
    return content


def read_csv(path: Path, delimiter: str) -> list[Row]:
    """Read a CSV file with a header as text; empty cells are None.

    Raises:
        UserError: the file cannot be read, is no CSV, or a row has more cells than the header.
    """
    csv.field_size_limit(sys.maxsize)  # long prompts; for the process
    reader = csv.reader(io.StringIO(read_text(path, newline=""), newline=""), delimiter=delimiter, strict=True)
    lines = filter(None, reader)  # blank ones have no cells
    rows = []
    try:
        header = next(lines, [])
        if twice := sorted({name for name in header if header.count(name) > 1}):
            raise UserError(f"{path}: two columns are named {twice[0]!r}")
        for cells in lines:
            if len(cells) > len(header):
                raise UserError(f"{path}:{reader.line_num}: {len(cells)} cells, more than the {len(header)} columns")
            rows.append({name: cell or None for name, cell in zip_longest(header, cells)})
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not CSV: {error}") from error
    return rows


def convert_columns(rows: list[Row], texts: Iterable[str]) -> None:
    """Turn the text of CSV columns into numbers or booleans, in place, where Python would write every cell so.

    Args:
        texts: columns that stay text.
    """
    for name in {name for row in rows for name in row} - set(texts):
        values = [_value(row[name]) for row in rows if row.get(name) is not None]
        booleans = {isinstance(value, bool) for value in values}
        if None not in values and len(booleans) < 2:
            for row in rows:
                if row.get(name) is not None:
                    row[name] = _value(row[name])


def _value(cell: str) -> int | float | bool | None:
    """Return a number or a boolean that is written like this cell; None if there is none."""
    if cell in ("True", "False"):
        return cell == "True"
    for kind in (int, float):
        try:
            value = kind(cell)
        except ValueError:
            continue
        if str(value) == cell and math.isfinite(value):
            return value
    return None
