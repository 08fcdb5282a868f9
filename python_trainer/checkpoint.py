"""The files of a checkpoint.

A kill cannot damage a checkpoint: it is written aside, flushed, then renamed into place. Each has checksums of its
files, which are compared before any of them is used. The only pickled file is the index of the shards that
torch.distributed.checkpoint writes with ``parallel: fsdp2``.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from python_trainer.errors import UserError
from python_trainer.run_directory import publish, usual_mode

PATTERN = re.compile(r"step-(\d+)")
CHECKSUMS = "checksums.json"
SHARDS = "shards"  # folder in a checkpoint to which all ranks have written


def encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Converts a value to JSON; tensors are moved to ``tensors`` and referred to by name."""
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
    """Returns the folder in which the checkpoint of a step is written before it is complete."""
    return folder / f".step-{step:06d}.tmp"


def save_checkpoint(folder: Path, step: int, state: Any, *, keep: int, spare: int | None = None) -> Path:
    """Writes ``folder/step-N``, then removes older checkpoints.

    Args:
        state: made of tensors, strings, numbers, lists and dictionaries.
        keep: how many of the newest checkpoints to keep.
        spare: step of one more checkpoint to keep; None: no other.

    Raises:
        UserError: the checkpoint cannot be written, as on a full disk; the earlier ones are unchanged.
    """
    begin_checkpoint(folder, step, state)
    return finish_checkpoint(folder, step, keep=keep, spare=spare)


def begin_checkpoint(folder: Path, step: int, state: Any) -> None:
    """Starts a checkpoint; until :func:`finish_checkpoint` more files may be written to ``aside_for(folder, step)``."""
    with removing_unfinished(folder, step):
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        write_aside(aside_for(folder, step), state)


def finish_checkpoint(folder: Path, step: int, *, keep: int, spare: int | None = None) -> Path:
    """Completes a checkpoint, then removes older ones; see :func:`save_checkpoint`."""
    target = folder / f"step-{step:06d}"
    with removing_unfinished(folder, step):
        put_in_place(aside_for(folder, step), target)
    for old in [path for path in list_checkpoints(folder)[:-keep] if step_of(path) != spare]:
        # out of sight in one step, so that a kill in the middle leaves no half of it
        gone = old.rename(old.with_name(f".old-{old.name}"))
        shutil.rmtree(gone)
    return target


@contextmanager
def removing_unfinished(folder: Path, step: int) -> Iterator[None]:
    """Within it a write that fails raises UserError and removes the unfinished checkpoint of this step."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside_for(folder, step), ignore_errors=True)
        found = list_checkpoints(folder)
        newest = f"the newest there is {found[-1].name}" if found else "there is none yet"
        raise UserError(
            f"checkpoint {folder / f'step-{step:06d}'} cannot be written: {error}; {newest}: make room there, or "
            "let it be written to, and --resume"
        ) from error


def write_aside(aside: Path, state: Any) -> None:
    """Writes a state to a new folder."""
    aside.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    (aside / "state.json").write_text(json.dumps(encode(state, tensors)), encoding="utf-8")
    save_file(tensors, aside / "tensors.safetensors")


def put_in_place(aside: Path, target: Path) -> None:
    """Adds the checksums to a folder that was written aside, and renames it."""
    (aside / CHECKSUMS).write_text(json.dumps(checksums(aside), indent=1) + "\n", encoding="utf-8")
    usual_mode(aside)
    publish(aside, target)


def checksums(checkpoint: Path) -> dict[str, str]:
    """Returns path within the checkpoint -> SHA-256, of all files but the one that holds them."""
    found = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != CHECKSUMS:
            with path.open("rb") as file:
                found[path.relative_to(checkpoint).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if PATTERN.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Returns the step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def load_checkpoint(path: Path) -> Any:
    """Returns the state that was saved, without shards (``distributed.shard_files`` reads those).

    Raises:
        UserError: files are missing or damaged.
    """
    try:
        found, expected = checksums(path), json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
        if wrong := sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)):
            raise ValueError(f"{wrong[0]} is {'other than it was written' if wrong[0] in found else 'missing'}")
        tensors = load_file(path / "tensors.safetensors")
        return decode(json.loads((path / "state.json").read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise UserError(f"checkpoint {path} is damaged ({' '.join(str(error).split())})") from error


def load_newest(folder: Path, tell: Callable[[str], None]) -> tuple[Path, Any] | None:
    """Returns the newest checkpoint that is not damaged, and its state; None if there is no checkpoint at all.

    Raises:
        UserError: all checkpoints are damaged. A run never starts anew because of that.
    """
    problems: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            state = load_checkpoint(path)
        except UserError as error:
            problems.append(str(error))
            continue
        if problems:
            tell(f"{'; '.join(problems)}: going on from {path.name}")
        return path, state
    if problems:
        raise UserError(f"no checkpoint in {folder} can be used: {'; '.join(problems)}; remove the run to begin anew")
    return None


def set_aside_later(folder: Path, step: int) -> None:
    """Renames checkpoints of later steps to ``damaged-step-N``: the run could not be resumed from them."""
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            target = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)
