"""Weights of a module, plain or in shards (DTensor). Only those who shard import torch.distributed."""

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

META = torch.device("meta")


def full(tensor: Any) -> torch.Tensor:
    """Return all of a tensor; if it is sharded, all ranks call together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(value: torch.Tensor, target: Any) -> torch.Tensor:
    """Move a tensor to the device of ``target``, and shard it like that if their shapes agree."""
    value = value.to(target.device)
    if hasattr(value, "to_local") or not hasattr(target, "to_local") or value.shape != target.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # each rank has read the same values: nothing is sent
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def load_weights(module: torch.nn.Module, values: Mapping[str, torch.Tensor], *, partly: bool = False) -> None:
    """Call ``module.load_state_dict(values)``, where either may be sharded.

    Args:
        partly: weights that are not in ``values`` stay.
    """
    targets = module.state_dict()
    placed = {}
    for name, value in values.items():
        placed[name] = like(value, targets[name]) if name in targets else value
    module.load_state_dict(placed, strict=not partly)


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of all that a file of weights holds: parameters, tied ones once, and saved buffers."""
    yield from module.named_parameters()
    saved: Collection[str] = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in saved)


def checkpoint_weights(
    model: Any, weights: Iterable[tuple[str, torch.Tensor]] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights of a model by their names in a checkpoint, which may divide or join them.

    Args:
        weights: some of the model's, by their names in it; None: all of them, tied ones once.
    """
    from transformers.core_model_loading import revert_weight_conversion

    named = named_weights(model) if weights is None else weights
    yield from revert_weight_conversion(model, {name: weight.detach() for name, weight in named}).items()


def empty_copy(module: Any, device: torch.device) -> Any:
    """Copy a module with uninitialised parameters on a device, or on ``meta``; what is tied stays tied.

    Buffers are copied to the device, but not to ``meta``.
    """
    copies: dict[int, torch.Tensor] = {
        id(p): torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), p.requires_grad)
        for p in module.parameters()
    }
    if device.type != "meta":
        copies |= {id(buffer): buffer.to(device, copy=True) for buffer in module.buffers()}
    return copy.deepcopy(module, copies)


@torch.no_grad()
def copy_weights(module: torch.nn.Module, values: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy whole weights, by name, the same in every process, into a module, which may be sharded; others stay."""
    targets = dict(named_weights(module))
    for name, value in values:
        targets[name].copy_(like(value.detach(), targets[name]))


def set_usual_mode(folder: Path) -> None:
    """Set the usual permissions on the files of a folder; safetensors lets only the owner read them."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)
