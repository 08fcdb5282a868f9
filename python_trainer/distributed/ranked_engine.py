"""A rollout engine on weights that are kept elsewhere, whose requests are divided among ranks."""

from collections.abc import Sequence
from itertools import chain

from python_trainer.data import Request, Rollout
from python_trainer.distributed.group import RankGroup
from python_trainer.model.policy import Policy
from python_trainer.rollout.engine import Engine, SamplingParams, WrappedEngine, new_rollouts
from python_trainer.rollout.ordering import divide


class RankedEngine(WrappedEngine):
    """Generates with ``policy.inference_model``, and syncs that when the policy has been updated.

    Each rank answers a part of the requests, of equal expected work where ``lengths`` are known, or rank 0 all of them
    (``engine.on_first_rank``); all get the answers of all. Noise is keyed by sample, so answers do not depend on who
    gives them. All ranks submit and poll the same; a poll generates all that was submitted. ``stats`` counts for all
    ranks together.
    """

    def __init__(self, engine: Engine, policy: Policy, ranks: RankGroup | None = None):
        super().__init__(engine)
        self.policy, self.ranks = policy, ranks
        self._others = dict.fromkeys(engine.stats, 0.0)  # what the other ranks counted
        # submitted, with one and the same sampling
        self._requests, self._groups, self._sampling = list[Request](), list[list[Rollout]](), SamplingParams()

    @property
    def stats(self) -> dict[str, float]:
        return {name: count + self._others[name] for name, count in self.inner.stats.items()}

    def policy_updated(self) -> None:
        self.policy.sync_inference_model()
        self.inner.policy_updated()  # which counts

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        if self.ranks is None:
            return self.inner.submit(requests, sampling)
        groups = [new_rollouts(request) for request in requests]
        self._requests += requests
        self._groups += groups
        self._sampling = sampling
        return list(chain.from_iterable(groups))

    def _work(self, count: int) -> list[Rollout]:
        if self.ranks is None:
            return self.inner.poll(count)
        requests, groups, ranks = self._requests, self._groups, self.ranks
        self._requests, self._groups = [], []
        before, own = self.inner.stats, list[Rollout]()
        self.inner.on_progress = self.on_progress  # of this rank's part
        parts = divide(self.lengths, requests, 1 if self.on_first_rank else ranks.size)
        if self.policy.streams_weights:  # all ranks gather them, also those without a request
            self.inner.load_weights()
        with ranks.together():
            if ranks.rank < len(parts):
                own = self.inner.generate([requests[i] for i in parts[ranks.rank]], self._sampling)
        spent = {name: count - before[name] for name, count in self.inner.stats.items()}
        results = [ranks.first((own, spent))] if self.on_first_rank else ranks.gather((own, spent))
        for rank, (part, (answers, counts)) in enumerate(zip(parts, results)):
            for rollout, answer in zip(chain.from_iterable(groups[i] for i in part), answers, strict=True):
                vars(rollout).update(vars(answer))  # another process generated it in a copy
            if rank != ranks.rank:
                self._others = {name: count + counts[name] for name, count in self._others.items()}
        return list(chain.from_iterable(groups))
