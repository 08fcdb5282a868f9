"""What the tokens of a pass of generation look at: keys and values in the blocks of a paged cache."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

import rlkernels.backend
from python_trainer.model.padded_rows import PaddedRows
from python_trainer.model.varlen import VarlenRows, flash_rows, kernel_for, varlen_options
from rlkernels import PagedKVCache, paged_attention, shared_prefix_attention, write_kv

# scores of a pass, all heads, up to which padding costs less than an older varlen_attn, which repeats the heads of keys
FEW_SCORES = 1 << 28


def beats_padding(scores: int) -> bool:
    """Whether varlen_attn, where it runs, costs less than padded rows for a pass with so many scores."""
    return "enable_gqa" in varlen_options() or scores > FEW_SCORES


@dataclass
class Paging:
    """The ``attention`` of a forward pass: where its tokens live; see :func:`rlkernels.paged_attention`.

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
    rows: VarlenRows | PaddedRows | None = None  # made by the first layer that needs them, the same for all

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

    def rows_for(self, query: torch.Tensor) -> Callable[[], VarlenRows | PaddedRows] | None:
        """What stands in on a GPU without a proven kernel: FlashAttention where it runs, else padded rows.

        None: a kernel of our own.
        """
        if query.device.type == "cpu" or rlkernels.backend.choose("paged_attention", query.device) != "torch":
            return None
        scores = len(self.seq_lens) * self.longest_query * self.longest_key * query.shape[1]
        return self.varlen_rows if kernel_for(query) is flash_rows and beats_padding(scores) else self.padded_rows

    def varlen_rows(self) -> VarlenRows:
        """The sequences end to end, whose keys are slots of the cache: nothing is padded, and no score is held."""
        device, block_size = self.seq_lens.device, self.cache.block_size
        starts = pad(self.seq_lens.cumsum(0), (1, 0)).int()  # [B + 1]
        rows = torch.arange(len(self.seq_lens), device=device)
        row = rows.repeat_interleave(self.seq_lens, output_size=self.keys)  # [keys]
        place = torch.arange(self.keys, device=device) - starts[row]  # within its sequence
        slots = self.block_tables[row, place // block_size].long() * block_size + place % block_size
        return VarlenRows(slots, self.query_starts, starts, self.longest_query, self.longest_key)

    def padded_rows(self) -> PaddedRows:
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
