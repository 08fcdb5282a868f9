"""Reads and writes what a run directory holds: rows of metrics, sample answers, evaluations prompt by prompt."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import load_file, save

from python_trainer.files import write_bytes

EVALUATIONS = "eval_test.safetensors"


def read_lines(path: Path) -> list[str]:
    """Lines that were written to their end; a kill can leave half of one."""
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()


def lines_until(path: Path, step: int | None) -> list[str]:
    """Lines of a file of rows up to a step; none for step None or a file that is not there."""
    if step is None or not path.exists():
        return []
    return [line for line in read_lines(path) if json.loads(line)["step"] <= step]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in read_lines(path)] if path.exists() else []


def read_samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Step -> the answers kept of it, as :func:`choose_samples` gives them; empty where a run has none."""
    path = folder / "samples.jsonl"
    rows = map(json.loads, read_lines(path)) if path.exists() else ()
    return {row["step"]: row["samples"] for row in rows}


def load_evaluations(folder: Path) -> dict[str, numpy.ndarray]:
    """``start`` and ``final``: uint8 [N], 1 where the answer to a test prompt was right; empty when there are none."""
    path = folder / EVALUATIONS
    return dict(load_file(path)) if path.exists() else {}


def save_evaluation(folder: Path, name: str, correct: Sequence[float]) -> None:
    """Adds one evaluation to the file, or replaces it."""
    found = load_evaluations(folder) | {name: numpy.asarray(correct, dtype=numpy.uint8)}
    write_bytes(folder / EVALUATIONS, save(found))
