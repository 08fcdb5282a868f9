"""The record of a training on a GPU: one JSON file that is whole on disk after every change."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Record:
    """What has been found so far; ``save`` puts it on disk at once."""

    def __init__(self, path: Path, **facts: Any):
        self.path, self.start = path, time.monotonic()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.data: dict[str, Any] = {"started": now, **facts, "finished": False}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> None:
        self.data["seconds"] = round(time.monotonic() - self.start, 1)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.path)
