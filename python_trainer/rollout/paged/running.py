"""The samples that decode, and what a pass needs of them as arrays: a loop over samples in Python costs it most."""

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from python_trainer.rollout.drafting import Decoding

STATE = np.dtype([(name, np.int64) for name in ("sample_id", "length", "max_length", "last_id")])


class Spans(NamedTuple):
    """Where the tokens of each of B samples lie among T tokens, those of one sample side by side."""

    counts: np.ndarray  # int64 [B]
    starts: np.ndarray  # int64 [B]
    owner: np.ndarray  # int64 [T], the sample of each token
    offset: np.ndarray  # int64 [T], the place of each token in its span

    @classmethod
    def of(cls, counts: np.ndarray) -> "Spans":
        starts = counts.cumsum() - counts
        owner = np.arange(len(counts)).repeat(counts)
        return cls(counts, starts, owner, np.arange(len(owner)) - starts[owner])


class Running:
    """The samples that decode, oldest first.

    Attributes:
        state: [B] of :data:`STATE`: ``length`` counts the tokens of a sample, prompt and prefix included, ``last_id``
            is the last of them, which is drawn and not computed yet.
    """

    def __init__(self) -> None:
        self.samples: list[Decoding] = []
        self.state = np.empty(0, STATE)

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, samples: Sequence[Decoding]) -> None:
        """Add samples that draw from the pass in which their prompt has been computed."""
        rows = [(sample.sample_id, sample.rollout.num_tokens, sample.max_length, -1) for sample in samples]
        self.state = np.concatenate([self.state, np.array(rows, STATE)])
        self.samples += samples

    def extend(self, spans: Spans, ids: np.ndarray, logprobs: np.ndarray, num_new: np.ndarray) -> None:
        """Add the first ``num_new`` [B] tokens of each span, at least one, to the rollouts."""
        is_new = spans.offset < num_new[spans.owner]
        new = spans.owner[is_new].tolist(), ids[is_new].tolist(), logprobs[is_new].tolist()
        for i, token, logprob in zip(*new):
            rollout = self.samples[i].rollout
            rollout.response_ids.append(token)
            rollout.logprobs.append(logprob)
        self.state["length"] += num_new
        self.state["last_id"] = ids[spans.starts + num_new - 1]

    def pop(self) -> Decoding:
        """Remove the youngest sample."""
        self.state = self.state[:-1]
        return self.samples.pop()

    def remove(self, done: np.ndarray) -> list[Decoding]:
        """Remove the samples of a mask, bool [B], and return them."""
        removed = list(compress(self.samples, done))
        self.samples = list(compress(self.samples, ~done))
        self.state = self.state[~done]
        return removed
