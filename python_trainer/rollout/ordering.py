"""Lengths of answers, predicted from earlier ones, and the order and division of work that follow from them.

After HistoPipe of RhymeRL (arXiv 2508.18588): the longest answers begin first, and several engines get equal shares.
"""

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence

from python_trainer.data import Request, Rollout

NEWEST_WEIGHT = 0.5  # of a prompt's newest visit in its mean


class LengthHistory:
    """Mean length of the answers to each prompt, over its visits; newer visits weigh more. Checkpoints hold it."""

    def __init__(self) -> None:
        self.means: dict[str, float] = {}

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {"means": self.means}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        self.means = state["means"]

    def observe(self, requests: Sequence[Request], rollouts: Iterable[Rollout]) -> None:
        """Add a visit to each prompt: the mean tokens of its answers, given prefixes included.

        Args:
            rollouts: the answers, in the order of the requests.
        """
        visits: dict[str, list[int]] = {}
        answers = iter(rollouts)
        for request in requests:
            lengths = [len(next(answers).response_ids) for _ in range(request.num_generations)]
            visits.setdefault(_key(request), []).extend(lengths)
        for key, lengths in visits.items():
            if lengths:
                mean = sum(lengths) / len(lengths)
                self.means[key] = NEWEST_WEIGHT * mean + (1 - NEWEST_WEIGHT) * self.means.get(key, mean)

    def predict(self, requests: Sequence[Request]) -> list[float]:
        """Predict the new tokens of an answer to each request, from 1 to its limit.

        A new prompt gets the mean of the others; if all prompts are new, the limit.
        """
        prompt_means = [self.means.get(_key(request)) for request in requests]
        seen = [mean for mean in prompt_means if mean is not None]
        overall_mean = sum(seen) / len(seen) if seen else math.inf
        predictions = []
        for request, mean in zip(requests, prompt_means):
            new_tokens = (overall_mean if mean is None else mean) - len(request.prefix_ids)
            predictions.append(min(max(new_tokens, 1.0), float(request.max_new_tokens)))
        return predictions


def _key(request: Request) -> str:
    return hashlib.blake2b(array("q", request.prompt_ids).tobytes(), digest_size=8).hexdigest()


def longest_first(lengths: Sequence[float]) -> list[int]:
    """Return indices, the longest answer first; ties in the given order."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def balance(lengths: Sequence[float], tokens: Sequence[float], num_shares: int) -> list[list[int]]:
    """Divide work into shares, the longest answers first, each to the share with the fewest tokens; return indices.

    No share has more tokens than the mean of all shares and one piece of work.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0.0] * num_shares
    for i in longest_first(lengths):
        lightest = loads.index(min(loads))
        shares[lightest].append(i)
        loads[lightest] += tokens[i]
    return shares


def divide(history: LengthHistory | None, requests: Sequence[Request], num_shares: int) -> list[list[int]]:
    """Return the indices of the requests for each of several engines: equal shares, or in turn without a history."""
    if history is None:
        return [list(range(first, len(requests), num_shares)) for first in range(num_shares)]
    lengths = history.predict(requests)
    tokens = [len(r.prompt_ids) + len(r.prefix_ids) + r.num_generations * n for r, n in zip(requests, lengths)]
    return [sorted(share) for share in balance(lengths, tokens, num_shares)]
