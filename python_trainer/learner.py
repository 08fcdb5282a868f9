"""The update of one step: from scored answers to new weights of the policy, and of the critic where there is one."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import NotFinite
from python_trainer.model.critic import Critic
from python_trainer.model.lora import is_adapter
from python_trainer.model.optimizer import PolicyOptimizer, learning_rate, optimizer_bytes
from python_trainer.model.packing import Packed
from python_trainer.model.policy import Policy
from python_trainer.model.settings import CriticConfig, OptimizerConfig
from python_trainer.model.tensors import load_weights, local
from python_trainer.objective import MetricSums, Objective, Ragged, StepBatch, make_batch, set_advantages


def bytes_to_come(
    policy: Policy, algorithm: AlgorithmConfig, critic: CriticConfig, shards: int = 1, *, offload: bool = False
) -> int:
    """Memory that a learner of this policy will hold between passes, on each of so many ranks, beside the policy.

    Args:
        shards: ranks that share weights, gradients and moments.
        offload: ``optimizer.offload``, on a device with memory of its own.
    """
    found = optimizer_bytes(policy.model.parameters(), offload=offload)
    if algorithm.beta and not policy.adapted:
        found += sum(p.nbytes for p in policy.whole.parameters())
    if algorithm.judge.critic and critic.separate:
        body = [torch.nn.Parameter(p.to("meta")) for p in policy.whole.base_model.parameters()]
        found += sum(p.nbytes for p in body) + optimizer_bytes(body, offload=offload)
    return found // shards


class Learner:
    """Everything that training changes, and how.

    Args:
        algorithm, optimizer, critic: those sections of the settings.
        temperature: of the sampler; log-probabilities are of the same distribution.
        max_completion_length: most tokens of an answer.
        max_steps: of the run, for the learning rate's schedule.

    Attributes:
        reference: the policy as it was at the start, with ``algorithm.beta``.
        critic: where the advantages need one.
        changed: set when weights or moments are no longer those of before.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        critic: CriticConfig,
        temperature: float,
        max_completion_length: int,
        max_steps: int,
        ranks: RankGroup | None = None,
    ):
        self.policy, self.ranks = policy, ranks or RankGroup()
        self.algorithm, self.settings, self.temperature, self.max_steps = algorithm, optimizer, temperature, max_steps
        self.reference = policy.frozen_copy(partial(self.ranks.copy, trains=False)) if algorithm.beta else None
        self.critic = None
        if algorithm.judge.critic:
            self.critic = Critic(policy, critic, optimizer, copied=self.ranks.copy, shard=self.ranks.shard)
        self.optimizer = PolicyOptimizer(policy.model, optimizer)
        self.objective = Objective(algorithm, max_completion_length)
        self.changed = False

    def update(self, rollouts: Sequence[Rollout], number: int) -> dict[str, float]:
        """All optimizer steps on the answers of step ``number`` -> metrics.

        Raises:
            NotFinite: NaN or infinity in loss or gradients.
        """
        return self._update(rollouts, learning_rate(self.settings, number, self.max_steps))

    def rehearse(self, rollouts: Sequence[Rollout], rise: float) -> dict[str, float]:
        """:meth:`update` of the policy alone, by stored answers: of right ones a critic would learn that all are right.

        Args:
            rise: share of the full learning rate, at most 1.
        """
        return self._update(rollouts, self.settings.learning_rate * min(rise, 1.0), criticised=False)

    def _update(self, rollouts: Sequence[Rollout], lr: float, *, criticised: bool = True) -> dict[str, float]:
        algorithm = self.algorithm
        batch = make_batch(rollouts, algorithm, self.policy.device)
        minibatches = self._minibatches(rollouts)
        metrics, norms, trained = MetricSums(batch.rewards.device), list[float](), 0
        with self.policy.packed_attention():
            self._look_before(batch)
            row = set_advantages(batch, algorithm)
            if not criticised:
                batch.returns = None
            # of one rank: sums on a GPU have no order, and all must cut the step into the same micro-batches
            teaches = self.ranks.first(self._teaching(batch))
            steps = [
                # one sample at least, so that there is a gradient, be it 0
                (minibatch, [index for index in minibatch if teaches[index]] or minibatch[:1])
                for minibatch in minibatches
                if batch.loss_tokens[minibatch].any()  # else every answer was truncated and is masked
            ]
            if steps and batch.old is None and algorithm.num_iterations * len(minibatches) > 1:
                self._remember_logprobs(batch, [index for _, samples in steps for index in samples])
            for minibatch, samples in steps * algorithm.num_iterations:
                loss, tokens = self._pass(batch, minibatch, samples, metrics)
                trained += tokens
                norms.append(self._step(lr, float(self.ranks.sum(loss)), batch, minibatch, samples))
        self.changed = True  # or will be, by an accelerator
        row = metrics.means(len(norms), self.ranks) | row
        if norms:
            row["grad_norm"] = sum(norms) / len(norms)
        return row | {"learning_rate": lr, "tokens/trained": int(self.ranks.sum(torch.tensor(trained)))}

    def _teaching(self, batch: StepBatch) -> list[bool]:
        """Which samples have a gradient: without an advantage there is none, and no pass."""
        algorithm = self.algorithm
        kl_in_loss = self.reference is not None and not algorithm.use_kl_in_reward
        if self.critic is not None or algorithm.entropy_coef or kl_in_loss:
            return [True] * len(batch.rollouts)
        assert batch.advantages is not None
        return ((batch.advantages.padded() != 0).any(1) & batch.in_loss).tolist()

    def _pass(
        self, batch: StepBatch, minibatch: Sequence[int], samples: Sequence[int], metrics: MetricSums
    ) -> tuple[torch.Tensor, int]:
        """Samples of a minibatch, forwards and backwards -> their share of the loss, their tokens."""
        total, tokens = torch.zeros((), device=self.policy.device), 0
        for packed in self._packs(batch, samples):
            loss, seen = self._loss(packed, batch, minibatch)
            loss.backward()
            total += loss.detach()
            metrics.add(seen)
            tokens += packed.input_ids.numel()
        return total, tokens

    def _loss(self, packed: Packed, batch: StepBatch, minibatch: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and metrics of a micro-batch, from one forward pass."""
        logprobs, entropy, states = self.policy.score_with_states(packed, self.temperature)
        values = self.critic(packed, states) if self.critic else None
        return self.objective.loss(packed, logprobs, entropy, batch, minibatch, values)

    def _step(
        self, lr: float, loss: float, batch: StepBatch, minibatch: Sequence[int], samples: Sequence[int]
    ) -> float:
        """One optimizer step, if everything is finite -> norm of the policy's gradient."""
        try:
            if not math.isfinite(loss):
                raise NotFinite(f"the loss is {loss}")
            self.ranks.sum_gradients(self.policy.model, list(self.optimizer.masters.values()))
            norm = self.optimizer.step(lr)
            self.changed = True
            if self.critic is not None and batch.returns is not None:
                self.ranks.sum_gradients(self.critic, list(self.critic.optimizer.masters.values()))
                self.critic.step(lr)
            return norm
        except NotFinite as error:
            raise NotFinite(str(error), self._culprits(batch, minibatch, samples)) from error

    def _culprits(self, batch: StepBatch, minibatch: Sequence[int], samples: Sequence[int]) -> list[int]:
        """Those of a minibatch's ``samples``, which had a pass, whose own loss or gradient is not finite."""
        optimizers = [self.optimizer, *([self.critic.optimizer] if self.critic is not None else [])]
        weights = [weight for optimizer in optimizers for weight in optimizer.masters.values()]
        found = []
        for index in samples:
            for weight in weights:
                weight.grad = None
            loss, _ = self._loss(batch.pack([index]).to(self.policy.device), batch, minibatch)
            loss.backward()
            seen = [loss, *(local(w.grad) for w in weights if w.grad is not None)]
            if self.ranks.any(not all(bool(x.isfinite().all()) for x in seen)):
                found.append(index)
        for weight in weights:
            weight.grad = None
        return found

    def _packs(self, batch: StepBatch, samples: Sequence[int]) -> Iterator[Packed]:
        """This rank's micro-batches of these samples."""
        share, longest = self.settings.share_prefixes, self.settings.micro_batch_tokens
        for part, counts in self.ranks.micro_batches(batch.rollouts, samples, longest, share=share):
            packed = batch.pack(part, share=share)
            yield (packed if counts else packed.without_tokens()).to(self.policy.device)

    @torch.no_grad()
    def _look_before(self, batch: StepBatch) -> None:
        """Records what advantages and loss need of every sample: log-probabilities of both models, values."""
        temperature, reference = self.temperature, self.reference
        lengths = [len(rollout.response_ids) for rollout in batch.rollouts]
        if self.critic is not None or self.algorithm.use_kl_in_reward:
            batch.values = Ragged(lengths, self.policy.device) if self.critic is not None else None
            self._remember_logprobs(batch, range(len(lengths)))
        if reference is not None:
            batch.reference = Ragged(lengths, self.policy.device)
            with reference.packed_attention():
                for packed in self._packs(batch, range(len(lengths))):
                    batch.reference.put(packed, reference.score(packed, temperature)[0])
            batch.reference.flat = self.ranks.merge(batch.reference.flat)

    @torch.no_grad()
    def _remember_logprobs(self, batch: StepBatch, samples: Sequence[int]) -> None:
        """Records log-probabilities before the update, with a critic its values too.

        Of a single optimizer step they are those of its own pass, unless advantages need them earlier.
        """
        batch.old = Ragged([len(rollout.response_ids) for rollout in batch.rollouts], self.policy.device)
        for packed in self._packs(batch, samples):
            logprobs, _, states = self.policy.score_with_states(packed, self.temperature)
            batch.old.put(packed, logprobs)
            if self.critic is not None and batch.values is not None:
                batch.values.put(packed, self.critic(packed, states))
        for recorded in (batch.old, batch.values):
            if recorded is not None:
                recorded.flat = self.ranks.merge(recorded.flat)

    def _minibatches(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        """Sample indices per optimizer step; the samples of a group stay side by side, groups of like length too."""
        groups: dict[int, list[int]] = {}
        for index, rollout in enumerate(rollouts):
            groups.setdefault(rollout.group, []).append(index)

        def longest(group: list[int]) -> int:
            return max(len(rollouts[index].response_ids) for index in group)

        parts = self.algorithm.num_minibatches
        members = list(groups.values())
        split = [sorted(members[part::parts], key=longest) for part in range(parts)]
        return [[index for group in part for index in group] for part in split if part]

    def state_dict(self) -> dict[str, Any]:
        """Weights and moments."""
        return {
            "model": self._weights(),
            "optimizer": self.optimizer.state_dict(),
            "critic": self.critic.checkpoint() if self.critic else None,
        }

    def _weights(self) -> dict[str, Any]:
        """By name; where adapters are all that changes, theirs alone."""
        weights = self.policy.model.state_dict()
        return {name: w for name, w in weights.items() if is_adapter(name)} if self.policy.adapted else weights

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Undoes :meth:`state_dict`, of whatever precision or shards; RuntimeError or KeyError for another model's."""
        if self.policy.adapted and saved["model"].keys() != self._weights().keys():
            raise KeyError("adapters of other layers, or none")
        load_weights(self.policy.model, saved["model"], partly=self.policy.adapted)
        self.optimizer.load_state_dict(saved["optimizer"], saved["model"])
        if self.critic is not None:
            self.critic.restore(saved["critic"])
