"""The one attention adapter: what the tokens of a forward pass look at, in training and in generation.

Transformers hands an object with ``attend`` to every layer (``rlkernels.integrations.transformers_attention``). In
training it is a :class:`PackedLayout`, in generation a :class:`PagedBatch`. Both call the kernels of rlkernels. Where
those are not proven on a GPU, :class:`VarlenRows` (FlashAttention) or :class:`PaddedRows` stand in.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

import rlkernels.backend
from python_trainer.errors import UserError
from rlkernels import PagedKVCache, grouped_attention, paged_attention, shared_prefix_attention, write_kv
from rlkernels.prefix_cache import GroupedLayout
from rlkernels.prefix_cache.layout import Lengths

# windows of varlen_attn: everything before, where the last query stands at the last key; all keys
CAUSAL, ALL_KEYS = (-1, 0), (-1, -1)
HALVES = (torch.bfloat16, torch.float16)  # what FlashAttention computes in
LARGEST_HEAD, HEAD_STEP = 256, 8  # and its largest head dimension, and what all have to be multiples of
OLDEST = (8, 0)  # and the compute capability that it needs
# elements of a piece's gathered keys and values, or of its mask: 1 GiB in float32, 512 MiB in bfloat16
LARGEST_PIECE = 1 << 28
# scores of a pass, all heads, up to which padding costs less than an older varlen_attn, which repeats the heads of keys
FEW_SCORES = 1 << 28


class PackedLayout(GroupedLayout):
    """The attention of a training pass: a token sees the prefix of its group and its own sequence."""

    def __init__(self, prefix_lens: Lengths, suffix_lens: Lengths, group_starts: Lengths):
        super().__init__(prefix_lens, suffix_lens, group_starts)
        self._rows: dict[torch.device, VarlenRows] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d].

        Raises:
            UserError: sequences beyond a sliding window.
        """
        if window is not None and (longest := int(self.position_ids.max()) + 1) > window:
            raise UserError(
                f"prompt and answer must be within the model's sliding window of {window} tokens, got {longest}: "
                "rollout.max_completion_length must be lower"
            )
        if rlkernels.backend.choose("grouped_attention", query.device) == "torch":
            if query.device not in self._rows:  # the same for all layers
                self._rows[query.device] = varlen_rows(self, query.device)
            return self._rows[query.device].attend(query, key, value, scale)
        return grouped_attention(query, key, value, self, scale=scale)


@dataclass
class PagedBatch:
    """The attention of a generation pass, to a paged cache; see :func:`rlkernels.paged_attention`.

    With ``groups``, block tables and lengths are of what each sequence has beyond the prefix of its group; see
    :func:`rlkernels.shared_prefix_attention`.
    """

    cache: PagedKVCache
    slots: torch.Tensor  # int64 [T]
    block_tables: torch.Tensor  # int32 [B, max_blocks]
    seq_lens: torch.Tensor  # int32 [B]
    query_starts: torch.Tensor  # int32 [B + 1]
    longest_query: int  # of a sequence; the device knows these three, but would have to be waited for
    longest_key: int  # of a sequence, the prefix of its group included
    keys: int  # of all sequences together
    groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # tables, lengths, starts
    rows: "VarlenRows | PaddedRows | None" = None  # made by the first layer that needs them, the same for all

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d]."""
        key_cache, value_cache = self.cache.key_cache[layer], self.cache.value_cache[layer]
        write_kv(key, value, key_cache, value_cache, self.slots)
        sequences = self.block_tables, self.seq_lens, self.query_starts
        if self.groups is None and (make_rows := self.rows_for(query)) is not None:
            self.rows = self.rows or make_rows()
            caches = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
            return self.rows.attend(query.to(key_cache.dtype), *caches, scale).to(query.dtype)
        if self.groups is None:
            out = paged_attention(query, key_cache, value_cache, *sequences, scale=scale)
        else:
            out = shared_prefix_attention(query, key_cache, value_cache, *self.groups, *sequences, scale=scale)
        assert isinstance(out, torch.Tensor)
        return out

    def rows_for(self, query: torch.Tensor) -> "Callable[[], VarlenRows | PaddedRows] | None":
        """What stands in on a GPU without a proven kernel: FlashAttention where it runs, else padded rows.

        None: a kernel of our own.
        """
        if query.device.type == "cpu" or rlkernels.backend.choose("paged_attention", query.device) != "torch":
            return None
        scores = len(self.seq_lens) * self.longest_query * self.longest_key * query.shape[1]
        return self.varlen_rows if kernel_for(query) is flash_rows and beats_padding(scores) else self.padded_rows

    def varlen_rows(self) -> "VarlenRows":
        """The sequences end to end, whose keys are slots of the cache: nothing is padded, and no score is held."""
        device, block_size = self.seq_lens.device, self.cache.block_size
        starts = pad(self.seq_lens.cumsum(0), (1, 0)).int()  # [B + 1]
        rows = torch.arange(len(self.seq_lens), device=device)
        row = rows.repeat_interleave(self.seq_lens, output_size=self.keys)  # [keys]
        place = torch.arange(self.keys, device=device) - starts[row]  # within its sequence
        slots = self.block_tables[row, place // block_size].long() * block_size + place % block_size
        return VarlenRows(slots, self.query_starts, starts, self.longest_query, self.longest_key)

    def padded_rows(self) -> "PaddedRows":
        """The sequences as padded rows whose keys are slots of the cache."""
        device, block_size, query_lens = self.seq_lens.device, self.cache.block_size, self.query_starts.diff()
        q, k = torch.arange(self.longest_query, device=device), torch.arange(self.longest_key, device=device)
        has_query = q < query_lens[:, None]  # [R, Q]
        slots = self.block_tables.long()[:, k // block_size] * block_size + k % block_size  # [R, K]
        # what lies beyond a sequence is masked, but must be a number: its own first key is written
        slots = torch.where(k < self.seq_lens[:, None], slots, slots[:, :1])
        return PaddedRows(
            torch.where(has_query, self.query_starts[:-1, None] + q, 0),
            slots,
            (self.seq_lens - query_lens)[:, None] + q,
            has_query.flatten().nonzero_static(size=len(self.slots)).flatten(),
        )


@dataclass(frozen=True)
class VarlenRows:
    """N rows of T queries and M gathered keys, end to end: what FlashAttention kernels take.

    Nothing is padded, and no mask is made: memory grows linearly with the tokens.
    """

    key_index: torch.Tensor  # int64 [M] token whose key stands there
    cu_seq_q: torch.Tensor  # int32 [N + 1] first query of each row
    cu_seq_k: torch.Tensor  # int32 [N + 1] first key of each row
    max_q: int
    max_k: int

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d], differentiable."""
        if not len(query):
            return query * 1
        key, value = (embedding(self.key_index, x.flatten(1)).unflatten(1, x.shape[1:]) for x in (key, value))
        rows = key, value, self.cu_seq_q, self.cu_seq_k, self.max_q, self.max_k
        return kernel_for(query)(query, *rows, scale=scale)


def varlen_rows(layout: GroupedLayout, device: torch.device) -> VarlenRows:
    """The layout's prefixes and suffixes as rows, in their order.

    The starts are where the kernel for ``device`` reads them: there on a GPU, else on the host.
    """
    # of each row: its own first token and their number, the same of the prefix before it
    spans: list[tuple[int, int, int, int]] = []
    for prefix, suffixes in layout.spans():
        shared = prefix.start, prefix.stop - prefix.start
        spans += [(*shared, prefix.start, 0), *((s.start, s.stop - s.start, *shared) for s in suffixes)]
    table = torch.tensor([span for span in spans if span[1]], dtype=torch.int64, device="cpu").view(-1, 4)
    lengths = table[:, 1] + table[:, 3]  # [N] keys of each row
    inside = torch.arange(int(lengths.sum()), device="cpu") - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    own_start, _, shared_start, shared_len = table.repeat_interleave(lengths, 0).unbind(1)  # [M]
    index = torch.where(inside < shared_len, shared_start + inside, own_start + inside - shared_len)
    home = device if device.type == "cuda" else torch.device("cpu")
    cu_seq_q, cu_seq_k = (pad(x.cumsum(0), (1, 0)).int().to(home) for x in (table[:, 1], lengths))
    max_q, max_k = (int(x.max()) if len(x) else 0 for x in (table[:, 1], lengths))
    return VarlenRows(index.to(device), cu_seq_q, cu_seq_k, max_q, max_k)


def kernel_for(query: torch.Tensor) -> Callable[..., torch.Tensor]:
    """varlen_attn of torch where it runs, else :func:`attend_rows`; both take the same."""
    if (
        query.is_cuda
        and suits_flash(query)
        and torch.cuda.get_device_capability(query.device) >= OLDEST
        and varlen_options() >= {"scale", "window_size"}
    ):
        return flash_rows
    return attend_rows


def suits_flash(query: torch.Tensor) -> bool:
    """Whether FlashAttention has kernels for such queries [T, Hq, d]."""
    return query.dtype in HALVES and query.shape[2] <= LARGEST_HEAD and query.shape[2] % HEAD_STEP == 0


@functools.cache
def varlen_options() -> set[str]:
    """Arguments of this torch's varlen_attn, which have changed from release to release."""
    return set(inspect.signature(varlen_attn).parameters)


def flash_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
) -> torch.Tensor:
    """varlen_attn; heads of keys are repeated where it cannot share them."""
    # a single query sees all keys anyway; without a window they are read once for the heads that share them, and in
    # pieces side by side, which the backward pass knows nothing of
    single = max_q == 1 and len(query) == len(cu_seq_q) - 1
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "window_size": ALL_KEYS if single and not learns else CAUSAL}
    if "enable_gqa" in varlen_options():
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key, value = repeat_heads(query, key, value)
    out = varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
    assert isinstance(out, torch.Tensor)
    return out


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
) -> torch.Tensor:
    """What varlen_attn computes, by scaled_dot_product_attention of a row at a time, on any device and in any dtype.

    A row with more keys than queries gets queries of zeros in front, whose results go: so all that is said of who sees
    whom is ``is_causal``, for which there are kernels that hold neither a mask nor scores. The host reads ``cu_seq_q``
    and ``cu_seq_k``.
    """
    key, value = repeat_heads(query, key, value)
    starts_q, starts_k, out = cu_seq_q.tolist(), cu_seq_k.tolist(), []
    for row, first in enumerate(starts_q[:-1]):
        q = query[first : starts_q[row + 1]].transpose(0, 1)[None]  # [1, Hq, q, d]
        keys = slice(starts_k[row], starts_k[row + 1])
        k, v = (x[keys].transpose(0, 1)[None] for x in (key, value))
        given = k.shape[2] - q.shape[2]
        found = scaled_dot_product_attention(pad(q, (0, 0, given, 0)), k, v, is_causal=True, scale=scale)
        out.append(found[0, :, given:].transpose(0, 1))
    return torch.cat(out)


def repeat_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [M, Hq, d]: kernels that hold no scores may want as many heads of both."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def beats_padding(scores: int) -> bool:
    """Whether varlen_attn, where it runs, costs less than padded rows for a pass with so many scores."""
    return "enable_gqa" in varlen_options() or scores > FEW_SCORES


@dataclass
class PaddedRows:
    """R sequences as padded rows, of at most Q queries out of T and K keys out of N each.

    Keys are gathered, and no score is held where ``kernel`` holds none; sequences too many or too long for that are
    attended to in pieces.
    """

    query_index: torch.Tensor  # int64 [R, Q], any number where there is no query
    key_index: torch.Tensor  # int64 [R, K], of a key that is finite where there is none
    newest: torch.Tensor  # int64 [R, Q] place among a sequence's keys of the last one that a query sees
    row_of: torch.Tensor  # int64 [T] place of each query among the R x Q
    kernel: Callable[..., torch.Tensor] = scaled_dot_product_attention
    _bias: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)  # of one piece

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """query [T, Hq, d], key and value [N, Hk, d] -> [T, Hq, d], differentiable."""
        (rows, width), (_, heads, dim) = self.query_index.shape, key.shape
        per_head = query.shape[1] // heads
        q = embedding(self.query_index, query.flatten(1)).view(rows, width, heads, per_head, dim)
        q = q.permute(0, 2, 3, 1, 4)  # [R, Hk, g, Q, d]
        out = concatenate(
            [self._attend(q[piece], key, value, piece, scale) for piece in self._pieces(per_head, key)], 0
        )
        return embedding(self.row_of, out.flatten(0, 1).flatten(1)).view_as(query)

    def _attend(
        self, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: slice, scale: float
    ) -> torch.Tensor:
        """q [r, Hk, g, Q, d] of some sequences -> [r, Q, Hk, g, d]."""
        rows, heads, per_head, width, dim = q.shape
        index = self.key_index[piece]
        k, v = (embedding(index, x.flatten(1)).view(rows, -1, heads, dim).transpose(1, 2) for x in (key, value))
        most = max(1, LARGEST_PIECE // (rows * per_head * max(1, index.shape[1])))  # queries of a sequence
        found = []
        for first in range(0, width, most):
            part = q[:, :, :, first : first + most].flatten(2, 3)  # [r, Hk, g w, d]
            bias = self._bias_of(piece, first, first + most, per_head, q.dtype)  # [r, 1, g w, K]
            found.append(self.kernel(part, k, v, attn_mask=bias, scale=scale).unflatten(2, (per_head, -1)))
        return concatenate(found, 3).permute(0, 3, 1, 2, 4)

    def _pieces(self, per_head: int, key: torch.Tensor) -> Iterator[slice]:
        """Of the sequences."""
        (rows, width), keys = self.query_index.shape, max(1, self.key_index.shape[1])
        most = max(1, LARGEST_PIECE // (keys * max(per_head * width, 2 * key[0].numel())))
        return (slice(first, min(first + most, rows)) for first in range(0, max(1, rows), most))

    def _bias_of(self, piece: slice, first: int, last: int, per_head: int, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees a key, else -inf; where all is one piece, every layer has the same."""
        name = piece.start, first, per_head, dtype
        if name not in self._bias:
            self._bias.clear()
            places = torch.arange(self.key_index.shape[1], device=self.newest.device)
            seen = places <= self.newest[piece, first:last, None]  # [r, w, K]
            bias = torch.where(seen, 0.0, -torch.inf).to(dtype)
            self._bias[name] = bias[:, None].repeat(1, 1, per_head, 1)
        return self._bias[name]


def concatenate(pieces: list[torch.Tensor], dim: int) -> torch.Tensor:
    """torch.cat, without a copy of a single piece."""
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]
