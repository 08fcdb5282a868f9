"""Decoding passes as CUDA graphs: one launch instead of a thousand, which take the host longer than the GPU needs.

A graph replays kernels with the addresses and shapes that were recorded. So a pass is padded to one of few sizes, and
its numbers are copied to where the recorded kernels read them.
"""

import warnings
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from python_trainer.errors import first_line
from python_trainer.model.forward import PagedBatch, forward
from rlkernels import PagedKVCache
from rlkernels._graphs import record

MEMORY_SHARE = 0.05  # of the GPU's memory that recorded passes may hold
Numbers = tuple[torch.Tensor, ...]  # ids [B], positions [B], slots [B], block tables [B, blocks], lengths [B]


def padded_size(count: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least ``count``."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def copy_into(targets: Numbers, sources: Numbers) -> None:
    for target, source in zip(targets, sources):
        (target if target.shape == source.shape else target[:, : source.shape[1]]).copy_(source)


def held_bytes(device: torch.device) -> int:
    """Return the memory that tensors and recorded passes hold of a GPU, without what torch keeps for later ones."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # as a recording does first
    return torch.cuda.memory_reserved(device)


class DecodeGraphs:
    """Recorded passes of one token a sequence, one for each size of batch and width of block tables.

    They hold addresses of the model's weights, so they are valid while the weights change in place only. When they take
    more memory than ``most_bytes``, all are dropped, and further passes are recorded again.

    Args:
        model: whose parameters are whole on this device.
        cache: what the passes read and write.
    """

    def __init__(self, model: PreTrainedModel, cache: PagedKVCache):
        self.model = model
        self.cache = cache
        # what repeats a pass, where its kernels read numbers, and where they write logits [B, V]
        self.recorded: dict[tuple[int, int], tuple[Callable[[], None], Numbers, torch.Tensor]]
        self.weights: list[int] = []
        self.most_bytes = 0.0
        if cache.device.type == "cuda":
            self.most_bytes = MEMORY_SHARE * torch.cuda.get_device_properties(cache.device).total_memory
        self._forget()

    def look_at_weights(self) -> None:
        """Drop all recordings if weights have moved in memory."""
        weights = [parameter.data_ptr() for parameter in self.model.parameters()]
        if weights != self.weights:
            self._forget()
            self.weights = weights

    def _forget(self) -> None:
        self.recorded = {}
        self.bytes = 0
        self.pool = torch.cuda.graph_pool_handle() if self.cache.device.type == "cuda" else None

    def logits(self, numbers: Numbers, blocks: int) -> torch.Tensor | None:
        """Compute the logits [B, V] of a padded pass, which the next one overwrites.

        None: passes of this model cannot be recorded.

        Args:
            numbers: of the pass, B a size of :func:`padded_size`; tables may be narrower than recorded ones.
            blocks: most blocks of a sequence in this pass and those to come.
        """
        key = len(numbers[0]), padded_size(blocks)
        if key not in self.recorded:
            if self.bytes > self.most_bytes:
                self._forget()
            bytes_before = held_bytes(self.cache.device)
            try:
                self.recorded[key] = self._record(numbers, key[1])
            except RuntimeError as error:  # such as a forward that waits for the device
                name = type(self.model).__name__
                warnings.warn(f"{name} generates without CUDA graphs, more slowly: {first_line(error)}", stacklevel=2)
                return None
            self.bytes += held_bytes(self.cache.device) - bytes_before
        replay, inputs, logits = self.recorded[key]
        copy_into(inputs, numbers)
        replay()
        return logits

    def _record(self, numbers: Numbers, width: int) -> tuple[Callable[[], None], Numbers, torch.Tensor]:
        ids, positions, slots, tables, lens = (torch.empty_like(tensor) for tensor in numbers)
        tables = tables.new_zeros(len(ids), width)
        starts = torch.arange(len(ids) + 1, dtype=torch.int32, device=ids.device)
        rows = starts[:-1].long()
        inputs = ids, positions, slots, tables, lens, starts, rows  # the last two are constant, but must live as long
        copy_into(inputs, numbers)
        batch = PagedBatch(self.cache, slots, tables, lens, starts)
        replay, logits = record(lambda: forward(self.model, ids, positions, rows, batch)[0], self.pool)
        return replay, inputs, logits
