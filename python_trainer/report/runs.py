"""Runs for a report, finished or not."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_trainer.accelerators import ACCELERATORS
from python_trainer.config import settings_used
from python_trainer.errors import UserError
from python_trainer.run_directory import read_metrics
from python_trainer.settings import PluginError

BASELINE = "baseline"


@dataclass
class Run:
    """A run; ``name`` groups the seeds of a variant. The summary of an unfinished run covers its steps so far."""

    name: str
    folder: Path
    summary: dict[str, Any]
    counters: dict[str, float]  # sums of the counters of all accelerators over its steps
    ended: bool = True

    @property
    def label(self) -> str:
        """Return variant and seed, or the folder."""
        return self.name if self.name.endswith(self.folder.name) else f"{self.name} {self.folder.name}"


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Return every run in these folders or below them, in the order of their paths."""
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(f"there is no folder {missing[0]}")
    runs, paths = [], [path for folder in folders for path in sorted(folder.rglob("metrics.jsonl"))]
    homes = list(dict.fromkeys(path.parent.absolute() for path in paths))  # the current folder has a name then, too
    alike = Counter(home.name for home in homes)
    for home in homes:
        name = home.parent.name if home.name.startswith("seed-") else home.name
        if name == home.name and alike[name] > 1:  # x/run and y/run are no seeds of one variant
            name = str(home.relative_to(os.path.commonpath(homes)))
        if not (rows := read_metrics(home)):
            continue
        counters = {metric: sum(row.get(metric) or 0.0 for row in rows) for metric in counters_of([home])}
        summary, ended = summary_of(home, rows)
        runs.append(Run(name, home, summary, counters, ended))
    if not runs:
        raise UserError(f"no run (metrics.jsonl) in {', '.join(map(str, folders))}")
    return runs


def summary_of(folder: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return what a report needs of summary.json, from the rows until it is written; and whether the run has ended."""
    path, last = folder / "summary.json", rows[-1]
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    ended = bool(found) and found["steps"] >= last["step"]

    def total(metric: str) -> float:
        return sum(row.get(metric) or 0.0 for row in rows)

    settings = settings_used(folder)
    evaluations = [row for row in rows if row.get("eval/accuracy") is not None]
    accuracies = [row["eval/accuracy"] for row in evaluations] or [None]
    final = {name: value for name, value in (evaluations or [{}])[-1].items() if name.startswith("eval/")}
    names = json.loads(settings.get("accelerators.enabled", "[]"))
    return {
        "steps": last["step"],
        **{f"{clock}_s": last.get(f"time/{clock}_s", 0.0) for clock in ("wall", "training")},
        **{f"{part}_s": total(f"time/{part}_s") for part in ("rollout", "train")},
        "accelerator_s": {name: total(f"time/accelerator/{name}_s") for name in names},
        **{f"{kind}_tokens": total(f"tokens/{kind}") for kind in ("generated", "prefill", "cached", "trained")},
        "eval_accuracy_start": accuracies[0], "eval_accuracy_final": accuracies[-1], "evaluation": {"final": final},
        "seconds_to_target": None, "tokens_to_target": None,
        "target_accuracy": json.loads(settings.get("evaluation.target_accuracy", "null")),
        "device": "-", "versions": {},
        **(found if ended else {}),  # of supervised steps it tells less
    }, ended  # fmt: skip


def counters_of(folders: Iterable[Path]) -> dict[str, str]:
    """Return metric -> the words of its row, for the registered accelerators and those of these runs."""
    found = dict.fromkeys(ACCELERATORS.resolve(name) for name in ACCELERATORS.names())
    for folder in folders:
        for name in json.loads(settings_used(folder).get("accelerators.enabled", "[]")):
            with suppress(PluginError):  # the module of a plug-in may be missing here
                found[ACCELERATORS.resolve(name)] = None
    return {metric: words for kind in found for metric, words in kind.counters.items()}


def by_variant(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs of each variant: the baseline first, others in their order."""
    variants: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.name != BASELINE):
        variants.setdefault(run.name, []).append(run)
    return variants
