"""How long answers will be, and which worker generates what: RhymeRL's HistoPipe (arXiv 2508.18588) as pure functions.

A forward pass over n sequences takes about a + b n seconds, so a worker that generates a set of answers at once takes
``a * (longest answer) + b * (all tokens)``. Everything here counts time in units of b: ``overhead`` is a / b.
"""

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from python_trainer.data import Request, Rollout

NEWEST = 0.5  # weight of a prompt's newest visit in its mean
SPREAD = 0.25  # of answers about their expected length, before any have been seen, as a share of it
LAST_VISITS = 64  # to prompts, that the spread is averaged over
SURE = 0.1  # spread up to which the longest answer of a part can be told beforehand
GAIN = 0.1  # least share of a worker's time that moving answers away from it must save


class LengthHistory:
    """Mean length of the answers to each prompt, over its visits; newer visits weigh more.

    Attributes:
        spread: how far single answers lately were from what was expected, as a share of that.
    """

    def __init__(self) -> None:
        self.means: dict[str, float] = {}
        self.spread = SPREAD

    def observe(self, prompt_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """One visit to a prompt: the tokens of each answer, its given prefix included."""
        if not lengths:
            return
        key, mean = _key(prompt_ids), sum(lengths) / len(lengths)
        before = self.means.get(key, mean)
        if key in self.means or len(lengths) > 1:
            off = sum(abs(length - before) for length in lengths) / (len(lengths) * max(before, 1.0))
            self.spread += (off - self.spread) / LAST_VISITS
        self.means[key] = NEWEST * mean + (1 - NEWEST) * before

    def predict(self, prompts: Sequence[Sequence[int]]) -> list[float | None]:
        """Tokens of an answer to each prompt; the mean of the others for a prompt never seen; None if all are new."""
        known = [self.means.get(_key(prompt)) for prompt in prompts]
        seen = [length for length in known if length is not None]
        mean = sum(seen) / len(seen) if seen else None
        return [mean if length is None else length for length in known]

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self.means), "spread": self.spread}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means, self.spread = dict(state["means"]), state["spread"]


def _key(prompt_ids: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Work:
    """What is expected of answers that one worker generates side by side; a sum is of both at once."""

    longest: float = 0.0  # new tokens of the longest
    tokens: float = 0.0  # to compute for all of them: prompts and new tokens

    def __add__(self, other: "Work") -> "Work":
        return Work(max(self.longest, other.longest), self.tokens + other.tokens)

    def duration(self, overhead: float) -> float:
        return overhead * self.longest + self.tokens


NOTHING = Work()


def left(expected: float, done: int, limit: int, spread: float = SPREAD) -> float:
    """Tokens that an answer still needs, after ``done`` of at most ``limit``; one as long as expected goes on a bit."""
    return min(max(expected - done, spread * expected, 1.0), float(max(limit - done, 0)))


def longest_first(works: Sequence[Work]) -> list[int]:
    """Indices, the longest answer first; ties in the given order."""
    return sorted(range(len(works)), key=lambda i: (-works[i].longest, -works[i].tokens))


def in_turn(count: int, workers: int) -> list[list[int]]:
    """Contiguous parts of equal size, one a worker, whatever the lengths."""
    bounds = [count * worker // workers for worker in range(workers + 1)]
    return [list(range(start, end)) for start, end in itertools.pairwise(bounds)]


def balance(works: Sequence[Work], workers: int, overhead: float, spread: float = 0.0) -> list[list[int]]:
    """Spreads works over workers so that the last one to finish finishes early -> indices by worker, longest first.

    The best of three: each work, longest first, to the worker that would then finish first (LPT); runs of works of
    similar length, where long ones get more workers and a worker of short ones needs fewer passes; :func:`in_turn`.

    Args:
        spread: how far single answers stray from what is expected, as a share of it. Grouping answers of one length
            saves passes only if the longest of a part is as expected; where that is anybody's guess, workers with many
            short answers are just overloaded, and above ``SURE`` tokens alone are balanced.
    """
    overhead = overhead if spread <= SURE else 0.0
    order = longest_first(works)
    given = [sorted(part, key=order.index) for part in in_turn(len(works), workers)]
    plans = [to_least_loaded(works, order, workers, overhead), _runs(works, order, workers, overhead), given]
    return min(plans, key=lambda plan: makespan(works, plan, overhead))


def makespan(works: Sequence[Work], plan: Sequence[Sequence[int]], overhead: float) -> float:
    """Expected time of the slowest worker."""
    return max(sum((works[i] for i in part), NOTHING).duration(overhead) for part in plan)


def to_least_loaded(works: Sequence[Work], order: Sequence[int], workers: int, overhead: float) -> list[list[int]]:
    """In this order each to the worker that would then finish first -> indices by worker.

    Without ``overhead`` no worker has more tokens than the mean of all and those of one work.
    """
    plan: list[list[int]] = [[] for _ in range(workers)]
    loads = [NOTHING] * workers
    for i in order:
        worker = min(range(workers), key=lambda w: (loads[w] + works[i]).duration(overhead))
        plan[worker].append(i)
        loads[worker] += works[i]
    return plan


def _runs(works: Sequence[Work], order: Sequence[int], workers: int, overhead: float) -> list[list[int]]:
    """The best cut of the order into one run a worker: bisection on the time of the slowest."""

    def cut(limit: float) -> list[list[int]]:
        plan: list[list[int]] = [[]]
        load = NOTHING
        for i in order:
            if plan[-1] and (load + works[i]).duration(overhead) > limit:
                plan.append([])
                load = NOTHING
            plan[-1].append(i)
            load += works[i]
        return plan

    low, high = 0.0, sum(works, NOTHING).duration(overhead)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= workers else (middle, high)
    plan = cut(high)
    return [*plan, *([] for _ in range(workers - len(plan)))]


def alternate(works: Sequence[Work], workers: int, overhead: float, step: int) -> list[list[int]]:
    """HistoPipe's order: runs of similar length, on worker 0 the longest in even steps and the shortest in odd ones.

    For workers that begin the next step before the others have finished this one; behind a barrier, where every step
    waits for its slowest worker, :func:`balance` is what counts.
    """
    plan = _runs(works, longest_first(works), workers, overhead)
    return plan[::-1] if step % 2 else plan


def share(works: Sequence[Work], kept: Work, overhead: float, again: Sequence[float] | None = None) -> list[int]:
    """Which of its works a worker gives to one that has nothing to do -> indices, longest first.

    Args:
        works: may be given away.
        kept: what may not.
        overhead: of a pass, in tokens.
        again: tokens of each work that are computed already, and would be computed again where it goes.

    Returns:
        none when the later of the two would not finish earlier by the share ``GAIN`` at least.
    """
    given: list[int] = []
    mine, theirs = kept, NOTHING
    for i in longest_first(works):
        moved = theirs + works[i] + Work(0.0, again[i] if again else 0.0)
        if moved.duration(overhead) < (mine + works[i]).duration(overhead):
            theirs = moved
            given.append(i)
        else:
            mine += works[i]
    before = sum(works, kept).duration(overhead)
    after = max(mine.duration(overhead), theirs.duration(overhead))
    return given if after <= (1 - GAIN) * before else []


def expected_lengths(history: LengthHistory, requests: Sequence[Request]) -> list[float]:
    """New tokens of an answer to each request; the most there may be where nothing is known."""
    totals = history.predict([request.prompt_ids for request in requests])
    return [
        float(request.max_new_tokens)
        if total is None
        else left(total - len(request.prefix_ids), 0, request.max_new_tokens, history.spread)
        for request, total in zip(requests, totals)
    ]


def expectations(history: LengthHistory, requests: Sequence[Request]) -> list[Work]:
    """Work of all samples of each request."""
    return [
        Work(length, len(r.prompt_ids) + len(r.prefix_ids) + r.num_samples * length)
        for r, length in zip(requests, expected_lengths(history, requests))
    ]


def remember(history: LengthHistory, requests: Sequence[Request], rollouts: Iterable[Rollout]) -> None:
    """Notes how long the answers were; ``rollouts`` in the order of the requests."""
    visits: dict[tuple[int, ...], list[int]] = {}
    answers = iter(rollouts)
    for request in requests:
        lengths = visits.setdefault(tuple(request.prompt_ids), [])
        lengths += [len(next(answers).response_ids) for _ in range(request.num_samples)]
    for prompt, lengths in visits.items():
        history.observe(prompt, lengths)


def longest_sequence(requests: Sequence[Request]) -> int:
    """Most tokens that prompt, prefix and answer of one of the requests may have."""
    return max((len(r.prompt_ids) + len(r.prefix_ids) + r.max_new_tokens for r in requests), default=1)
