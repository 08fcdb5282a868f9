"""Runs a Transformers model on flattened tokens: its attention reads and writes a paged KV cache.

``AttentionInterface.register`` adds an attention function under the name ``rlkernels_packed``; the state of one
forward pass travels as the keyword argument ``paging`` of the model's forward. Transformers makes no mask for a name
that has no mask function, so the model sees one row of T tokens with position ids and nothing else.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

import rlkernels.backend
from python_trainer.errors import UserError
from python_trainer.model.packed_attention import UNSUPPORTED, PaddedRows, padded_attention
from rlkernels import PagedKVCache, paged_attention, shared_prefix_attention, write_kv

IMPLEMENTATION = "rlkernels_packed"
# scores of a pass over padded rows, all heads: 1 GiB of float32, and a few times that in the making
LARGEST_SCORES = 1 << 28


@dataclass
class Paging:
    """Where the tokens of one forward pass live; see :func:`rlkernels.paged_attention`.

    With ``groups``, block tables and lengths are of what each sequence has beyond the prefix of its group; see
    :func:`rlkernels.shared_prefix_attention`.
    """

    cache: PagedKVCache
    slots: torch.Tensor  # int64 [T]
    block_tables: torch.Tensor  # int32 [B, max_blocks]
    seq_lens: torch.Tensor  # int32 [B]
    query_starts: torch.Tensor  # int32 [B + 1]
    longest_query: int  # of a sequence; the device knows these two, but would have to be waited for
    longest_key: int  # of a sequence, the prefix of its group included
    groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # tables, lengths, starts
    rows: PaddedRows | None = None  # made by the first layer that needs them, the same for all

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:  # fmt: skip
        """query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d]."""
        key_cache, value_cache = self.cache.key_cache[layer], self.cache.value_cache[layer]
        write_kv(key, value, key_cache, value_cache, self.slots)
        sequences = self.block_tables, self.seq_lens, self.query_starts
        if self.groups is None and self.is_padded(query):
            self.rows = self.rows or self.padded_rows()
            caches = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
            return padded_attention(query.to(key_cache.dtype), *caches, self.rows, scale).to(query.dtype)
        if self.groups is None:
            out = paged_attention(query, key_cache, value_cache, *sequences, scale=scale)
        else:
            out = shared_prefix_attention(query, key_cache, value_cache, *self.groups, *sequences, scale=scale)
        assert isinstance(out, torch.Tensor)
        return out

    def is_padded(self, query: torch.Tensor) -> bool:
        """Whether a GPU has no proven kernel, whose stand-in loops over sequences, and padded rows are not too many."""
        if query.device.type == "cpu" or rlkernels.backend.choose("paged_attention", query.device) != "torch":
            return False
        return len(self.seq_lens) * self.longest_query * self.longest_key * query.shape[1] <= LARGEST_SCORES

    def padded_rows(self) -> PaddedRows:
        """The sequences as padded rows whose keys are slots of the cache."""
        device, block_size, query_lens = self.seq_lens.device, self.cache.block_size, self.query_starts.diff()
        q, k = torch.arange(self.longest_query, device=device), torch.arange(self.longest_key, device=device)
        has_query = q < query_lens[:, None]  # [R, Q]
        slots = self.block_tables.long()[:, k // block_size] * block_size + k % block_size  # [R, K]
        # what lies beyond a sequence is masked, but must be a number: its own first key is written
        slots = torch.where(k < self.seq_lens[:, None], slots, slots[:, :1])
        visible = k <= ((self.seq_lens - query_lens)[:, None] + q)[..., None]  # [R, Q, K]
        return PaddedRows(
            torch.where(has_query, self.query_starts[:-1, None] + q, 0), slots,
            torch.where(visible, 0.0, -torch.inf),
            has_query.flatten().nonzero_static(size=len(self.slots)).flatten(),
        )  # fmt: skip


@dataclass
class Probe:
    """Stands in for :class:`Paging`: plain attention over packed sequences that notes what the layers ask for."""

    lengths: list[int]
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # layer -> KV heads, key and value dim
    window: int | None = None  # the smallest sliding window

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:  # fmt: skip
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        if window is not None:
            self.window = min(window, self.window or window)
        parts = []
        for q, k, v in zip(*(x.transpose(0, 1).split(self.lengths, 1) for x in (query, key, value))):
            parts.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True))
        return torch.cat(parts, 1).transpose(0, 1)


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, scaling: float | None = None, *, paging: Paging | Probe,
               sliding_window: int | None = None, **kwargs) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The attention function that Transformers calls: [1, H, T, d] each -> [1, T, Hq, d]."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(f"PagedEngine cannot run {type(module).__name__}: its attention uses {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return paging.attend(module.layer_idx, query, key, value, scale, sliding_window)[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """No dropout, no gradient checkpointing, no graph; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    # no_grad and not inference_mode: rotary embeddings that adapt keep tensors that training must be able to use
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def paged_mode(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode in which the model attends through ``paging=``; afterwards it attends as it did before."""
    implementation = model.config._attn_implementation
    with evaluation_mode(model):
        try:
            model.set_attn_implementation(IMPLEMENTATION)
            yield
        finally:
            model.set_attn_implementation(implementation)


def forward(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
            paging: Paging | Probe) -> torch.Tensor:  # fmt: skip
    """Logits [R, V] at ``rows`` of the flattened tokens ``ids`` [T]; the other rows never reach the output layer."""
    selects = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": rows} if selects else {}
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, paging=paging, **keep).logits[0]
    return logits if selects else logits[rows]


# ids [T], positions [T], rows [R] and the paging state -> logits [R, V]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Paging | Probe], torch.Tensor]


def probe(model: PreTrainedModel, run: Forward | None = None) -> Probe:
    """Finds the KV shape of every layer, and checks that nothing but attention looks across tokens.

    Args:
        run: what computes on flattened tokens; by default :func:`forward` of the model.

    Raises:
        UserError: the model does not compute on flattened tokens what it computes on its own.
    """
    name, run = type(model).__name__, run or partial(forward, model)
    device = next(model.parameters()).device
    ids, positions = torch.tensor([1, 2, 1], device=device), torch.tensor([0, 1, 0], device=device)
    found = Probe([2, 1])
    try:
        with paged_mode(model):
            packed = run(ids, positions, torch.arange(3, device=device), found).float()
    except TypeError as error:  # a forward that takes no further keyword arguments
        raise UserError(f"PagedEngine cannot run {name}: {error}") from error
    with evaluation_mode(model):
        own = model(input_ids=ids[None, :2], use_cache=False).logits[0].float()
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(found.shapes) != list(range(layers)):
        raise UserError(
            f"PagedEngine cannot run {name}: {len(found.shapes)} of its {layers} layers use Transformers' "
            "attention interface"
        )
    if len(set(found.shapes.values())) > 1 or found.shapes[0][1] != found.shapes[0][2]:
        raise UserError(f"PagedEngine needs keys and values of one shape in all layers, {name} has {found.shapes}")
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.1) * own.abs().max()
    if not ((packed[:2] - own).abs().max() <= tolerance and (packed[2] - own[0]).abs().max() <= tolerance):
        raise UserError(
            f"PagedEngine cannot run {name}: on flattened tokens it computes something else than on its own"
        )
    return found
