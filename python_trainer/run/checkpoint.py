"""The files of a checkpoint.

A kill cannot damage a checkpoint: the trainer writes a draft, flushes it, then renames it. Each checkpoint has
checksums of its files, which are compared before any file is used. With ``parallel: fsdp2`` all ranks write weights and
moments, each its shards, by torch.distributed.checkpoint; any number of processes reads them. The index of shards,
which is torch's, is the only pickled file; :mod:`python_trainer.run.shard_index` runs nothing that it names.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError, first_line, is_lost_connection, mark_shared, on_one_line
from python_trainer.model.weights import set_usual_mode
from rlkernels._files import draft_of, remove_folder, replace_folder

CHECKSUMS = "checksums.json"
SHARDS = "shards"  # folder in a checkpoint to which all ranks have written


def encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Convert a value to JSON; tensors are moved to ``tensors`` and referred to by name."""
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
    """Undo :func:`encode`; tuples come back as lists."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {decode(k, tensors): decode(v, tensors) for k, v in value["items"]}
    return value


def save_checkpoint(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int,
    spare: int | None = None,
    ranks: RankGroup | None = None,
    shards: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``folder/step-N``, then remove older checkpoints.

    Args:
        state: made of tensors, strings, numbers, lists and dictionaries.
        keep: how many of the newest checkpoints to keep.
        spare: step of one more checkpoint to keep; None: no other.
        ranks: the processes that all call this, of which the first one writes ``state``; None: this one alone.
        shards: nested dictionaries of tensors, of which every rank writes its shards.

    Raises:
        UserError: the checkpoint cannot be written, as on a full disk; the earlier ones are unchanged. All ranks raise.
    """
    ranks = ranks or RankGroup()
    target = checkpoint_path(folder, step)
    draft = draft_of(target)
    try:
        with ranks.fail_together():
            if ranks.rank == 0:
                folder.resolve().mkdir(parents=True, exist_ok=True)  # also where a link leads that leads nowhere yet
                for leftover in (*folder.glob(".*"), draft):
                    shutil.rmtree(leftover, ignore_errors=True)
                draft.mkdir()
                tensors: dict[str, torch.Tensor] = {}
                (draft / "state.json").write_text(json.dumps(encode(state, tensors)), encoding="utf-8")
                save_file(tensors, draft / "tensors.safetensors")
        if shards is not None:
            write_shards(draft, shards, ranks.group)
        with ranks.fail_together():
            if ranks.rank == 0:
                (draft / CHECKSUMS).write_text(json.dumps(checksums(draft), indent=1) + "\n", encoding="utf-8")
                set_usual_mode(draft)
                replace_folder(target)
                for old in list_checkpoints(folder)[:-keep]:
                    if step_of(old) != spare:
                        remove_folder(old)
    except (OSError, SafetensorError, UserError) as error:  # UserError: another rank told of its error
        shutil.rmtree(draft, ignore_errors=True)
        complete = list_checkpoints(folder)
        newest = f"the newest there is {complete[-1].name}" if complete else "there is none yet"
        raise UserError(
            f"checkpoint {target} cannot be written: {error}; {newest}: make room there, or let it be written to, and "
            "--resume"
        ) from error
    return target


def checksums(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of all files but the one that holds them, by path within the checkpoint."""
    digests = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != CHECKSUMS:
            with path.open("rb") as file:
                digests[path.relative_to(checkpoint).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    complete = (path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal())
    return sorted(complete, key=step_of)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, or will be."""
    return folder / f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def load_checkpoint(path: Path) -> Any:
    """Return the state that was saved, without shards.

    Raises:
        UserError: files are missing or damaged.
    """
    try:
        actual = checksums(path)
        expected = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
        if wrong := sorted(name for name in {*actual, *expected} if actual.get(name) != expected.get(name)):
            raise ValueError(f"{wrong[0]} is {'other than it was written' if wrong[0] in actual else 'missing'}")
        tensors = load_file(path / "tensors.safetensors")
        return decode(json.loads((path / "state.json").read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise UserError(f"checkpoint {path} is damaged ({on_one_line(error)})") from error


def load_newest(folder: Path, tell: Callable[[str], None]) -> tuple[Path, Any] | None:
    """Return the newest checkpoint that is not damaged, and its state; None if there is no checkpoint at all.

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
            tell(f"{'; '.join(problems)}: continuing from {path.name}")
        return path, state
    if problems:
        raise UserError(f"no checkpoint in {folder} can be used: {'; '.join(problems)}; remove the run to begin anew")
    return None


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of nested dictionaries by path, such as ``optimizer/NAME/exp_avg``; None is left out."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def write_shards(checkpoint: Path, state: Mapping[str, Any], group: Any = None) -> None:
    """Write nested dictionaries of tensors; all ranks must call this together.

    Args:
        group: torch's process group that the ranks agree in; None: the default one.

    Raises:
        OSError: what one of them cannot write, all raise together.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.save(flatten(state), checkpoint_id=checkpoint / SHARDS, process_group=group)
    except CheckpointException as error:  # which is no Exception
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        size = dist.get_world_size() if dist.is_initialized() else 1
        reason = first_line(cause)  # torch's writer of files does not say it well
        unwritten = OSError(f"process {rank} of {size}: {reason}" if size > 1 else reason)
        mark_shared(unwritten)
        raise unwritten from error


def read_shards(checkpoint: Path, present: Mapping[str, Any], *, alone: bool = True) -> dict[str, Any]:
    """Undo :func:`write_shards`.

    Args:
        present: the same state as it is now: what is sharded in it is read in the same shards, its moments too.
            Everything else is read whole, in any process.
        alone: this process reads by itself, also inside a process group. False: all ranks of the default group call
            this together.

    Raises:
        UserError: files are missing or damaged, in whichever of several processes that read together.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from python_trainer.run.shard_index import ShardReader

    present_tensors = flatten(present)
    flat: dict[str, torch.Tensor] = {}
    try:
        reader = ShardReader(checkpoint / SHARDS)
        entries: Any = reader.read_metadata().state_dict_metadata
        for path, entry in entries.items():
            weight: Any = present_tensors.get(weight_of(path))
            if hasattr(weight, "to_local") and weight.shape == entry.size:
                flat[path] = torch.empty_like(weight, dtype=entry.properties.dtype)
            else:
                flat[path] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process may read as well
            dcp.load(flat, storage_reader=reader, no_dist=alone)
    except (OSError, ValueError, RuntimeError, EOFError, CheckpointException) as error:
        if is_lost_connection(error):
            raise
        if isinstance(error, CheckpointException):
            mark_shared(error)
        raise UserError(f"checkpoint {checkpoint} is damaged ({first_line(error)})") from error
    state: dict[str, Any] = {}
    for path, value in flat.items():
        *outer, last = path.split("/")
        inner = state
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return state


def weight_of(path: str) -> str:
    """Return the path of the weight that a moment or master weight belongs to; of a weight, its own."""
    parts = path.split("/")
    if "optimizer" not in parts:
        return path
    return "/".join(["model" if part == "optimizer" else part for part in parts[:-1]])
