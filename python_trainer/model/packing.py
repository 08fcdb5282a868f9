"""Rollouts of a step as micro-batches: rows of tokens without padding, with every common prefix once.

:func:`rlkernels.prefix_cache.pack` packs them. Every log-probability that the loss needs is one of its predictions: a
packed token, and the token to predict after it. Samples with an equal beginning refer to the same predictions, so
autograd adds up their gradients.

Letters of shapes, in the files of the update:

- [B, T]: the batch of a step, B samples of up to T response tokens;
- [M, L]: a micro-batch, M samples of up to L response tokens;
- [P]: the packed tokens of a micro-batch; [R]: its predictions; H: width of hidden states; V: size of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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


def logprob_mask(rollout: Rollout, *, include_prefix: bool) -> list[bool]:
    """Mark the response tokens that get a log-probability: those of the policy, and the given prefix if it counts."""
    mask = [True] * len(rollout.response_ids) if rollout.response_mask is None else rollout.response_mask
    num_left_out = 0 if include_prefix else rollout.prefix_len
    return [False] * num_left_out + list(mask[num_left_out:])


@dataclass
class PackedRollouts(rlkernels.prefix_cache.Packed):
    """A micro-batch."""

    samples: list[int]  # [M] index of each sample in the batch
    prediction_index: torch.Tensor  # int64 [M, L], index into [R]; 0 where there is no prediction
    mask: torch.Tensor  # bool [M, L] response tokens with a log-probability

    def to(self, device: torch.device | str) -> "PackedRollouts":
        prediction_index = self.prediction_index.to(device, non_blocking=True)
        mask = self.mask.to(device, non_blocking=True)
        return replace(super().to(device), prediction_index=prediction_index, mask=mask)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Spread a value of each prediction, [R], to response tokens, [M, L]; 0 where masked."""
        if not values.numel():
            return values.new_zeros(self.prediction_index.shape)
        return torch.where(self.mask, values[self.prediction_index], 0.0)


def pack_rollouts(
    rollouts: Sequence[Rollout], samples: Sequence[int], *, include_prefix: bool = True, device: torch.device = CPU
) -> PackedRollouts:
    """Pack the rollouts with these indices, in any order, for a device.

    Args:
        include_prefix: tokens of the given prefix get log-probabilities too; False: it is context only.
    """
    selected = [rollouts[index] for index in samples]
    masks = [logprob_mask(rollout, include_prefix=include_prefix) for rollout in selected]
    prompts = [[False] * len(rollout.prompt_ids) for rollout in selected]
    prefix_lens = None
    if not packs_tries(device):
        prefix_lens = [len(rollout.prompt_ids) + rollout.prefix_len for rollout in selected]
    packed = rlkernels.prefix_cache.pack(
        [_tokens(rollout) for rollout in selected],
        [prompt + response for prompt, response in zip(prompts, masks)],
        prefix_lens=prefix_lens,
    )
    mask = pad_sequence([torch.tensor(row, dtype=torch.bool, device="cpu") for row in masks], batch_first=True)
    prediction_index = torch.zeros(mask.shape, dtype=torch.int64, device="cpu").masked_scatter(mask, packed.pairs)
    micro_batch = PackedRollouts(**vars(packed), samples=list(samples), prediction_index=prediction_index, mask=mask)
    return micro_batch.to(device)


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
        tokens = _tokens(rollout)[:-1]  # the last token predicts nothing
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
    """Return prompt and response, int64, cached until the rollout grows."""
    tokens = _arrays.get(rollout)
    if tokens is None or len(tokens) != rollout.num_tokens:
        tokens = _arrays[rollout] = token_ids("a rollout", [*rollout.prompt_ids, *rollout.response_ids])
    return tokens
