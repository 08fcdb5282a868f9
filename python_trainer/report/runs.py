"""Finished runs, as the parts of a report take them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_trainer.accelerators import ACCELERATORS
from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.config import settings_used
from python_trainer.errors import UserError
from python_trainer.registry import PluginError
from python_trainer.run_directory import read_metrics

BASELINE = "baseline"
Kind = type[AcceleratorSettings]


@dataclass
class Run:
    """A finished run; ``name`` groups the seeds of one variant."""

    name: str
    folder: Path
    summary: dict[str, Any]
    curve: list[tuple[float, float]]  # (wall seconds without evaluations, accuracy)
    counters: dict[str, float]  # sums of the counters of all accelerators over its steps

    @property
    def label(self) -> str:
        """Variant and seed, or the folder."""
        return self.name if self.folder.name == self.name else f"{self.name} {self.folder.name}"


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Every finished run in these folders or below them, in the order of their paths.

    Raises:
        UserError: there is none.
    """
    runs = []
    for folder in folders:
        for path in sorted(folder.rglob("summary.json")) if folder.is_dir() else []:
            home = path.parent
            name = home.parent.name if home.name.startswith("seed-") else home.name
            rows = read_metrics(home)
            curve = [(row["time/training_s"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
            counters = {
                metric: sum(row.get(metric, 0.0) for row in rows) for metric in counters_of(accelerators_of([home]))
            }
            runs.append(Run(name, home, json.loads(path.read_text(encoding="utf-8")), curve, counters))
    if not runs:
        raise UserError(f"no finished run (summary.json) in {', '.join(map(str, folders))}")
    return runs


def accelerators_of(folders: Iterable[Path]) -> list[Kind]:
    """The registered accelerators, and others that runs in these folders had, where their modules can be found."""
    found = dict.fromkeys(ACCELERATORS.resolve(name) for name in ACCELERATORS.names())
    for folder in folders:
        for name in json.loads(settings_used(folder).get("accelerators.enabled", "[]")):
            try:
                found[ACCELERATORS.resolve(name)] = None
            except PluginError:
                continue  # runs are looked at where the module may be missing; its metrics have charts all the same
    return list(found)


def counters_of(accelerators: Iterable[Kind]) -> dict[str, str]:
    """Metric -> the words of its row."""
    return {metric: words for kind in accelerators for metric, words in kind.counters.items()}


def by_variant(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each variant, in their order."""
    variants: dict[str, list[Run]] = {}
    for run in runs:
        variants.setdefault(run.name, []).append(run)
    return variants


def target_of(runs: Sequence[Run]) -> float | None:
    return next((run.summary["target_accuracy"] for run in runs if run.summary["target_accuracy"]), None)
