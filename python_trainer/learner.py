"""The update of one step: scored rollouts change the weights of the policy, and of the critic if there is one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from python_trainer.algorithms.settings import POLICY_LOSSES
from python_trainer.batch import Batch, Minibatch, mean_metrics, put
from python_trainer.config import Config
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import NotFinite
from python_trainer.model.critic import Critic
from python_trainer.model.lora import is_adapter, without_adapters
from python_trainer.model.optimizer import PolicyOptimizer, learning_rate
from python_trainer.model.packing import Packed, micro_batches, sorted_by_tokens, split_evenly
from python_trainer.model.policy import Policy
from python_trainer.model.weights import load_weights


class Learner:
    """Owns the weights that training changes, and updates them.

    Args:
        config: all settings, with the engine chosen; log-probabilities use the temperature of the sampler.

    Attributes:
        reference: the policy at the start of training, with ``algorithm.beta``; with adapters the policy itself, whose
            adapters are off while it is the reference.
        critic: if the advantages need one.
        prefix_in_loss: train on the beginnings that answers were given too.
        changed: set once weights or moments have changed.
    """

    def __init__(self, policy: Policy, config: Config, ranks: RankGroup | None = None):
        self.policy, self.ranks = policy, ranks or RankGroup()
        self.algorithm = config.algorithm.with_sampler(config.rollout.engine)
        self.settings, self.max_steps, self.temperature = config.optimizer, config.max_steps, config.rollout.temperature
        self.max_completion_length = config.rollout.max_completion_length
        self.prefix_in_loss = any(settings.prefix_in_loss for settings in config.accelerators.chosen())
        self.reference = None
        if self.algorithm.beta:
            self.reference = policy if policy.adapted else policy.frozen_copy(self.ranks)
        self.critic = None
        if self.algorithm.judge.critic:
            self.critic = Critic(policy, config.critic, self.settings, self.ranks)
        self.optimizer = PolicyOptimizer(policy.model, self.settings)
        self.changed = False

    def update(self, rollouts: Sequence[Rollout], number: int, *, rise: float | None = None) -> dict[str, float]:
        """Takes all optimizer steps on the rollouts of step ``number`` -> metrics.

        Args:
            rise: of stored answers alone: the share, at most 1, of the full learning rate. The critic does not learn
                from them: all of them are right, and it would learn that all answers are.

        Raises:
            NotFinite: NaN or infinity in loss or gradients.
        """
        algorithm, settings = self.algorithm, self.settings
        longest, device = self.max_completion_length, self.policy.device
        if rise is None:
            lr = learning_rate(settings, number, self.max_steps)
        else:
            lr = settings.learning_rate * min(rise, 1.0)
        batch = Batch(rollouts, algorithm, longest, device, prefix_in_loss=self.prefix_in_loss)
        norms, tokens = list[float](), 0
        counted: list[torch.Tensor] = []  # of each micro-batch
        with self.policy.packed_attention():
            self._record_before(batch)
            row = batch.set_advantages()
            if rise is not None:
                batch.returns = None
            # rank 0 decides: sums on a GPU have no fixed order, and all ranks must cut the same micro-batches
            trained = self.ranks.first(self._have_gradient(batch))
            minibatches = list(batch.minibatches(trained))
            if minibatches and batch.old is None and algorithm.num_iterations * len(batch.split()) > 1:
                self._record_logprobs(batch, [index for minibatch in minibatches for index in minibatch.samples])
            steps = minibatches * algorithm.num_iterations
            for minibatch in steps:
                norm, passed = self._step(minibatch, lr, counted)
                tokens += passed
                norms.append(norm)
        self.changed = True  # or will be, by an accelerator
        if norms:
            row = mean_metrics(counted, steps, device, self.ranks) | row | {"grad_norm": sum(norms) / len(norms)}
        return row | {"learning_rate": lr, "tokens/trained": int(self.ranks.sum(torch.tensor(tokens)))}

    def _have_gradient(self, batch: Batch) -> list[bool]:
        """Tells of each sample whether it has a gradient; samples without need no pass."""
        algorithm = self.algorithm
        kl_in_loss = self.reference is not None and not algorithm.use_kl_in_reward
        own = algorithm.policy_loss not in POLICY_LOSSES.names  # which may have one where the advantage is 0
        if self.critic is not None or algorithm.entropy_coef or kl_in_loss or own:
            return [True] * len(batch.rollouts)
        assert batch.advantages is not None
        return ((batch.advantages != 0).any(1) & batch.in_loss).tolist()

    def _step(self, minibatch: Minibatch, lr: float, counted: list[torch.Tensor]) -> tuple[float, int]:
        """Takes one optimizer step, if everything is finite -> norm of the policy's gradient, tokens of this rank.

        It appends the metrics of each micro-batch to ``counted``.
        """
        total, tokens = torch.zeros((), device=self.policy.device), 0  # this rank's share of the loss
        for packed in self._packs(minibatch.batch, minibatch.samples):
            logprobs, entropy, states = self.policy.score(packed, self.temperature)
            values = self.critic(packed, states) if self.critic else None
            loss, metrics = minibatch.loss(packed, logprobs, entropy, values)
            loss.backward()
            total += loss.detach()
            if minibatch.trained:  # what has no gradient says nothing of the update
                counted.append(metrics)
            tokens += packed.ids.numel()
        if not math.isfinite(whole := float(self.ranks.sum(total))):
            raise NotFinite(f"the loss is {whole}")
        self.ranks.sum_gradients(self.policy.model, list(self.optimizer.masters.values()))
        norm = self.optimizer.step(lr)
        self.changed = True
        if self.critic is not None and minibatch.batch.returns is not None:
            self.ranks.sum_gradients(self.critic, list(self.critic.optimizer.masters.values()))
            self.critic.optimizer.step(lr * self.critic.rate)
        return norm, tokens

    def _packs(self, batch: Batch, samples: Sequence[int]) -> Iterator[Packed]:
        """Yields this rank's micro-batches of these samples; if sharded, then masked ones until all ranks are done."""
        ranks, rollouts, device = self.ranks, batch.rollouts, self.policy.device
        most, in_order = self.settings.micro_batch_tokens, sorted_by_tokens(rollouts, samples)
        stretches = split_evenly(rollouts, in_order, ranks.size, device)
        parts = [list(micro_batches(rollouts, part, most, device)) for part in stretches]
        for part in parts[ranks.rank]:
            yield batch.pack(part)
        missing = max(map(len, parts)) - len(parts[ranks.rank])
        if ranks.sharded and missing:
            shortest = min(samples, key=lambda i: len(rollouts[i].prompt_ids) + len(rollouts[i].response_ids))
            packed = batch.pack([shortest])
            yield from [replace(packed, mask=torch.zeros_like(packed.mask))] * missing

    @torch.no_grad()
    def _record_before(self, batch: Batch) -> None:
        """Records what advantages and loss need before the update: log-probabilities of both models, values."""
        every = range(len(batch.rollouts))
        if self.critic is not None or self.algorithm.use_kl_in_reward:
            self._record_logprobs(batch, every)
        if self.reference is not None:
            batch.reference = batch.record()
            with self.reference.packed_attention(), without_adapters(self.reference.model):
                for packed in self._packs(batch, every):
                    put(batch.reference, packed, self.reference.score(packed, self.temperature)[0])
            batch.reference = self.ranks.merge(batch.reference)

    @torch.no_grad()
    def _record_logprobs(self, batch: Batch, samples: Sequence[int]) -> None:
        """Records log-probabilities before the update, with a critic its values too.

        A single optimizer step takes them from its own pass, unless advantages need them earlier.
        """
        old, values = batch.record(), batch.record()
        for packed in self._packs(batch, samples):
            logprobs, _, states = self.policy.score(packed, self.temperature)
            put(old, packed, logprobs)
            if self.critic is not None:
                put(values, packed, self.critic(packed, states))
        batch.old = self.ranks.merge(old)
        if self.critic is not None:
            batch.values = self.ranks.merge(values)

    def state_dict(self) -> dict[str, Any]:
        """Returns weights and moments."""
        critic = None
        if self.critic is not None:
            critic = {"model": self.critic.state_dict(), "optimizer": self.critic.optimizer.state_dict()}
        return {"model": self._weights(), "optimizer": self.optimizer.state_dict(), "critic": critic}

    def _weights(self) -> dict[str, Any]:
        """Returns the weights by name; of a policy with adapters those of the adapters alone."""
        weights = self.policy.model.state_dict()
        return {name: w for name, w in weights.items() if is_adapter(name)} if self.policy.adapted else weights

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Undoes :meth:`state_dict`, from any precision or shards; RuntimeError or KeyError for another model."""
        if self.policy.adapted and saved["model"].keys() != self._weights().keys():
            raise KeyError("adapters of other layers, or none")
        load_weights(self.policy.model, saved["model"], partly=self.policy.adapted)
        self.optimizer.load_state_dict(saved.get("optimizer", {}), saved["model"])
        if self.critic is not None:
            critic = saved["critic"]
            load_weights(self.critic, critic["model"])
            self.critic.optimizer.load_state_dict(critic.get("optimizer", {}), critic["model"])
