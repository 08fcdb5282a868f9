"""The record of a run on a GPU: one JSON file that is whole on disk after every step, and that a later call goes on."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import _runner

ROOT = Path(__file__).parents[2]
KEPT = ("started", "seconds", "device", "checks", "timings", "failed_timings", "tests")  # of the calls before
Job = dict[str, Any]


class Record:
    """What has been found so far; every change is on disk at once. ``facts`` may hold what an earlier call left."""

    def __init__(self, path: Path, **facts: Any):
        self.path, self.start, self.before = path, time.monotonic(), facts.get("seconds", 0.0)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.data: dict[str, Any] = {"started": now, **facts, "finished": False}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> None:
        self.data["seconds"] = round(self.before + time.monotonic() - self.start, 1)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.path)

    def has(self, job: Job) -> bool:
        """Whether the check or timing was done, well or not."""
        if job["kind"] == "check":
            names = ("op", "case", "backend")
            return any(all(found[n] == job[n] for n in names) for found in self.data["checks"])
        wanted = (job["op"], job["case"])
        timed = {(row["op"], row["shape"]) for row in self.data["timings"]}
        return wanted in timed | {(found["op"], found["case"]) for found in self.data["failed_timings"]}


def run_facts(commit: str | None) -> dict[str, Any]:
    """What a record says about the run as a whole; ``commit`` for where there is no git repository."""
    return {**_runner.stamp(), **({"commit": commit} if commit else {})}


def record_path(facts: dict[str, Any], ending: str = "") -> Path:
    """Where the record of these ``run_facts`` is looked for, and goes, unless an option says otherwise."""
    return ROOT / f"bench/gpu/records/{(facts['gpu'] or 'cpu').replace(' ', '-')}-{facts['commit']}{ending}.json"


def earlier(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What the record at ``path`` holds to go on from; nothing where it is of another device, torch or commit.

    Nothing either where the commit does not say what the code was: unknown, or with changes.
    """
    named = facts["commit"] != "unknown" and not facts["commit"].endswith("-dirty")
    try:
        found = json.loads(path.read_text())
        same = all(found[name] == facts[name] for name in ("gpu", "torch", "commit"))
        return {name: found[name] for name in KEPT} if named and same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
