"""The forward pass of a Transformers model on flattened tokens, and the logits that come of its last hidden states.

All sequences are one row of tokens, told apart by attention. Transformers hands an object with ``attend`` to every
layer (``rlkernels.integrations.transformers_attention``). In training it is a ``TreeLayout``, in
generation a :class:`PagedBatch`. Both call the ops of rlkernels.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rlkernels import PagedKVCache, paged_attention, shared_prefix_attention, write_kv
from rlkernels.integrations.transformers_attention import IMPLEMENTATION, Attention, logit_factor, set_attention
from rlkernels.prefix_cache import Sequence as CachedSequence

# ids [T], positions [T], rows [R], attention -> logits [R, V], last hidden states [R, H]; see forward and FusedDecoder
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Attention], tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def attend_by(model: PreTrainedModel, implementation: str = IMPLEMENTATION) -> Iterator[None]:
    """Let the model's decoder attend by an implementation of Transformers, and afterwards as before.

    By default by ours, under which forward and backward passes on flattened tokens work.
    """
    before = model.config.get_text_config(decoder=True)._attn_implementation
    try:
        set_attention(model, implementation)
        yield
    finally:
        set_attention(model, before)


def flat_inputs(ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> dict[str, Any]:
    """Return the arguments of a model's forward for flattened tokens ``ids`` [T] at ``positions`` [T]."""
    return {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False, "attention": attention}


def forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    attention: Attention,
    max_logit_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logits [R, V] and last hidden states [R, H] at ``rows`` of the flattened tokens.

    The other rows never reach the output layer; with ``max_logit_rows`` only so many of the first rows do.
    """
    states: list[torch.Tensor] = []

    def keep_rows(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        hidden = inputs[0][:, rows]  # [1, R, H]
        states.append(hidden[0])
        return (hidden[:, :max_logit_rows],)

    hook = model.get_output_embeddings().register_forward_pre_hook(keep_rows)
    try:
        logits = model(**flat_inputs(ids, positions, attention)).logits[0]
    finally:
        hook.remove()
    if not states:
        raise ValueError("its forward does not call what get_output_embeddings() names")
    return logits, states[0]


def logit_scale(model: Any, logits: torch.Tensor, states: torch.Tensor) -> float | None:
    """Return x if float32 logits [R, V] are x times the product of states [R, H] and output matrix, by the config.

    None for a model that caps logits, as Gemma: small ones hide the cap.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    factor = logit_factor(config)
    if factor <= 0 or getattr(config, "final_logit_softcapping", None) is not None:
        return None
    product = linear(states[None], head.weight, head.bias)[0] * factor
    near = 4 * torch.finfo(logits.dtype).eps * logits.abs().max()
    return factor if (logits - product).abs().max() <= near else None


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
    # with groups: makes block tables and lengths of whole sequences, for layers that do not see all of them alike
    whole: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    longest: int = 0  # tokens of the longest sequence; a window at least this long has no effect

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
        window: int | None, *, softcap: float | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        caches = self.cache.key_cache[layer], self.cache.value_cache[layer]
        write_kv(key, value, *caches, self.slots)
        window = None if window is None or window >= self.longest else window
        sequences = self.block_tables, self.seq_lens, self.query_starts
        if self.groups is not None and window is softcap is None:
            return shared_prefix_attention(query, *caches, *self.groups, *sequences, scale=scale, return_lse=return_lse)
        if self.whole is not None:
            sequences = *self.whole(), self.query_starts
        return paged_attention(
            query, *caches, *sequences, scale=scale, window=window, softcap=softcap, return_lse=return_lse
        )


def page(
    cache: PagedKVCache,
    sequences: Sequence[CachedSequence],
    slots: torch.Tensor,
    query_lens: Sequence[int] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    *,
    share_from: int | None = None,
) -> PagedBatch:
    """Describe a pass over some tokens of sequences in a cache.

    Args:
        slots: int64 [T], where the keys and values of these tokens go.
        query_lens: [B] tokens of each sequence in this pass.
        seq_lens: [B] tokens of each sequence up to the last of those.
        share_from: read a beginning of at least so many tokens once for all neighbours that have it; None: never.
    """
    query_starts = torch.from_numpy(np.append(0, query_lens).cumsum(dtype=np.int32)).to(cache.device)
    lens = torch.from_numpy(np.asarray(seq_lens, np.int32)).to(cache.device)
    longest = int(np.max(seq_lens, initial=0))
    if share_from is not None:
        prefix_tables, prefix_lens, group_starts, tables, _ = cache.group(sequences, min_tokens=share_from)
        if prefix_tables.shape[1]:  # which the host knows, unlike the lengths
            # a chunk of a prompt sees less than the cache knows
            own_lens = lens - prefix_lens.repeat_interleave(group_starts.diff(), output_size=len(sequences))
            groups = prefix_tables, prefix_lens, group_starts
            whole = functools.cache(lambda: (cache.tables(sequences)[0], lens))
            return PagedBatch(cache, slots, tables, own_lens, query_starts, groups, whole, longest)
    return PagedBatch(cache, slots, cache.tables(sequences)[0], lens, query_starts, longest=longest)
