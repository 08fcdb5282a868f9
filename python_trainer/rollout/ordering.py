"""Lengths of answers, predicted from earlier ones, and who generates what by them.

After HistoPipe of RhymeRL (arXiv 2508.18588): the longest answers begin first, and several engines get equal shares.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from python_trainer.data import Request, Rollout

NEWEST = 0.5  # weight of a prompt's newest visit in its mean


class LengthHistory:
    """Mean length of the answers to each prompt, over its visits; newer visits weigh more."""

    def __init__(self) -> None:
        self.means: dict[str, float] = {}

    def observe(self, prompt_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Adds one visit to a prompt: the tokens of each answer, its given prefix included."""
        if lengths:
            key, mean = _key(prompt_ids), sum(lengths) / len(lengths)
            self.means[key] = NEWEST * mean + (1 - NEWEST) * self.means.get(key, mean)

    def predict(self, prompts: Sequence[Sequence[int]]) -> list[float | None]:
        """Tokens of an answer to each prompt; the mean of the others for a prompt never seen; None if all are new."""
        known = [self.means.get(_key(prompt)) for prompt in prompts]
        seen = [length for length in known if length is not None]
        mean = sum(seen) / len(seen) if seen else None
        return [mean if length is None else length for length in known]

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self.means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = dict(state["means"])


def _key(prompt_ids: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Work:
    """What answers generated side by side are expected to take."""

    longest: float  # new tokens of the longest
    tokens: float  # to compute for all of them: prompts and new tokens


def longest_first(works: Sequence[Work]) -> list[int]:
    """Indices, the longest answer first; ties in the given order."""
    return sorted(range(len(works)), key=lambda i: (-works[i].longest, -works[i].tokens))


def balance(works: Sequence[Work], parts: int) -> list[list[int]]:
    """Spreads works over parts, the longest first to the part with the fewest tokens so far -> indices by part.

    No part has more tokens than the mean of all parts and one work.
    """
    plan: list[list[int]] = [[] for _ in range(parts)]
    tokens = [0.0] * parts
    for i in longest_first(works):
        part = min(range(parts), key=lambda p: tokens[p] + works[i].tokens)
        plan[part].append(i)
        tokens[part] += works[i].tokens
    return plan


def expected_lengths(history: LengthHistory, requests: Sequence[Request]) -> list[float]:
    """New tokens of an answer to each request; the most there may be where nothing is known."""
    totals = history.predict([request.prompt_ids for request in requests])
    return [
        float(request.max_new_tokens)
        if total is None
        else min(max(total - len(request.prefix_ids), 1.0), float(request.max_new_tokens))
        for request, total in zip(requests, totals)
    ]


def expectations(history: LengthHistory, requests: Sequence[Request]) -> list[Work]:
    """Work of all samples of each request."""
    return [
        Work(length, len(r.prompt_ids) + len(r.prefix_ids) + r.num_samples * length)
        for r, length in zip(requests, expected_lengths(history, requests))
    ]


def divide(history: LengthHistory | None, requests: Sequence[Request], parts: int) -> list[list[int]]:
    """Indices of the requests for each of several engines: equal expected work, or in turn without a history."""
    if history is None:
        return [list(range(part, len(requests), parts)) for part in range(parts)]
    return [sorted(part) for part in balance(expectations(history, requests), parts)]


def remember(history: LengthHistory, requests: Sequence[Request], rollouts: Iterable[Rollout]) -> None:
    """Notes how long the answers were; ``rollouts`` in the order of the requests."""
    visits: dict[tuple[int, ...], list[int]] = {}
    answers = iter(rollouts)
    for request in requests:
        lengths = visits.setdefault(tuple(request.prompt_ids), [])
        lengths += [len(next(answers).response_ids) for _ in range(request.num_samples)]
    for prompt, lengths in visits.items():
        history.observe(prompt, lengths)
