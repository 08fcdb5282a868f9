"""The outcome of every fault: a row each, and their table."""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from bench._runner import commit

RECORDS = Path(__file__).parents[1] / "results" / "faults.jsonl"
KEY = ("fault", "variant", "seed")


def read(path: Path) -> list[dict[str, Any]]:
    """Return all rows; of rows with the same key the newest."""
    return list({tuple(row[name] for name in KEY): row for row in read_rows(path)}.values())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a file; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def add(path: Path, row: dict[str, Any]) -> None:
    """Append a row with the versions of libraries."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    append_row(path, row, {"versions": versions | {"transformers": transformers.__version__}})


def append_row(path: Path, row: dict[str, Any], place: dict[str, Any]) -> None:
    """Append a row with date, commit and ``place``: versions and the machine."""
    place = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit()} | place
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | place) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table with a line for every fault, in order of appearance."""
    lines = ["| fault | in | times | survived | dates |", "|---|---|---|---|---|"]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        fault_rows = [row for row in rows if row["fault"] == fault]
        variants = ", ".join(dict.fromkeys(row["variant"] for row in fault_rows))
        times = sum(row["times"] for row in fault_rows)
        survived = sum(row["times"] for row in fault_rows if not row["problems"])
        dates = sorted({row["date"] for row in fault_rows})
        span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        lines.append(f"| {fault} | {variants} | {times:,} | {survived:,} | {span} |")
    return "\n".join(lines) + "\n"
