"""The one attention adapter: what the tokens of a forward pass look at, in training and in generation.

Transformers hands an object with ``attend`` to every layer (``rlkernels.integrations.transformers_attention``). In
training it is the ``PackedLayout`` from there, in generation a :class:`PagedBatch`. Both call the ops of rlkernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlkernels import PagedKVCache, paged_attention, shared_prefix_attention, write_kv
from rlkernels.prefix_cache import Sequence as CachedSequence


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
    groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # tables, lengths, starts

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        caches = self.cache.key_cache[layer], self.cache.value_cache[layer]
        write_kv(key, value, *caches, self.slots)
        sequences = self.block_tables, self.seq_lens, self.query_starts
        if self.groups is None:
            out = paged_attention(query, *caches, *sequences, scale=scale)
        else:
            out = shared_prefix_attention(query, *caches, *self.groups, *sequences, scale=scale)
        assert isinstance(out, torch.Tensor)
        return out


def page(
    cache: PagedKVCache,
    sequences: Sequence[CachedSequence],
    slots: torch.Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    share_from: int | None = None,
) -> PagedBatch:
    """Describes a pass over some tokens of sequences in a cache.

    Args:
        slots: int64 [T], where the keys and values of these tokens go.
        query_lens: [B] tokens of each sequence in this pass.
        seq_lens: [B] tokens of each sequence up to the last of those.
        share_from: read a beginning of at least so many tokens once for all neighbours that have it; None: never.
    """
    starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(torch.tensor(query_lens, dtype=torch.int32, device="cpu"), 0, out=starts[1:])
    query_starts, lens = starts.to(cache.device), torch.tensor(seq_lens, dtype=torch.int32, device=cache.device)
    if share_from is not None:
        prefix_tables, prefix_lens, group_starts, tables, _ = cache.group(sequences, min_tokens=share_from)
        if prefix_tables.shape[1]:  # which the host knows, unlike the lengths
            # a chunk of a prompt sees less than the cache knows
            own_lens = lens - prefix_lens.repeat_interleave(group_starts.diff(), output_size=len(sequences))
            return PagedBatch(cache, slots, tables, own_lens, query_starts, (prefix_tables, prefix_lens, group_starts))
    return PagedBatch(cache, slots, cache.tables(sequences)[0], lens, query_starts)
