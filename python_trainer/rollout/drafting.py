"""Drafts for the rollouts that an engine is generating, from a rollout history."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from python_trainer.data import Rollout
from rlkernels import RolloutHistory
from rlkernels.prefix_cache import Sequence as CachedSequence

MAX_TRUST = 0.95  # largest probability of acceptance that a draft token is given
EXPENSIVE_PASS = 1000.0  # overhead in tokens from which on drafts from other prompts pay


@dataclass(eq=False)
class Decoding:
    """A rollout that is being generated, with its place in the KV cache."""

    rollout: Rollout
    sample_id: int
    max_length: int  # tokens at which the answer ends, prompt and prefix included
    sequence: CachedSequence = field(init=False)  # everything but the last drawn token is computed

    def tokens(self) -> list[int]:
        return [*self.rollout.prompt_ids, *self.rollout.response_ids]


class Drafter:
    """Guess the next tokens of running samples, and learn how many were right.

    Drafts change the number of forward passes, never the tokens. Skip unseen prompts unless a forward pass is
    expensive: drafts from other prompts save too few passes to pay for the search.

    Args:
        history: earlier answers; filled by the caller.
        max_tokens: longest draft.
        pass_overhead: cost of a forward pass beside that of its tokens, in tokens. With n samples in a pass a draft
            token costs the share n / (n + pass_overhead) of a decode step; drafts are as long as they pay. None: the
            history's ``token_cost``, whatever n is.
    """

    def __init__(self, history: RolloutHistory, *, max_tokens: int = 16, pass_overhead: float | None):
        self.history = history
        self.max_tokens = max_tokens
        self.pass_overhead = pass_overhead
        self.handles: dict[Decoding, int] = {}

    def token_cost(self, samples: int) -> float | None:
        """Estimate the time of one more draft token, as a share of a decode step; None: the history decides."""
        return None if self.pass_overhead is None else samples / (samples + self.pass_overhead)

    def start(self, samples: Sequence[Decoding]) -> None:
        """Follow rollouts from their first token on; those that continue after a preemption are followed already."""
        expensive = self.pass_overhead is not None and self.pass_overhead >= EXPENSIVE_PASS
        for sample in samples:
            if sample in self.handles:
                continue
            prompt = sample.rollout.prompt_ids
            if expensive or self.history.longest_prompt(prompt) == len(prompt):
                handle = self.handles[sample] = self.history.track(prompt)
                self.history.extend(handle, sample.rollout.response_ids)

    def draft(self, samples: Sequence[Decoding], room: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
        """Draft the next tokens of samples.

        Args:
            room: int64 [B], most tokens of each draft.
            budget: most tokens of all drafts.

        Returns:
            The tokens of all drafts one after the other, int64, and the length of each draft, int64 [B].
        """
        lengths = np.zeros(len(samples), np.int64)
        handles = self._handles(samples)
        followed = np.flatnonzero(handles >= 0)
        if not len(followed):
            return lengths[:0], lengths
        longest = min(self.max_tokens, budget // len(samples))
        cost = self.token_cost(len(samples))
        if longest <= 0 or (cost is not None and cost >= MAX_TRUST):
            return lengths[:0], lengths
        ids, available = self.history.draft_tracked(handles[followed], max_tokens=longest, token_cost=cost)
        lengths[followed] = np.minimum(available.numpy(), room[followed])
        return ids.numpy()[np.arange(longest) < lengths[followed, None]], lengths

    def learn(
        self,
        samples: Sequence[Decoding],
        offered: np.ndarray,
        accepted: np.ndarray,
        new_ids: np.ndarray,
        num_new: np.ndarray,
    ) -> None:
        """Tell the history how many draft tokens were offered and accepted, and the new tokens of each sample.

        Args:
            new_ids: int64, the new tokens of all samples one after the other.
            offered, accepted, num_new: int64 [B].
        """
        handles = self._handles(samples)
        followed = handles >= 0
        self.history.observe(handles[followed], offered[followed], accepted[followed])
        self.history.extend_tracked(handles[followed], new_ids[followed.repeat(num_new)], num_new[followed])

    def _handles(self, samples: Sequence[Decoding]) -> np.ndarray:
        """Return the history's handle of each sample, int64 [B], or -1."""
        return np.array([self.handles.get(sample, -1) for sample in samples], np.int64)

    def stop(self, samples: Sequence[Decoding]) -> None:
        for sample in samples:
            if sample in self.handles:
                self.history.release(self.handles.pop(sample))


def pass_overhead(seconds: dict[int, float]) -> float:
    """Fit ``a + b tokens`` to seconds by number of tokens; return the overhead of a pass, a / b, in tokens.

    Least squares on relative errors, so that small passes count as much as large ones.
    """
    durations = np.array([*seconds.values()])
    per_token, fixed = np.polyfit([*seconds], durations, 1, w=1 / durations).tolist()
    return max(fixed, 0.0) / max(per_token, 1e-12)
