"""The record of measurements on a GPU: one line of JSON each, written to disk at once.

Lines are only ever appended. A killed call leaves its lines, and the next call continues.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bench import _runner
from rlkernels.proof.worker import synchronize

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "bench/gpu/records"
SAME_FACTS = ("gpu", "torch", "commit")  # equal in all calls of one record
Entry = dict[str, Any]


class Journal:
    """A record and its file. ``entries`` are its lines, oldest first."""

    def __init__(self, path: Path, facts: Mapping[str, Any]):
        """Continue the file if it has the same device, torch and named commit; else move it aside."""
        self.path = path
        self.entries = list[Entry]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            entries = read(path)
            has_commit = facts["commit"] != "unknown" and not facts["commit"].endswith("-dirty")
            if has_commit and entries and all(entries[0].get(name) == facts[name] for name in SAME_FACTS):
                self.entries = entries
                path.write_text("".join(map(line, entries)))  # without a line that a killed call wrote in part
            else:
                path.replace(path.with_name(path.name + ".before"))
        self.goes_on = bool(self.entries)

    def add(self, kind: str, **values: Any) -> Entry:
        entry = {"kind": kind, **values}
        self.entries.append(entry)
        with self.path.open("a") as file:
            file.write(line(entry))
            file.flush()
            os.fsync(file.fileno())  # the machine may be lost, too
        return entry

    def of(self, kind: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry["kind"] == kind)

    def last(self, kind: str) -> Entry:
        """Return the last entry of a kind; {} if there is none."""
        return next((entry for entry in reversed(self.entries) if entry["kind"] == kind), {})

    def done(self, name: str) -> bool:
        """Return whether a job has finished, with or without success."""
        return any(entry["job"] == name for entry in self.of("done"))


def measured(labels: Entry, measure: Callable[[], Entry], device: torch.device, failed: bool | None = False) -> Entry:
    """Return a row: its labels, and what ``measure`` gives, or why it raised.

    Args:
        failed: ``ok`` of a row that raised; None if that is no failure of ours.

    Raises:
        RuntimeError: the device is broken; nothing runs on it in this process any more.
    """
    try:
        return labels | measure()
    except Exception as error:
        synchronize(device)
        return labels | {"ok": failed, "missing": reason_of(error)}


def reason_of(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    return f"{type(error).__name__}: {error}"[:600]


def line(entry: Entry) -> str:
    return json.dumps(entry) + "\n"


def read(path: Path) -> list[Entry]:
    """Return the entries of a record, without a last line that a killed call wrote in part.

    Raises:
        ValueError: the file is no record.
    """
    entries = []
    lines = path.read_text().splitlines()
    for number, text in enumerate(lines):
        try:
            entry = json.loads(text)
        except ValueError as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"{path}, line {number + 1}: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise ValueError(f"{path}, line {number + 1} is no entry of a record: {text[:80]}")
        entries.append(entry)
    return entries


def call_facts(commit: str | None) -> dict[str, Any]:
    """Return the facts of a record about a call as a whole; ``commit`` for a checkout without git."""
    return {**_runner.stamp(), **({"commit": commit} if commit else {})}


def record_path(facts: Mapping[str, Any], ending: str = ".jsonl") -> Path:
    """Return the default path of the record of a call."""
    return RECORDS / f"{(facts['gpu'] or 'cpu').replace(' ', '-')}-{facts['commit']}{ending}"
