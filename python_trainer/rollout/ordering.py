"""Lengths of answers, predicted from earlier ones, and who generates what by them.

After HistoPipe of RhymeRL (arXiv 2508.18588): the longest answers begin first, and several engines get equal shares.
"""

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence

from python_trainer.data import Request, Rollout

NEWEST = 0.5  # weight of a prompt's newest visit in its mean


class LengthHistory:
    """Mean length of the answers to each prompt, over its visits; newer visits weigh more. Checkpoints hold it."""

    def __init__(self) -> None:
        self.means: dict[str, float] = {}

    def observe(self, requests: Sequence[Request], rollouts: Iterable[Rollout]) -> None:
        """Adds a visit to each prompt: the mean tokens of its answers, given prefixes included.

        Args:
            rollouts: the answers, in the order of the requests.
        """
        visits: dict[str, list[int]] = {}
        answers = iter(rollouts)
        for request in requests:
            lengths = [len(next(answers).response_ids) for _ in range(request.num_samples)]
            visits.setdefault(_key(request), []).extend(lengths)
        for key, lengths in visits.items():
            if lengths:
                mean = sum(lengths) / len(lengths)
                self.means[key] = NEWEST * mean + (1 - NEWEST) * self.means.get(key, mean)

    def predict(self, requests: Sequence[Request]) -> list[float]:
        """Predicts the new tokens of an answer to each request, from 1 to the most that there may be.

        A prompt never seen gets the mean of the others; if all are new, nothing but the limit is known.
        """
        known = [self.means.get(_key(request)) for request in requests]
        seen = [length for length in known if length is not None]
        mean = sum(seen) / len(seen) if seen else math.inf
        return [
            min(max((mean if length is None else length) - len(request.prefix_ids), 1.0), float(request.max_new_tokens))
            for request, length in zip(requests, known)
        ]


def _key(request: Request) -> str:
    return hashlib.blake2b(array("q", request.prompt_ids).tobytes(), digest_size=8).hexdigest()


def longest_first(lengths: Sequence[float]) -> list[int]:
    """Returns indices, the longest answer first; ties in the given order."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def balance(lengths: Sequence[float], tokens: Sequence[float], parts: int) -> list[list[int]]:
    """Spreads work over parts, the longest answers first, each to the part with the fewest tokens -> indices by part.

    No part has more tokens than the mean of all parts and one work.
    """
    plan: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for i in longest_first(lengths):
        part = loads.index(min(loads))
        plan[part].append(i)
        loads[part] += tokens[i]
    return plan


def divide(history: LengthHistory | None, requests: Sequence[Request], parts: int) -> list[list[int]]:
    """Returns the indices of the requests for each of several engines: equal shares, or in turn without a history."""
    if history is None:
        return [list(range(part, len(requests), parts)) for part in range(parts)]
    lengths = history.predict(requests)
    tokens = [len(r.prompt_ids) + len(r.prefix_ids) + r.num_samples * n for r, n in zip(requests, lengths)]
    return [sorted(part) for part in balance(lengths, tokens, parts)]
