"""A rollout engine on weights that are kept elsewhere, whose requests are divided among ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Protocol, TypeVar

from python_trainer.data import Request, Rollout
from python_trainer.model.policy import Policy
from python_trainer.rollout.engine import Engine, SamplingParams, WrappedEngine, new_rollouts
from python_trainer.rollout.ordering import divide, remember

T = TypeVar("T")


class Ranks(Protocol):
    """Who shares the work."""

    rank: int
    size: int

    def together(self) -> AbstractContextManager[None]: ...

    def gather(self, value: Any) -> list[Any]: ...

    def first(self, value: T) -> T: ...


class RankedEngine(WrappedEngine):
    """Generates with ``policy.whole``, and brings that up to date when the policy has been updated.

    Each rank answers a part of the requests, of equal expected work where ``lengths`` are known, or the first rank all
    of them (``engine.on_first_rank``); all get the answers of all. Noise is keyed by sample, so answers do not depend
    on who gives them. All ranks submit and poll the same; a poll generates all that was submitted.

    Args:
        engine: one that runs ``policy.whole``.
        ranks: None: one process.

    ``stats`` counts for all ranks together.
    """

    def __init__(self, engine: Engine, policy: Policy, ranks: Ranks | None = None):
        super().__init__(engine)
        self.policy, self.ranks = policy, ranks
        self._others = dict.fromkeys(engine.stats, 0.0)  # what the other ranks counted
        self._waiting: list[tuple[Sequence[Request], SamplingParams, list[Rollout]]] = []

    @property
    def stats(self) -> dict[str, float]:
        return {name: count + self._others[name] for name, count in self.inner.stats.items()}

    @property
    def tell(self) -> Callable[[int, int], None] | None:  # type: ignore[override]
        """With ranks None: the inner engine generates this one's part, and tells of that."""
        return self.inner.tell if self.ranks is None else None

    @tell.setter
    def tell(self, tell: Callable[[int, int], None] | None) -> None:
        self.inner.tell = tell

    def policy_updated(self) -> None:
        self.policy.update_whole()
        super().policy_updated()

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        if self.ranks is None:
            return self.inner.submit(requests, sampling)
        rollouts = [rollout for request in requests for rollout in new_rollouts(request, self.policy_version)]
        self._waiting.append((requests, sampling, rollouts))
        return rollouts

    def _work(self, count: int) -> list[Rollout]:
        if self.ranks is None:
            return self.inner.poll(count)
        submitted, self._waiting = self._waiting, []
        for part in submitted:
            self._share(self.ranks, *part)
        return [rollout for _, _, rollouts in submitted for rollout in rollouts]

    def _share(
        self, ranks: Ranks, requests: Sequence[Request], sampling: SamplingParams, rollouts: list[Rollout]
    ) -> None:
        """Generates this rank's part of a submission, and takes over the others'."""
        before, own, groups = self.inner.stats, list[Rollout](), list(groups_of(requests, rollouts))
        parts = ranks.first(divide(self.lengths, requests, 1 if self.on_first_rank else ranks.size))
        if self.policy.lean:  # weights are gathered for it, by all, also those without a request
            self.inner.refresh()
        with ranks.together():
            if ranks.rank < len(parts):
                own = self.inner.generate([requests[i] for i in parts[ranks.rank]], sampling)
        spent = {name: count - before[name] for name, count in self.inner.stats.items()}
        said = [ranks.first((own, spent))] if self.on_first_rank else ranks.gather((own, spent))
        for rank, (part, (answers, counts)) in enumerate(zip(parts, said)):
            for rollout, answer in zip(chain.from_iterable(groups[i] for i in part), answers, strict=True):
                rollout.become(answer)
            if rank != ranks.rank:
                self._others = {name: count + counts[name] for name, count in self._others.items()}
                if self.lengths:  # the engine has seen its own
                    remember(self.lengths, [requests[i] for i in part], answers)


def groups_of(requests: Sequence[Request], rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout]]:
    """The rollouts of each request."""
    end = 0
    for request in requests:
        start, end = end, end + request.num_samples
        yield rollouts[start:end]
