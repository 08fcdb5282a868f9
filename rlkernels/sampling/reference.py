"""Sampling ops in plain torch: the single source of truth for tests and benchmarks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from rlkernels._check import has_values


def philox_word(key: int, counter_low: torch.Tensor, counter_high: torch.Tensor) -> torch.Tensor:
    """Return the first word of Philox4x32-10 (Salmon et al., SC'11) for int64 counters of any shape, as int64."""
    mask = 0xFFFFFFFF
    c0 = counter_low & mask
    c1 = (counter_low >> 32) & mask
    c2 = counter_high & mask
    c3 = (counter_high >> 32) & mask
    k0 = key & mask
    k1 = (key >> 32) & mask
    for _ in range(10):
        # int64 products wrap modulo 2**64, which leaves the bits of the unsigned product
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = ((p1 >> 32) & mask) ^ c1 ^ k0
        c1 = p1 & mask
        c2 = ((p0 >> 32) & mask) ^ c3 ^ k1
        c3 = p0 & mask
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    return c0


def keyed_uniform(seed: int, sample_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See :func:`rlkernels.keyed_uniform`."""
    word = philox_word(seed, sample_ids.long(), positions.long())
    return ((word >> 9).float() + 0.5) * 2.0**-23


# 2**f on [-1/2, 1/2]: polynomial coefficients of f**1 .. f**6 (minimax; relative error 1e-7 in float32)
EXP2_COEFFICIENTS = [float.fromhex(c) for c in (
    "0x1.62e43p-1", "0x1.ebfbdcp-3", "0x1.c6aee8p-5", "0x1.3b2d4cp-7", "0x1.5f3e54p-10", "0x1.41fbbcp-13",
)]  # fmt: skip
LOG2_E = float.fromhex("0x1.715476p+0")
ROUND = 12582912.0  # 1.5 * 2**23: adding and subtracting it rounds a float32 to an integer, ties to even
WEIGHT_BITS = 42  # weight of the largest logit; up to 2**20 of them fit a signed 64-bit sum
MAX_CANDIDATES = 1024  # largest logits of a row; whole rows are sorted only if a filter needs more of them


def token_weights(z: torch.Tensor) -> torch.Tensor:
    """Return exp(z) as integers, ``floor(exp(z) * 2**42)``, for float32 z <= 0.

    Sums of integers do not depend on their order, and every step here is one correctly rounded float32
    operation. So each backend that repeats these steps gets the same weights, the same sums and the same token,
    whatever its vector width, its threads or the batch.
    """
    y = (z * LOG2_E).clamp(min=-100.0)  # below 2**-42 the weight is 0; the clamp keeps exponents in range
    n = (y + ROUND) - ROUND
    f = y - n
    p = torch.full_like(f, EXP2_COEFFICIENTS[-1])
    for c in reversed(EXP2_COEFFICIENTS[:-1]):
        p = p * f + c
    p = p * f + 1.0
    power = ((n.to(torch.int32) + (WEIGHT_BITS + 127)) << 23).view(torch.float32)  # 2**(n + 42), exact
    return (p * power).to(torch.int64)


def scaled_share(fraction: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return floor(fraction * total) without rounding, for fraction in [0, 1] in units of 2**-24 and total < 2**62."""
    units = (fraction.double() * 2.0**24).long()
    return units * (total >> 24) + ((units * (total & 0xFFFFFF)) >> 24)


def first_of(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` largest of each row of float32 [T, V], in order, ties by lower id: int64 [T, count]."""
    vocab = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # -0.0 is 0.0
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # rises with the number
    later = torch.arange(vocab - 1, -1, -1, device=logits.device)
    return vocab - 1 - ((rank.long() << 32) | later).topk(count, dim=1).values.bitwise_and_(0xFFFFFFFF)


def _cut(
    weights: torch.Tensor, order: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor, limit: torch.Tensor
) -> torch.Tensor:
    """Return the weights [T, V] of ``order``, the largest tokens of each row, after ``limit`` and top-p."""
    ranked = weights.gather(1, order)
    ranked[torch.arange(order.shape[1], device=order.device) >= limit[:, None]] = 0
    total = torch.where(limit >= weights.shape[1], total, ranked.sum(1))
    larger = ranked.cumsum(1) - ranked  # weight of all larger tokens
    nucleus = scaled_share(top_p, total).clamp(min=1)  # a token belongs to it if the larger ones weigh less
    ranked[(larger >= nucleus[:, None]) & (top_p < 1)[:, None]] = 0
    return torch.zeros_like(weights).scatter_(1, order, ranked)


def _filtered_weights(
    logits: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, few: bool
) -> torch.Tensor:
    """Return the weights [T, V] after top-k, then top-p; 0 for tokens that they remove.

    More than ``MAX_CANDIDATES`` tokens rarely remain, so whole rows are rarely sorted. Unless ``few`` (see
    :func:`sample_tokens`) is True, the host waits to learn which rows need more candidates.
    """
    vocab = logits.shape[1]
    total = weights.sum(1)
    logits = logits.nan_to_num(0.0)
    limit = torch.where(top_k == 0, vocab, top_k)

    def by_sorting(rows: torch.Tensor | slice) -> torch.Tensor:
        order = logits[rows].argsort(dim=1, descending=True, stable=True)
        return _cut(weights[rows], order, total[rows], top_p[rows], limit[rows])

    if vocab <= MAX_CANDIDATES or not has_values(logits):
        return by_sorting(slice(None))
    order = first_of(logits, MAX_CANDIDATES)
    unfiltered = (limit >= vocab) & (top_p == 1)
    filtered = torch.where(unfiltered[:, None], weights, _cut(weights, order, total, top_p, limit))
    if not few:
        # without top-k the nucleus of the whole row must end among the candidates
        ends = (limit >= vocab) & (weights.gather(1, order).sum(1) >= scaled_share(top_p, total))
        unfinished = (~(unfiltered | ends | (limit <= MAX_CANDIDATES))).nonzero()[:, 0]
        if len(unfinished):
            filtered[unfinished] = by_sorting(unfinished)
    return filtered


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor,
                  top_k: torch.Tensor, *, filtered: bool = True, few: bool = False,
                  ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See :func:`rlkernels.sample_tokens`; settings are tensors [T], and a row without a distribution gives -1, NaN.

    Args:
        filtered: whether a row may have top_k or top_p on; if not, nothing is sorted.
        few: whether every row has a top_k of 1 to ``MAX_CANDIDATES``, so that the host need not wait.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return uniforms.new_empty(0, dtype=torch.int64), uniforms.new_empty(0)
    logits = logits.float()
    largest = logits.amax(dim=1)
    invalid = ~largest.isfinite() | logits.isnan().any(1) | ~((uniforms >= 0) & (uniforms < 1))
    # the first of equal maxima; torch.max may return another
    greedy = torch.where(logits == largest[:, None], torch.arange(vocab, device=logits.device), vocab).min(1).values
    is_greedy = temperature == 0
    inverse = torch.where(is_greedy, 1.0, 1.0 / temperature).clamp(max=torch.finfo(torch.float32).max)  # [T]
    z = (logits - largest[:, None]) * inverse[:, None]
    weights = token_weights(z.nan_to_num(0.0, 0.0, -float("inf")))  # [T, V] int64

    if filtered:
        weights = _filtered_weights(logits, weights, top_p, top_k, few)
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1]
    target = scaled_share(uniforms.clamp(0, 1 - 2.0**-24), total)
    ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=vocab - 1)
    logprobs = z.gather(1, ids[:, None])[:, 0].double() - (total.double() * 2.0**-WEIGHT_BITS).log()
    ids = torch.where(is_greedy, greedy, ids)
    logprobs = torch.where(is_greedy, 0.0, logprobs)
    return torch.where(invalid, -1, ids), torch.where(invalid, torch.nan, logprobs).float()


class DraftRows(NamedTuple):
    """Rows of drafts, ordered by sequence, each with one row more than tokens; int64, on one device.

    Attributes:
        lengths: [B], the tokens of each draft.
        owner: [R], the sequence of each row.
        offset: [R], the place of each row in its sequence.
        token: [R], the place of its draft token among those of all drafts; any place in the last row of a sequence.
        total: [1], the tokens of all drafts.
    """

    lengths: torch.Tensor
    owner: torch.Tensor
    offset: torch.Tensor
    token: torch.Tensor
    total: torch.Tensor


def draft_rows(starts: Sequence[int], device: torch.device) -> DraftRows:
    """Return the rows of sequences that begin at ``starts`` [B + 1]; made on the host, and copied at once."""
    rows, sequences = starts[-1], len(starts) - 1
    total = rows - sequences
    bounds = np.array(starts, dtype=np.int64)
    sizes = bounds[1:] - bounds[:-1]
    owner = np.arange(sequences).repeat(sizes)
    row = np.arange(rows)
    parts = sizes - 1, owner, row - bounds[owner], np.minimum(row - owner, total - 1), [total]
    table = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)
    return DraftRows(*table.split_with_sizes([sequences, rows, rows, rows, 1]))


def verify_drafts(logits: torch.Tensor, drafts: torch.Tensor, starts: torch.Tensor, uniforms: torch.Tensor,
                  temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor,
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """See :func:`rlkernels.verify_drafts`; drafts are concatenated, int64 [R - B], settings are tensors [B]."""
    rows = draft_rows(starts.tolist(), logits.device)
    settings = (setting.index_select(0, rows.owner) for setting in (temperature, top_p, top_k))
    return accept(*sample_tokens(logits, uniforms, *settings), drafts, rows)


def accept(
    ids: torch.Tensor, logprobs: torch.Tensor, drafts: torch.Tensor, rows: DraftRows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of verify_drafts from a sample of every row [R], which it overwrites."""
    if not len(drafts):
        return rows.lengths, ids, logprobs
    is_hit = torch.eq(drafts.index_select(0, rows.token), ids)
    # the offset of the first miss; in the last row the comparison decides nothing
    misses = torch.where(is_hit, rows.total, rows.offset)
    accepted = rows.lengths.scatter_reduce_(0, rows.owner, misses, "amin")
    is_old = torch.gt(rows.offset, accepted.index_select(0, rows.owner))
    return accepted, ids.masked_fill_(is_old, -1), logprobs.masked_fill_(is_old, 0.0)
