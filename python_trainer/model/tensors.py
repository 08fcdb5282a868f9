"""Sharded tensors (DTensor) and plain ones alike; torch.distributed is imported by those who shard."""

from collections.abc import Mapping
from typing import Any

import torch


def full(tensor: Any) -> torch.Tensor:
    """All of a tensor; of a sharded one every rank must ask at the same time."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(value: torch.Tensor, target: Any) -> torch.Tensor:
    """A tensor on the device of ``target``, and sharded as that is where their shapes agree."""
    value = value.to(target.device)
    if hasattr(value, "to_local") or not hasattr(target, "to_local") or value.shape != target.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # each rank has read the same values: nothing is sent
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def load_weights(module: torch.nn.Module, values: Mapping[str, torch.Tensor], *, partly: bool = False) -> None:
    """``module.load_state_dict(values)``, where either may be sharded; ``partly``: what is not in it stays."""
    own = module.state_dict()
    placed = {name: like(value, own[name]) if name in own else value for name, value in values.items()}
    module.load_state_dict(placed, strict=not partly)
