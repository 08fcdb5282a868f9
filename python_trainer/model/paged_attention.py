"""What the tokens of a pass of generation look at: keys and values in the blocks of a paged cache."""

from dataclasses import dataclass

import torch

import rlkernels.backend
from python_trainer.model.padded_rows import PaddedRows
from rlkernels import PagedKVCache, paged_attention, shared_prefix_attention, write_kv

# scores of a pass over padded rows, all heads: 1 GiB of float32, and a few times that in the making
LARGEST_SCORES = 1 << 28


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
    longest_query: int  # of a sequence; the device knows these two, but would have to be waited for
    longest_key: int  # of a sequence, the prefix of its group included
    groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # tables, lengths, starts
    rows: PaddedRows | None = None  # made by the first layer that needs them, the same for all

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """query [T, Hq, d], key and value [T, Hk, d] -> [T, Hq, d]."""
        key_cache, value_cache = self.cache.key_cache[layer], self.cache.value_cache[layer]
        write_kv(key, value, key_cache, value_cache, self.slots)
        sequences = self.block_tables, self.seq_lens, self.query_starts
        if self.groups is None and self.is_padded(query):
            self.rows = self.rows or self.padded_rows()
            caches = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
            return self.rows.attend(query.to(key_cache.dtype), *caches, scale).to(query.dtype)
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
            torch.where(has_query, self.query_starts[:-1, None] + q, 0),
            slots,
            torch.where(visible, 0.0, -torch.inf),
            has_query.flatten().nonzero_static(size=len(self.slots)).flatten(),
        )
