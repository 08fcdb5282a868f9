"""Rollouts of a step as micro-batches: rows of tokens without padding, with every common prefix once.

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
    """Mark the response tokens that are scored: those of the policy, and the given prefix if it counts."""
    mask = [True] * len(rollout.response_ids) if rollout.response_mask is None else rollout.response_mask
    num_unscored = 0 if score_prefix else rollout.prefix_len
    return [False] * num_unscored + list(mask[num_unscored:])


@dataclass
class Packed(rlkernels.prefix_cache.Packed):
    """One micro-batch of B samples with longest response L, T tokens, R pairs."""

    samples: list[int]  # [B] index of each sample in the step
    place: torch.Tensor  # int64 [B, L] the pair of each response token; 0 where there is none
    mask: torch.Tensor  # bool [B, L] response tokens that are scored

    def to(self, device: torch.device | str) -> "Packed":
        tensors = vars(super().to(device)) | {
            "place": self.place.to(device, non_blocking=True),
            "mask": self.mask.to(device, non_blocking=True),
        }
        return Packed(**tensors)

    def spread(self, pairs: torch.Tensor) -> torch.Tensor:
        """Spread values of the pairs [R] to [B, L], 0 where there is no scored response token."""
        if not pairs.numel():
            return pairs.new_zeros(self.place.shape)
        return torch.where(self.mask, pairs[self.place], 0.0)


def pack(
    rollouts: Sequence[Rollout], samples: Sequence[int], *, score_prefix: bool = True, device: torch.device = CPU
) -> Packed:
    """Pack the rollouts with these indices, in any order, for a device.

    Args:
        score_prefix: the given prefix is scored too; False: it is context only.
    """
    selected = [rollouts[index] for index in samples]
    scored = [scored_tokens(rollout, score_prefix=score_prefix) for rollout in selected]
    prompts = [[False] * len(rollout.prompt_ids) for rollout in selected]
    prefix_lens = None
    if not packs_tries(device):
        prefix_lens = [len(rollout.prompt_ids) + rollout.prefix_len for rollout in selected]
    packed = rlkernels.prefix_cache.pack(
        [_tokens(rollout) for rollout in selected],
        [prompt + response for prompt, response in zip(prompts, scored)],
        prefix_lens=prefix_lens,
    )
    mask = pad_sequence([torch.tensor(row, dtype=torch.bool, device="cpu") for row in scored], batch_first=True)
    place = torch.zeros(mask.shape, dtype=torch.int64, device="cpu").masked_scatter(mask, packed.pairs)
    return Packed(**vars(packed), samples=list(samples), place=place, mask=mask).to(device)


def sorted_by_tokens(rollouts: Sequence[Rollout], samples: Sequence[int]) -> list[int]:
    """Order the samples so that those with a common prefix are neighbours."""
    order, _ = sort_by_tokens([_tokens(rollouts[index]) for index in samples])
    return [samples[i] for i in order]


def split_evenly(
    rollouts: Sequence[Rollout], samples: Sequence[int], num_shares: int, device: torch.device = CPU
) -> list[list[int]]:
    """Cut the samples, in order, into shares of about equally many packed tokens; some may be empty."""
    pack_size = _PackSize(device)
    middles = []
    total = 0
    for index in samples:
        added = max(pack_size.add(rollouts[index]), 1)
        middles.append(2 * total + added)  # halves of tokens before the middle of this sample
        total += added
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    for index, middle in zip(samples, middles):
        shares[middle * num_shares // (2 * total)].append(index)
    return shares


def micro_batches(
    rollouts: Sequence[Rollout], samples: Sequence[int], max_tokens: int, device: torch.device = CPU
) -> Iterator[list[int]]:
    """Split the samples, in order, into batches of at most ``max_tokens`` packed tokens (one sample may be longer)."""
    batch: list[int] = []
    pack_size = _PackSize(device)
    for index in samples:
        pack_size.add(rollouts[index])
        if batch and pack_size.tokens > max_tokens:
            yield batch
            batch = []
            pack_size = _PackSize(device)
            pack_size.add(rollouts[index])
        batch.append(index)
    if batch:
        yield batch


class _PackSize:
    """Upper bound on the tokens of a pack; exact if samples with a common prefix follow each other."""

    def __init__(self, device: torch.device):
        self.tokens = 0
        self.tries = packs_tries(device)
        self._prefixes: set[tuple] = set()  # prompts with given prefixes
        self._last = np.empty(0, dtype=np.int64)

    def add(self, rollout: Rollout) -> int:
        """Add a sample; return the tokens that it takes."""
        tokens = _tokens(rollout)[:-1]
        length = len(rollout.prompt_ids) + rollout.prefix_len
        prefix = (len(rollout.prompt_ids), tokens[:length].tobytes())
        shared = min(length, len(tokens)) if prefix in self._prefixes else 0
        if self.tries:
            shared = max(shared, common_tokens(tokens, self._last))
        self._prefixes.add(prefix)
        self._last = tokens
        self.tokens += len(tokens) - shared
        return len(tokens) - shared


def _tokens(rollout: Rollout) -> np.ndarray:
    """Return prompt and response, int64. The array is made once: the ids of a rollout only grow."""
    tokens = _arrays.get(rollout)
    if tokens is None or len(tokens) != len(rollout.prompt_ids) + len(rollout.response_ids):
        tokens = _arrays[rollout] = token_ids("a rollout", [*rollout.prompt_ids, *rollout.response_ids])
    return tokens
