"""Weights into shards: a rank reads those of its own, or takes them from a model that is whole.

Nothing holds a whole model on its way there, but for the first rank where files cannot be read in parts.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from python_trainer.errors import UserError
from python_trainer.model.gguf import gguf_file
from python_trainer.model.hollow import weights_of
from python_trainer.model.lora import is_adapter, plain_name
from python_trainer.model.reading import read_model
from python_trainer.model.settings import ModelConfig
from python_trainer.model.tensors import full, local

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16", "F64")


@dataclass
class WeightFiles:
    """Where the weights of a model lie.

    Attributes:
        files: file by name of the weight; empty where they cannot be read in parts.
        reason: why they cannot, for the user; None where they can.
    """

    files: Mapping[str, Path]
    reason: str | None = None


def find_files(folder: Path, hollow: Any) -> WeightFiles:
    """The safetensors files of a folder, if they hold the weights of a model one by one as the model has them.

    Args:
        hollow: the model, without its weights.
    """
    if gguf_file(folder) is not None:
        return WeightFiles({}, "a GGUF file is unpacked as a whole")
    if (folder / "adapter_config.json").is_file():
        return WeightFiles({}, "an adapter is merged into a whole model")
    if getattr(hollow.config, "quantization_config", None) is not None:
        return WeightFiles({}, "its weights are quantized")
    try:
        files, seen = _listed(folder), dict[str, tuple[list[int], str]]()
        for path in set(files.values()):
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                seen |= {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except Exception as error:  # whoever reads the whole says what is wrong
        return WeightFiles({}, f"its files cannot be read in parts ({type(error).__name__})")
    wanted, aliases = dict(weights_of(hollow)), hollow.state_dict().keys()
    for name, tensor in wanted.items():
        shape, kind = seen.get(name, (None, ""))
        if shape != list(tensor.shape) or kind not in FLOATS:
            return WeightFiles({}, f"its files do not hold {name} as the model has it")
    if both := sorted((aliases - wanted.keys()) & seen.keys()):  # may be another weight than the one it is tied to
        return WeightFiles({}, f"its files hold {both[0]} beside the weight that it shares")
    return WeightFiles({name: files[name] for name in wanted})


def _listed(folder: Path) -> dict[str, Path]:
    """File by name of the weight, as the folder says."""
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in listed.items()}
    with safe_open(folder / ONE_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / ONE_FILE)


def rows_of(tensor: Any) -> slice:
    """Which rows are in this rank's shard, as ``torch.chunk`` cuts them; all of a tensor that is not sharded."""
    if not hasattr(tensor, "to_local"):
        return slice(None)
    each = -(-len(tensor) // tensor.device_mesh.size())
    first = min(tensor.device_mesh.get_local_rank() * each, len(tensor))
    return slice(first, first + len(tensor.to_local()))


@torch.no_grad()
def read_parts(module: torch.nn.Module, found: WeightFiles, dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Reads this rank's rows of every weight -> the names of those with NaN or infinity.

    Args:
        module: allocated; adapters in it stay as they are.
        dtypes: of the model's weights, to which they are rounded, whatever shards are.
    """
    inside, broken = defaultdict[Path, list[tuple[str, Any]]](list), []
    for name, target in weights_of(module):
        if not is_adapter(name):
            inside[found.files[plain_name(name)]].append((plain_name(name), target))
    for path, targets in inside.items():
        with safe_open(path, framework="pt") as file:
            for name, target in targets:
                if not local(target).numel():
                    continue
                part = file.get_slice(name)[rows_of(target)] if target.ndim else file.get_tensor(name)
                local(target).copy_(part.to(dtypes[name]))
                if not bool(part.isfinite().all()):
                    broken.append(name)
    return broken


def whole_weights(folder: Path, config: ModelConfig, dtype: torch.dtype, hollow: Any) -> dict[str, torch.Tensor]:
    """All weights by name, in the memory of the host.

    Raises:
        UserError: they cannot be read, or the files hold another model than ``hollow``, which config.json describes.
    """
    read = dict(weights_of(read_model(folder, config, dtype)[0]))
    if others := sorted(read.keys() ^ {name for name, _ in weights_of(hollow)}):
        raise UserError(
            f"model.path: {folder} cannot be loaded with parallel: fsdp2, its weights and its config.json do not agree "
            f"on {others[0]}; if that is tied to another, tie_word_embeddings must be as in the files"
        )
    return read


@torch.no_grad()
def receive(module: torch.nn.Module, values: Mapping[str, Any] | None, dtypes: Mapping[str, torch.dtype]) -> None:
    """The first rank has a whole model and sends it weight by weight; each rank keeps its rows.

    Args:
        module: allocated; adapters in it stay as they are.
        values: by name; None in all but the first rank.
        dtypes: of the model's weights.
    """
    for name, target in weights_of(module):
        if is_adapter(name):
            continue
        device = local(target).device
        if values is not None:
            value = values[plain_name(name)].detach().to(device).contiguous()
        else:
            value = torch.empty(target.shape, dtype=dtypes[plain_name(name)], device=device)
        dist.broadcast(value, 0)
        local(target).copy_(value[rows_of(target)] if target.ndim else value)


@torch.no_grad()
def take_rows(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Fills those weights of a module, allocated, whose whole values are here by name, with this rank's rows."""
    for name, target in weights_of(module):
        if name in values:
            local(target).copy_(values[name][rows_of(target)] if target.ndim else values[name])


@torch.no_grad()
def gather(whole: torch.nn.Module, module: torch.nn.Module) -> None:
    """Fills a plain module, allocated, with all rows of one in shards; adapters are left out."""
    shards: dict[str, Any] = {plain_name(name): tensor for name, tensor in weights_of(module)}
    for name, target in weights_of(whole):
        target.copy_(full(shards[name].to(target.dtype)))  # rounded before it is sent
