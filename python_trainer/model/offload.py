"""Optimizer state in the memory of the host between steps (``optimizer.offload``)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from python_trainer.model.tensors import local


class HostStore:
    """Tensors of a device whose values lie in the memory of the host, but for the time that they are used.

    Those that are away keep type, shape and device, and have a storage of no bytes: the same tensors come back, and
    whoever holds one need not know. Of a sharded tensor this rank's shard goes. On a GPU the host's memory is pinned.
    """

    def __init__(self) -> None:
        self._host = WeakTensorKeyDictionary()  # tensor -> its values on the host
        self._away = WeakTensorKeyDictionary()  # tensor that is away -> bytes of its storage

    def put_away(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies the values to the host and frees them on the device."""
        for tensor in tensors:
            part = local(tensor.detach())
            if tensor not in self._host:
                self._host[tensor] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            self._host[tensor].copy_(part)  # waits: others may read it there
            self._away[tensor] = part.untyped_storage().nbytes()
            part.untyped_storage().resize_(0)

    def bring_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies the values of those that are away to the device."""
        for tensor in tensors:
            if (size := self._away.pop(tensor, None)) is not None:
                part = local(tensor.detach())
                part.untyped_storage().resize_(size)
                part.copy_(self._host[tensor], non_blocking=True)

    def values(self, tensor: Any) -> torch.Tensor:
        """A tensor as it may be read and written to a file: of one that is away, its values on the host."""
        if tensor not in self._away:
            return tensor.detach()
        if not hasattr(tensor, "to_local"):
            return self._host[tensor]
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        mesh = init_device_mesh("cpu", (tensor.device_mesh.size(),))
        return DTensor.from_local(
            self._host[tensor], mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    @contextmanager
    def here(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Within it these tensors have their values."""
        kept = list(tensors)
        self.bring_back(kept)
        try:
            yield
        finally:
            self.put_away(kept)


def in_parts(sizes: Iterable[tuple[str, int]], most: int) -> list[list[str]]:
    """Names in order, cut where the sizes of a part would add up to more than ``most``; one by itself may be larger."""
    parts: list[list[str]] = []
    held = 0
    for name, size in sizes:
        if not parts or held + size > most:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += size
    return parts
