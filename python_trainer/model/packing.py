"""Rollouts of a step as rows of tokens without padding, in which each prompt and shared prefix stands once.

A group of samples is packed as [prompt + prefix | suffix 1 | suffix 2 | ...]. Every log-probability that the loss
needs is a *pair*: a position whose hidden state predicts, and the token it should predict. The pairs of a shared
prefix exist once, and all samples of the group refer to them, so their gradients add up by themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress

import torch
from torch.nn.utils.rnn import pad_sequence

from python_trainer.data import Rollout
from rlkernels.integrations.transformers_attention import PackedLayout


def scored_tokens(rollout: Rollout, *, score_prefix: bool) -> list[bool]:
    """Marks the response tokens that are scored: those of the policy, and the given prefix if it counts."""
    own = [True] * len(rollout.response_ids) if rollout.response_mask is None else rollout.response_mask
    unscored = 0 if score_prefix else rollout.prefix_len
    return [False] * unscored + list(own[unscored:])


@dataclass
class Packed:
    """One micro-batch of B samples with longest response L, T tokens, R pairs."""

    samples: list[int]  # [B] index of each sample in the step
    input_ids: torch.Tensor  # int64 [T]
    layout: PackedLayout
    rows: torch.Tensor  # int64 [R] position that predicts
    targets: torch.Tensor  # int64 [R] token to be predicted
    place: torch.Tensor  # int64 [B, L] the pair of each response token; 0 where there is none
    mask: torch.Tensor  # bool [B, L] response tokens that are scored

    def to(self, device: torch.device) -> "Packed":
        moved = (x.to(device, non_blocking=True) for x in (self.rows, self.targets, self.place, self.mask))
        return Packed(self.samples, self.input_ids.to(device), self.layout, *moved)

    def spread(self, pairs: torch.Tensor) -> torch.Tensor:
        """Spreads values of the pairs [R] to [B, L], 0 where there is no scored response token."""
        if not pairs.numel():
            return pairs.new_zeros(self.place.shape)
        return torch.where(self.mask, pairs[self.place], 0.0)


def _beginning(rollout: Rollout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns prompt and given prefix, which samples share."""
    return tuple(rollout.prompt_ids), tuple(rollout.response_ids[: rollout.prefix_len])


def pack(rollouts: Sequence[Rollout], samples: Sequence[int], *, score_prefix: bool = True) -> Packed:
    """Packs the rollouts with these indices; samples with the same prompt and given prefix need not be neighbours.

    Args:
        score_prefix: the given prefix is scored too; False: it is context only.
    """
    groups: dict[tuple, list[int]] = {}
    for index in samples:
        groups.setdefault(_beginning(rollouts[index]), []).append(index)
    ids: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    places: list[list[int]] = []
    prefix_lens, suffix_lens, group_starts, order = [], [], [0], []
    for (prompt, prefix), members in groups.items():
        start, shared_pairs = len(ids), len(targets)
        skipped = 0 if score_prefix else len(prefix)
        ids += [*prompt, *prefix]
        end = len(ids) - 1  # the last shared token predicts the first of every suffix
        rows += range(start + len(prompt) - 1 + skipped, end)
        targets += prefix[skipped:]
        prefix_lens.append(len(prompt) + len(prefix))
        for index in members:
            suffix = rollouts[index].response_ids[len(prefix) :]
            scored = scored_tokens(rollouts[index], score_prefix=score_prefix)
            pairs = [shared_pairs + t - skipped if scored[t] else -1 for t in range(len(prefix))]
            if len(suffix):
                own = scored[len(prefix) :]
                pairs += [pair if s else -1 for pair, s in zip(accumulate(own, initial=len(targets)), own)]
                rows += compress([end, *range(len(ids), len(ids) + len(suffix) - 1)], own)
                targets += compress(suffix, own)
                ids += suffix[:-1]  # nothing is predicted from the last token
            suffix_lens.append(max(len(suffix) - 1, 0))
            places.append(pairs)
        order += members
        group_starts.append(len(order))
    long = partial(torch.tensor, dtype=torch.int64, device="cpu")  # whatever the default device is
    place = pad_sequence([long(pairs) for pairs in places], batch_first=True, padding_value=-1)
    mask = place >= 0
    layout = PackedLayout(prefix_lens, suffix_lens, group_starts)
    return Packed(order, long(ids), layout, long(rows), long(targets), place.clamp(min=0), mask)


def _added_tokens(rollout: Rollout, seen: set[tuple]) -> int:
    """Returns how many tokens a sample adds to a pack with the beginnings ``seen``, and adds its beginning to them."""
    beginning = prompt, prefix = _beginning(rollout)
    shared = 0 if beginning in seen else len(prompt) + len(prefix)
    seen.add(beginning)
    return shared + max(len(rollout.response_ids) - len(prefix) - 1, 0)


def split_evenly(rollouts: Sequence[Rollout], samples: Sequence[int], parts: int) -> list[list[int]]:
    """Cuts the samples, in order, into ``parts`` stretches of about as many packed tokens; some may be empty."""
    seen: set[tuple] = set()
    middles, total = [], 0
    for index in samples:
        needed = max(_added_tokens(rollouts[index], seen), 1)
        middles.append(2 * total + needed)  # halves of tokens before the middle of this sample
        total += needed
    split: list[list[int]] = [[] for _ in range(parts)]
    for index, middle in zip(samples, middles):
        split[middle * parts // (2 * total)].append(index)
    return split


def micro_batches(rollouts: Sequence[Rollout], samples: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Splits the samples, in order, into parts of at most ``max_tokens`` packed tokens (one sample may be longer)."""
    part: list[int] = []
    seen: set[tuple] = set()
    tokens = 0
    for index in samples:
        needed = _added_tokens(rollouts[index], seen)
        if part and tokens + needed > max_tokens:
            yield part
            part, seen, tokens = [], set(), 0
            needed = _added_tokens(rollouts[index], seen)
        part.append(index)
        tokens += needed
    if part:
        yield part
