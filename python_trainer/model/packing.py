"""Rollouts of a step as micro-batches: rows of tokens without padding, in which what rollouts begin with stands once.

:func:`rlkernels.prefix_cache.pack` packs them. Every log-probability that the loss needs is a pair of it: a token that
predicts, and the one it should predict. All samples with a pair refer to it, so their gradients add up by themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import rlkernels.prefix_cache
from python_trainer.data import Rollout
from rlkernels.prefix_cache import packs_tries
from rlkernels.prefix_cache.layout import common_tokens, sort_by_tokens, token_ids

CPU = torch.device("cpu")
_arrays: WeakKeyDictionary[Rollout, np.ndarray] = WeakKeyDictionary()


def scored_tokens(rollout: Rollout, *, score_prefix: bool) -> list[bool]:
    """Marks the response tokens that are scored: those of the policy, and the given prefix if it counts."""
    own = [True] * len(rollout.response_ids) if rollout.response_mask is None else rollout.response_mask
    unscored = 0 if score_prefix else rollout.prefix_len
    return [False] * unscored + list(own[unscored:])


@dataclass
class Packed(rlkernels.prefix_cache.Packed):
    """One micro-batch of B samples with longest response L, T tokens, R pairs."""

    samples: list[int]  # [B] index of each sample in the step
    place: torch.Tensor  # int64 [B, L] the pair of each response token; 0 where there is none
    mask: torch.Tensor  # bool [B, L] response tokens that are scored

    def to(self, device: torch.device | str) -> "Packed":
        moved = vars(super().to(device))
        return Packed(**moved | {name: getattr(self, name).to(device, non_blocking=True) for name in ("place", "mask")})

    def spread(self, pairs: torch.Tensor) -> torch.Tensor:
        """Spreads values of the pairs [R] to [B, L], 0 where there is no scored response token."""
        if not pairs.numel():
            return pairs.new_zeros(self.place.shape)
        return torch.where(self.mask, pairs[self.place], 0.0)


def pack(
    rollouts: Sequence[Rollout], samples: Sequence[int], *, score_prefix: bool = True, device: torch.device = CPU
) -> Packed:
    """Packs the rollouts with these indices, in any order, for a device.

    Args:
        score_prefix: the given prefix is scored too; False: it is context only.
    """
    some = [rollouts[index] for index in samples]
    flags = [scored_tokens(rollout, score_prefix=score_prefix) for rollout in some]
    prompts = [[False] * len(rollout.prompt_ids) for rollout in some]
    packed = rlkernels.prefix_cache.pack(
        [_tokens(rollout) for rollout in some],
        [prompt + own for prompt, own in zip(prompts, flags)],
        prefix_lens=None if packs_tries(device) else [len(r.prompt_ids) + r.prefix_len for r in some],
    )
    mask = pad_sequence([torch.tensor(own, dtype=torch.bool, device="cpu") for own in flags], batch_first=True)
    place = torch.zeros(mask.shape, dtype=torch.int64, device="cpu").masked_scatter(mask, packed.pairs)
    return Packed(**vars(packed), samples=list(samples), place=place, mask=mask).to(device)


def sorted_by_tokens(rollouts: Sequence[Rollout], samples: Sequence[int]) -> list[int]:
    """Orders the samples so that those that begin alike are neighbours."""
    order, _ = sort_by_tokens([_tokens(rollouts[index]) for index in samples])
    return [samples[i] for i in order]


def split_evenly(
    rollouts: Sequence[Rollout], samples: Sequence[int], parts: int, device: torch.device = CPU
) -> list[list[int]]:
    """Cuts the samples, in order, into ``parts`` stretches of about as many packed tokens; some may be empty."""
    middles, total, pack_size = [], 0, _PackSize(device)
    for index in samples:
        added = max(pack_size.add(rollouts[index]), 1)
        middles.append(2 * total + added)  # halves of tokens before the middle of this sample
        total += added
    split: list[list[int]] = [[] for _ in range(parts)]
    for index, middle in zip(samples, middles):
        split[middle * parts // (2 * total)].append(index)
    return split


def micro_batches(
    rollouts: Sequence[Rollout], samples: Sequence[int], max_tokens: int, device: torch.device = CPU
) -> Iterator[list[int]]:
    """Splits the samples, in order, into parts of at most ``max_tokens`` packed tokens (one sample may be longer)."""
    part: list[int] = []
    pack_size = _PackSize(device)
    for index in samples:
        pack_size.add(rollouts[index])
        if part and pack_size.tokens > max_tokens:
            yield part
            part, pack_size = [], _PackSize(device)
            pack_size.add(rollouts[index])
        part.append(index)
    if part:
        yield part


class _PackSize:
    """The tokens of a pack, at most: exactly those if samples that begin alike come one after the other."""

    def __init__(self, device: torch.device):
        self.tokens, self.tries = 0, packs_tries(device)
        self._beginnings: set[tuple] = set()  # prompts and given prefixes
        self._last = np.empty(0, dtype=np.int64)

    def add(self, rollout: Rollout) -> int:
        """Adds a sample -> the tokens that it takes."""
        tokens = _tokens(rollout)[:-1]
        length = len(rollout.prompt_ids) + rollout.prefix_len
        beginning = len(rollout.prompt_ids), tokens[:length].tobytes()
        shared = min(length, len(tokens)) if beginning in self._beginnings else 0
        if self.tries:
            shared = max(shared, common_tokens(tokens, self._last))
        self._beginnings.add(beginning)
        self._last = tokens
        self.tokens += len(tokens) - shared
        return len(tokens) - shared


def _tokens(rollout: Rollout) -> np.ndarray:
    """Returns prompt and response, int64. The array is made once: the ids of a rollout only grow."""
    tokens = _arrays.get(rollout)
    if tokens is None or len(tokens) != len(rollout.prompt_ids) + len(rollout.response_ids):
        tokens = _arrays[rollout] = token_ids("a rollout", [*rollout.prompt_ids, *rollout.response_ids])
    return tokens
