"""A rollout engine on weights that are kept elsewhere, whose requests are divided among ranks."""

from collections.abc import Sequence
from itertools import chain

from python_trainer.data import Request, Rollout
from python_trainer.distributed.group import RankGroup
from python_trainer.model.policy import Policy
from python_trainer.rollout.engine import Engine, SamplingParams, WrappedEngine, new_rollouts
from python_trainer.rollout.ordering import divide


class RankedEngine(WrappedEngine):
    """Generate with ``policy.inference_model``, and sync that when the policy has been updated.

    Each rank answers a part of the requests, of equal expected work where ``lengths`` are known, or rank 0 all of them
    (``engine.on_first_rank``); all get the answers of all. Noise is keyed by sample, so answers do not depend on who
    gives them. All ranks submit and poll the same; a poll generates all that was submitted. ``stats`` counts for all
    ranks together. The inner engine reports the progress of its part.
    """

    stats = Engine.stats

    def __init__(self, engine: Engine, policy: Policy, ranks: RankGroup):
        super().__init__(engine)
        self.policy, self.ranks = policy, ranks
        self._stats = engine.stats  # of all ranks
        self._requests: list[Request] = []  # submitted, all with the same sampling
        self._groups: list[list[Rollout]] = []  # their rollouts
        self._sampling = SamplingParams()

    def policy_updated(self) -> None:
        self.policy.sync_inference_model()
        self.inner.policy_updated()  # which counts

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        groups = [new_rollouts(request) for request in requests]
        self._requests += requests
        self._groups += groups
        self._sampling = sampling
        return list(chain.from_iterable(groups))

    def _work(self, count: int) -> list[Rollout]:
        requests, groups, ranks = self._requests, self._groups, self.ranks
        self._requests, self._groups = [], []
        stats_before = self.inner.stats
        answers: list[Rollout] = []  # by this rank
        parts = divide(self.lengths, requests, 1 if self.on_first_rank else ranks.size)
        if self.policy.streams_weights:  # all ranks gather them, even those without a request
            self.inner.load_weights()
        with ranks.fail_together():
            if ranks.rank < len(parts):
                answers = self.inner.generate([requests[i] for i in parts[ranks.rank]], self._sampling)
        counts = {name: count - stats_before[name] for name, count in self.inner.stats.items()}
        results = [ranks.broadcast((answers, counts))] if self.on_first_rank else ranks.gather((answers, counts))
        for part, (rank_answers, rank_counts) in zip(parts, results):
            for rollout, answer in zip(chain.from_iterable(groups[i] for i in part), rank_answers, strict=True):
                vars(rollout).update(vars(answer))  # another process generated a copy of the rollout
            for name, amount in rank_counts.items():
                self._stats[name] += amount
        return list(chain.from_iterable(groups))
