"""What an evaluation found, prompt by prompt, in the run directory: two runs on the same prompts can be paired."""

from collections.abc import Sequence
from pathlib import Path

import numpy
from safetensors.numpy import load_file, save

from python_trainer.files import write_bytes

FILE = "eval_test.safetensors"


def load_evaluations(folder: Path) -> dict[str, numpy.ndarray]:
    """``start`` and ``final``: uint8 [N], 1 where the answer to a test prompt was right; empty when there are none."""
    path = folder / FILE
    return dict(load_file(path)) if path.exists() else {}


def save_evaluation(folder: Path, name: str, correct: Sequence[float]) -> None:
    """Adds one evaluation to the file, or replaces it."""
    found = load_evaluations(folder) | {name: numpy.asarray(correct, dtype=numpy.uint8)}
    write_bytes(folder / FILE, save(found))
