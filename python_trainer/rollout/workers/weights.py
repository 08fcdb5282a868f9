"""One copy of a model's weights that all rollout workers read."""

import copy
import io
import mmap
import os
import pickle
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import nn

from python_trainer.errors import UserError

ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in the memory."""

    start: int  # byte
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in uint8 memory [N]."""
        return memory[self.start : self.end].view(self.dtype).view(self.shape)


class SharedWeights:
    """A copy of a model's parameters and buffers, in memory without a name: it goes when the last process has ended.

    Raises:
        UserError: the model is not on a CPU, or holds something that cannot be sent to another process.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        tensors = _tensors(model)
        devices = {str(tensor.device) for tensor in tensors}
        if devices != {"cpu"}:
            raise UserError(
                f"rollout.workers above 1 needs a model on the CPU, got one on {', '.join(sorted(devices))}"
            )
        self.places, end = list[TensorPlace](), 0
        for tensor in tensors:
            place = TensorPlace(-(-end // ALIGNMENT) * ALIGNMENT, tensor.shape, tensor.dtype)
            self.places.append(place)
            end = place.end
        self.skeleton = _skeleton(model)
        self.size = max(end, 1)
        self.file = os.memfd_create("rlkernels-weights")
        os.ftruncate(self.file, self.size)
        self.memory = _mapped(self.file, self.size)
        self.push()

    @torch.no_grad()
    def push(self) -> None:
        """Copies the model's weights as they are now."""
        for place, tensor in zip(self.places, _tensors(self.model), strict=True):
            place.view(self.memory).copy_(tensor)

    def __getstate__(self) -> dict[str, Any]:
        """What a process being started gets; :func:`attach` makes a model of it."""
        return {"places": self.places, "skeleton": self.skeleton, "size": self.size, "file": DupFd(self.file)}

    def attach(self) -> Any:
        """In another process: a model whose weights are the shared ones, always as they were pushed last."""
        file: Any = self.file
        memory = _mapped(file.detach(), self.size)
        model = pickle.loads(self.skeleton)
        real: dict[int, torch.Tensor] = {}
        for place, tensor in zip(self.places, _tensors(model), strict=True):
            found = place.view(memory)
            real[id(tensor)] = nn.Parameter(found, requires_grad=False) if _is_parameter(tensor) else found
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                table.update({name: real[id(tensor)] for name, tensor in table.items() if tensor is not None})
        return model

    def __del__(self) -> None:
        if isinstance(getattr(self, "file", None), int):
            os.close(self.file)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, tied ones once."""
    return [*model.parameters(), *model.buffers()]


def _mapped(file: int, size: int) -> torch.Tensor:
    """uint8 [size] over a file; the mapping lives as long as the tensor."""
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _skeleton(model: nn.Module) -> bytes:
    """The model, pickled, without the numbers."""
    empty: dict[int, Any] = {}
    for tensor in _tensors(model):
        blank = torch.empty_like(tensor, device="meta", requires_grad=False)
        empty[id(tensor)] = nn.Parameter(blank, requires_grad=False) if _is_parameter(tensor) else blank
    out = io.BytesIO()
    try:
        pickle.dump(copy.deepcopy(model, empty), out)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"rollout.workers above 1: the model cannot be sent to other processes: {error}") from error
    return out.getvalue()
