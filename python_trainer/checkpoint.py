"""Checkpoints that a kill cannot damage: written aside, flushed, then renamed into place. Nothing is pickled,
but for the index of what several processes wrote together (``parallel: fsdp2``), as torch.distributed.checkpoint does.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from python_trainer.errors import UserError
from python_trainer.files import publish

PATTERN = re.compile(r"step-(\d+)")
SHARDS = "shards"  # folder in a checkpoint with what several processes wrote together


def encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A JSON value; tensors are moved to ``tensors`` and referred to by name."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"items": [[encode(k, tensors), encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return [encode(v, tensors) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint holds tensors, strings, numbers, lists and dictionaries, got {type(value).__name__}")


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Undoes :func:`encode`; tuples come back as lists."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {decode(k, tensors): decode(v, tensors) for k, v in value["items"]}
    return value


def aside_for(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it is complete."""
    return folder / f".step-{step:06d}.tmp"


def save_checkpoint(
    folder: Path, step: int, state: Any, *, keep: int, add: Callable[[Path], None] = lambda aside: None
) -> Path:
    """Writes ``folder/step-N``, then removes all but the newest ``keep``.

    ``state`` is made of tensors, strings, numbers, lists and dictionaries; ``add`` writes more files into the folder
    before it is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)
    target = folder / f"step-{step:06d}"
    aside = aside_for(folder, step)
    aside.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    (aside / "state.json").write_text(json.dumps(encode(state, tensors)), encoding="utf-8")
    save_file(tensors, aside / "tensors.safetensors")
    add(aside)
    publish(aside, target)
    for old in list_checkpoints(folder)[:-keep]:
        # out of sight in one step, so that a kill in the middle leaves no half of it
        gone = old.rename(old.with_name(f".old-{old.name}"))
        shutil.rmtree(gone)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if PATTERN.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which it was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def load_checkpoint(path: Path) -> Any:
    """The state that was saved; what several processes wrote in shards is left out (``distributed.shard_files``).

    Raises:
        UserError: files are missing or damaged.
    """
    try:
        tensors = load_file(path / "tensors.safetensors")
        return decode(json.loads((path / "state.json").read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"checkpoint {path} is damaged ({error}); remove it to go on from the one before") from error
