"""Optimizer state in the memory of the host between steps (``optimizer.offload``)."""

import mmap
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from python_trainer.model.tensors import local

PORTABLE = 1  # pinned for all CUDA contexts


def pinned(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host that a GPU reads and writes by itself, with unknown contents.

    It has pages of its own, as many as it takes: torch's allocator of pinned memory rounds each tensor up to a power of
    two, to twice its size at worst.

    Raises:
        MemoryError: so much cannot be pinned.
    """
    size = shape.numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    cuda: Any = torch.cuda.cudart()
    if status := int(cuda.cudaHostRegister(tensor.data_ptr(), size, PORTABLE)):
        raise MemoryError(
            f"optimizer.offload: {size} more bytes of the host's memory cannot be pinned (CUDA's error {status})"
        )
    # not when Python ends, where CUDA may have ended before
    weakref.finalize(tensor, cuda.cudaHostUnregister, tensor.data_ptr()).atexit = False
    return tensor


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
                empty = pinned(part.shape, part.dtype) if part.is_cuda else torch.empty(part.shape, dtype=part.dtype)
                self._host[tensor] = empty
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
