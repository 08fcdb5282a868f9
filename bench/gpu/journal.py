"""The record of what was found on a GPU: one line of JSON a finding, on disk as soon as it is known.

Lines are only ever added. A call that is killed leaves what it had found, and the next call goes on.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import _runner

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "bench/gpu/records"
SAME = ("gpu", "torch", "commit")  # of all calls in one record
Entry = dict[str, Any]


class Journal:
    """A record and its file. ``entries`` holds what is in it, oldest first."""

    def __init__(self, path: Path, facts: Mapping[str, Any]):
        """Goes on with the file if it is of the same device, torch and named commit; else moves it aside."""
        self.path, self.entries = path, list[Entry]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            found = read(path)
            named = facts["commit"] != "unknown" and not facts["commit"].endswith("-dirty")
            if named and found and all(found[0].get(name) == facts[name] for name in SAME):
                self.entries = found
                path.write_text("".join(map(line, found)))  # without what a killed call left half-written
            else:
                path.replace(path.with_name(path.name + ".before"))
        self.goes_on = bool(self.entries)

    def add(self, kind: str, **values: Any) -> Entry:
        entry = {"kind": kind, **values}
        self.entries.append(entry)
        with self.path.open("a") as file:
            file.write(line(entry))
            file.flush()
            os.fsync(file.fileno())  # the machine may go, too
        return entry

    def of(self, kind: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry["kind"] == kind)

    def last(self, kind: str) -> Entry:
        """The last of its kind; empty if there is none."""
        return next((entry for entry in reversed(self.entries) if entry["kind"] == kind), {})

    def done(self, name: str) -> bool:
        """Tell whether a job was finished, well or not."""
        return any(found["job"] == name for found in self.of("done"))


def line(entry: Entry) -> str:
    return json.dumps(entry) + "\n"


def read(path: Path) -> list[Entry]:
    """The entries of a record, without a last line that a killed call left half-written.

    Raises:
        ValueError: it is no record.
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
    """Return what a record says about a call as a whole; ``commit`` for a checkout without git."""
    return {**_runner.stamp(), **({"commit": commit} if commit else {})}


def record_path(facts: Mapping[str, Any], ending: str = ".jsonl") -> Path:
    """Return where the record of such a call lies unless an option says otherwise."""
    return RECORDS / f"{(facts['gpu'] or 'cpu').replace(' ', '-')}-{facts['commit']}{ending}"
