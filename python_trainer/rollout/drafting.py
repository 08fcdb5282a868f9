"""Drafts for the rollouts that an engine is generating, from a rollout history."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

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
    max_new_tokens: int
    sequence: CachedSequence = field(init=False)  # everything but the last drawn token is computed
    draft: list[int] = field(default_factory=list)  # guesses of the next tokens

    @property
    def drawn(self) -> int:
        """Return how many tokens have been generated."""
        return len(self.rollout.logprobs)

    @property
    def length(self) -> int:
        """Count prompt, prefix and all drawn tokens."""
        return self.rollout.num_tokens

    def tokens(self) -> list[int]:
        return [*self.rollout.prompt_ids, *self.rollout.response_ids]


class Drafter:
    """Guesses the next tokens of running samples, and learns how many were right.

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

    def draft(self, samples: Sequence[Decoding], budget: int) -> None:
        """Give every sample a draft; all drafts have at most ``budget`` tokens."""
        followed = [sample for sample in samples if sample in self.handles]
        if not followed:
            return
        longest = min(self.max_tokens, budget // len(samples))
        cost = self.token_cost(len(samples))
        if longest <= 0 or (cost is not None and cost >= MAX_TRUST):
            return
        handles = [self.handles[sample] for sample in followed]
        ids, lengths = self.history.draft_tracked(handles, max_tokens=longest, token_cost=cost)
        for sample, row, length in zip(followed, ids.tolist(), lengths.tolist()):
            # the pass itself draws one token more
            sample.draft = row[: min(length, sample.max_new_tokens - sample.drawn - 1)]

    def learn(self, samples: Sequence[Decoding], accepted: Sequence[int], new_ids: Sequence[Sequence[int]]) -> None:
        """Tell the history how many tokens of each draft were accepted, and the new tokens of each sample."""
        followed = [i for i, sample in enumerate(samples) if sample in self.handles]
        if not followed:
            return
        handles = [self.handles[samples[i]] for i in followed]
        self.history.observe(handles, [len(samples[i].draft) for i in followed], [accepted[i] for i in followed])
        self.history.extend_tracked(
            handles, [t for i in followed for t in new_ids[i]], [len(new_ids[i]) for i in followed]
        )

    def stop(self, samples: Sequence[Decoding]) -> None:
        for sample in samples:
            if sample in self.handles:
                self.history.release(self.handles.pop(sample))


def pass_overhead(seconds: dict[int, float]) -> float:
    """Fit ``a + b tokens`` to seconds by number of tokens; return the overhead of a pass, a / b, in tokens.

    Least squares on relative errors, so that small passes count as much as large ones.
    """
    tokens = torch.tensor(list(seconds), dtype=torch.float64)
    durations = torch.tensor(list(seconds.values()), dtype=torch.float64)
    rows = torch.stack([torch.ones_like(tokens), tokens], 1) / durations[:, None]
    fixed, per_token = torch.linalg.lstsq(rows, torch.ones_like(tokens)).solution.tolist()
    return max(fixed, 0.0) / max(per_token, 1e-12)
