"""A rollout engine on weights that are kept elsewhere, whose requests are divided among ranks."""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from python_trainer.data import Completion
from python_trainer.model.policy import Policy
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import Engine, Request, SamplingParams
from python_trainer.rollout.ordering import LengthHistory, remember

if TYPE_CHECKING:
    from python_trainer.distributed.replicated import Replicated


class PolicyEngine:
    """Generates with ``policy.whole``, and brings that up to date when the policy has been updated.

    Args:
        engine: one that runs ``policy.whole``.
        ranks: who shares the work: of n ranks, r answers requests r, r + n, ... and all get the answers of all. Noise
            is keyed by sample, so answers do not depend on who gives them. None: one process.

    ``stats`` counts for all ranks together.
    """

    def __init__(self, engine: Engine, policy: Policy, ranks: "Replicated | None" = None):
        self.inner, self.policy, self.ranks = engine, policy, ranks
        self._others = dict.fromkeys(engine.stats, 0.0)  # what the other ranks counted

    @property
    def drafter(self) -> Drafter | None:
        return self.inner.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self.inner.drafter = drafter

    @property
    def lengths(self) -> LengthHistory | None:
        return self.inner.lengths

    @lengths.setter
    def lengths(self, lengths: LengthHistory | None) -> None:
        self.inner.lengths = lengths

    @property
    def max_positions(self) -> int:
        return self.inner.max_positions

    @property
    def limited_by(self) -> str:
        return self.inner.limited_by

    @property
    def stats(self) -> dict[str, float]:
        return {name: count + self._others[name] for name, count in self.inner.stats.items()}

    def policy_updated(self) -> None:
        self.policy.update_whole()
        self.inner.policy_updated()

    def close(self) -> None:
        self.inner.close()

    def pass_seconds(self, sequences: int, tokens: int) -> float:
        return self.inner.pass_seconds(sequences, tokens)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        ranks = self.ranks
        if ranks is None:
            return self.inner.generate(requests, sampling)
        before, mine, own = self.inner.stats, requests[ranks.rank :: ranks.size], list[Completion]()
        with ranks.together():
            own = self.inner.generate(mine, sampling)
        spent = {name: count - before[name] for name, count in self.inner.stats.items()}
        ends = [0]
        for request in mine:
            ends.append(ends[-1] + request.num_samples)
        found = ranks.gather(([own[a:b] for a, b in pairwise(ends)], spent))
        for rank, (answers, counts) in enumerate(found):
            if rank != ranks.rank:
                self._others = {name: count + counts[name] for name, count in self._others.items()}
                if self.lengths:  # the engine has seen its own
                    remember(self.lengths, requests[rank :: ranks.size], list(chain.from_iterable(answers)))
        groups = [found[i % ranks.size][0][i // ranks.size] for i in range(len(requests))]
        return [completion for group in groups for completion in group]
