"""Weights and moments in shards, by torch.distributed.checkpoint.

Some processes write a checkpoint, and any number reads it. Each rank reads its rows of a model's safetensors files.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from python_trainer.checkpoint import SHARDS, load_checkpoint
from python_trainer.errors import UserError, is_lost_connection, mark_shared
from python_trainer.model.lora import is_adapter, plain_name
from python_trainer.model.weights import local, named_weights

State = Mapping[str, Any]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def flatten(state: State, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dictionaries by path, such as ``optimizer/NAME/exp_avg``; None is left out."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Undoes :func:`flatten`."""
    state: dict[str, Any] = {}
    for path, value in flat.items():
        *outer, last = path.split("/")
        inner = state
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return state


def write_shards(checkpoint: Path, state: State) -> None:
    """Writes what ``Learner.state_dict`` gives; all ranks must call this together.

    Raises:
        OSError: what one of them cannot write, all raise together.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.save(flatten(state), checkpoint_id=checkpoint / SHARDS)
    except CheckpointException as error:  # which is no Exception
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        size = dist.get_world_size() if dist.is_initialized() else 1
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]  # torch's writer of files does not say it well
        unwritten = OSError(f"process {rank} of {size}: {reason}" if size > 1 else reason)
        mark_shared(unwritten)
        raise unwritten from error


def load_whole(checkpoint: Path, *, part: str = "") -> dict[str, Any]:
    """As :func:`python_trainer.checkpoint.load_checkpoint`, with whatever was written in shards, in any process.

    Args:
        part: which of what was written in shards is read, ``model/`` alone say.
    """
    state = load_checkpoint(checkpoint)
    return state | read_shards(checkpoint, {}, part=part) if (checkpoint / SHARDS).is_dir() else state


def read_shards(checkpoint: Path, present: State, *, part: str = "") -> dict[str, Any]:
    """Undoes :func:`write_shards`, for all of it or one ``part``.

    Args:
        present: the same state as it is now: what is sharded in it is read in the same shards, its moments too.
            Everything else is read whole, in any process.

    Raises:
        UserError: files are missing or damaged, in whichever of several processes that read together.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    own, flat = flatten(present), dict[str, torch.Tensor]()
    try:
        index = dcp.FileSystemReader(checkpoint / SHARDS).read_metadata()
        for path, entry in index.state_dict_metadata.items():
            if not path.startswith(part):
                continue
            assert isinstance(entry, TensorStorageMetadata)
            weight = own.get(weight_of(path))
            if hasattr(weight, "to_local") and weight is not None and weight.shape == entry.size:
                flat[path] = torch.empty_like(weight, dtype=entry.properties.dtype)
            else:
                flat[path] = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process may read as well
            dcp.load(flat, checkpoint_id=checkpoint / SHARDS, no_dist=not dist.is_initialized())
    except (OSError, ValueError, RuntimeError, EOFError, CheckpointException) as error:
        if is_lost_connection(error):
            raise
        if isinstance(error, CheckpointException):
            mark_shared(error)
        reason = str(error).splitlines()[0]
        raise UserError(f"checkpoint {checkpoint} is damaged ({reason})") from error
    state: dict[str, Any] = {"critic": None} | unflatten(flat)
    for learned in (state, state["critic"]):
        if learned is not None:
            learned.setdefault("optimizer", {})  # before the first optimizer step there is nothing in it to write
    return state


def weight_of(path: str) -> str:
    """The path of the weight that a moment or master weight belongs to; of a weight, its own."""
    parts = path.split("/")
    if "optimizer" not in parts:
        return path
    return "/".join(["model" if part == "optimizer" else part for part in parts[:-1]])


def unreadable_in_parts(folder: Path, model: Any) -> str | None:
    """Why a rank cannot read rows of the weights in a folder, for the user; None where it can.

    Args:
        model: of the folder, without its weights.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    if (folder / "adapter_config.json").is_file():
        return "an adapter is merged into a whole model"
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    try:
        found: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # whoever reads the whole says what is wrong
        return f"its files cannot be read in parts ({type(error).__name__})"
    wanted = dict(named_weights(model))
    for name, tensor in wanted.items():
        there = found.get(name)
        if there is None or there.size != tensor.shape or there.properties.dtype not in FLOATS:
            return f"its files do not hold {name} as the model has it"
        if len(there.chunks) > 1:
            return f"its files hold {name} more than once"
    if both := sorted((model.state_dict().keys() - wanted.keys()) & found.keys()):
        return f"its files hold {both[0]} beside the weight that it shares"  # which may be another
    return None


@torch.no_grad()
def read_weight_files(module: torch.nn.Module, folder: Path, dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Reads this rank's rows of every weight -> the names of those with NaN or infinity.

    Args:
        module: allocated; adapters in it stay as they are.
        folder: its safetensors files hold the weights of the plain model.
        dtypes: of the model's weights, to which they are rounded, whatever shards are.
    """
    import torch.distributed.checkpoint as dcp

    targets = {plain_name(name): tensor for name, tensor in named_weights(module) if not is_adapter(name)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads for itself
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load({name: tensor.detach() for name, tensor in targets.items()}, storage_reader=reader, no_dist=True)
    broken = []
    for name, target in targets.items():
        part = local(target)
        if not bool(part.isfinite().all()):
            broken.append(name)
        part.copy_(part.to(dtypes[name]))
    return broken
