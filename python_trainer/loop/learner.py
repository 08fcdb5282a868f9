"""The update of one step: rollouts change the weights of the policy, and of the critic if there is one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from python_trainer.algorithms.settings import POLICY_LOSSES
from python_trainer.config import Config
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import NotFinite
from python_trainer.loop.batch import Batch, Minibatch, ReferenceAnswers, mean_metrics, scatter_rows
from python_trainer.model.critic import Critic
from python_trainer.model.lora import is_adapter, without_adapters
from python_trainer.model.optimizer import MasterWeightAdamW
from python_trainer.model.packing import PackedRollouts, micro_batches, pack_rollouts, sorted_by_tokens, split_evenly
from python_trainer.model.policy import Policy
from python_trainer.model.schedule import schedule
from python_trainer.model.weights import load_weights


class Learner:
    """Own the weights that training changes, and update them.

    Args:
        config: all settings, with the engine chosen; log-probabilities use the temperature of the sampler.

    Attributes:
        reference: the policy at the start of training, with ``algorithm.beta``; with adapters the policy itself, whose
            adapters are off while it is the reference.
        critic: if the advantages need one.
        schedule: gives the factor of the learning rates of policy and critic at a step.
        prefix_in_loss: train on the beginnings that answers were given too.
        changed: set once weights or moments may have changed.
    """

    def __init__(self, policy: Policy, config: Config, ranks: RankGroup | None = None):
        self.policy = policy
        self.ranks = ranks or RankGroup()
        self.algorithm = config.algorithm
        self.settings = config.optimizer
        self.max_steps = config.max_steps
        self.schedule = partial(
            schedule,
            warmup_steps=self.settings.warmup_steps,
            decay=self.settings.lr_scheduler_type,
            max_steps=self.max_steps,
        )
        self.temperature = config.rollout.temperature
        self.max_completion_length = config.rollout.max_completion_length
        self.prefix_in_loss = any(settings.prefix_in_loss for settings in config.accelerators.chosen())
        self.reference = None
        if self.algorithm.beta:
            self.reference = policy if policy.adapted else policy.frozen_copy(self.ranks)
        self.critic = None
        if self.algorithm.advantage_fn.critic:
            self.critic = Critic(policy, config.critic, self.settings, self.ranks)
        self.optimizer = MasterWeightAdamW(policy.model, self.settings)
        self.changed = False

    def update(self, rollouts: Sequence[Rollout], number: int, *, lr_scale: float | None = None) -> dict[str, float]:
        """Take all optimizer steps on the rollouts of step ``number``; return metrics.

        Args:
            lr_scale: factor of the learning rates, in place of the schedule's; None: the schedule decides.

        Raises:
            NotFinite: NaN or infinity in loss or gradients.
        """
        if lr_scale is None:
            lr_scale = self.schedule(number)
        limit, device = self.max_completion_length, self.policy.device
        batch = Batch(rollouts, self.algorithm, limit, device, prefix_in_loss=self.prefix_in_loss)
        micro_batch_metrics: list[dict[str, torch.Tensor]] = []
        with self.policy.packed_attention():
            self._record_before(batch)
            row = batch.set_advantages()
            # rank 0 decides: sums on a GPU have no fixed order, and all ranks must cut the same micro-batches
            has_gradient = self.ranks.broadcast(self._have_gradient(batch))
            minibatches = list(batch.minibatches(has_gradient))
            optimizer_steps = minibatches * self.algorithm.num_iterations
            if len(optimizer_steps) > 1 and batch.old_logprobs is None:
                self._record_logprobs(batch, [index for minibatch in minibatches for index in minibatch.samples])
            steps = [self._step(minibatch, lr_scale, micro_batch_metrics) for minibatch in optimizer_steps]
        self.changed = True  # after_update may edit weights even without an optimizer step
        if steps:
            losses, norms, _ = zip(*steps)
            means = mean_metrics(micro_batch_metrics, optimizer_steps, self.ranks)
            row = means | row | {"loss": fmean(losses), "grad_norm": fmean(norms)}
        num_tokens = int(self.ranks.sum(torch.tensor(sum(tokens for *_, tokens in steps))))
        return row | {"learning_rate": self.settings.learning_rate * lr_scale, "tokens/trained": num_tokens}

    def imitate(self, answers: Sequence[Rollout], number: int) -> dict[str, float]:
        """Take optimizer step ``number`` on reference answers; return metrics, ``loss`` before the step among them.

        Raises:
            NotFinite: NaN or infinity in loss or gradients.
        """
        lr_scale = self.schedule(number)
        with self.policy.packed_attention():
            loss, norm, num_tokens = self._step(ReferenceAnswers(answers), lr_scale, [])
        lr = self.settings.learning_rate * lr_scale
        return {"loss": loss, "grad_norm": norm, "learning_rate": lr, "tokens/trained": num_tokens}

    def _have_gradient(self, batch: Batch) -> list[bool]:
        """Return for each sample whether it has a gradient; the others need no pass."""
        kl_in_loss = self.reference is not None and not self.algorithm.use_kl_in_reward
        # a loss of the user's may have a gradient where the advantage is 0
        user_loss = self.algorithm.policy_loss not in POLICY_LOSSES.names
        if self.critic is not None or self.algorithm.entropy_coef or kl_in_loss or user_loss:
            return [True] * len(batch.rollouts)
        assert batch.advantages is not None
        return ((batch.advantages != 0).any(1) & batch.in_loss).tolist()

    @torch.enable_grad()  # a user's module may have turned gradients off
    def _step(
        self,
        minibatch: Minibatch | ReferenceAnswers,
        lr_scale: float,
        micro_batch_metrics: list[dict[str, torch.Tensor]],
    ) -> tuple[float, float, int]:
        """Take one optimizer step, if everything is finite; return loss, gradient norm of the policy, and own tokens.

        It appends the metrics of each micro-batch to ``micro_batch_metrics``.
        """
        critic = self.critic
        if isinstance(minibatch, ReferenceAnswers) or minibatch.batch.returns is None:
            critic = None  # these answers do not train it
        loss_share = torch.zeros((), device=self.policy.device)  # of this rank
        num_tokens = 0
        for packed in self._micro_batches(minibatch.rollouts, minibatch.samples):
            logprobs, entropy, states = self.policy.token_logprobs(packed, self.temperature)
            values = critic(packed, states) if critic else None
            loss, metrics = minibatch.loss(packed, logprobs, entropy, values)
            loss.backward()
            loss_share += loss.detach()
            if minibatch.trained:  # a sample without a gradient says nothing about the update
                micro_batch_metrics.append(metrics)
            num_tokens += packed.ids.numel()
        if not math.isfinite(total := float(self.ranks.sum(loss_share))):
            raise NotFinite(f"the loss is {total}")
        self.ranks.sum_gradients(self.policy.model, list(self.optimizer.masters.values()))
        norm = self.optimizer.clip_gradients()
        if critic is not None:  # its gradients too are checked before any weight changes
            self.ranks.sum_gradients(critic, list(critic.optimizer.masters.values()))
            critic.optimizer.clip_gradients()
        self.optimizer.step(lr_scale)
        self.changed = True
        if critic is not None:
            critic.optimizer.step(lr_scale)
        return total, norm, num_tokens

    def _micro_batches(self, rollouts: Sequence[Rollout], samples: Sequence[int]) -> Iterator[PackedRollouts]:
        """Yield this rank's micro-batches of these samples; if sharded, then masked ones until all ranks are done."""
        ranks, device = self.ranks, self.policy.device
        pack = partial(pack_rollouts, rollouts, include_prefix=self.prefix_in_loss, device=device)
        in_order = sorted_by_tokens(rollouts, samples)
        shares = split_evenly(rollouts, in_order, ranks.size, device)
        parts = [list(micro_batches(rollouts, share, self.settings.micro_batch_tokens, device)) for share in shares]
        for part in parts[ranks.rank]:
            yield pack(part)
        missing = max(map(len, parts)) - len(parts[ranks.rank])
        if ranks.sharded and missing:
            shortest = min(samples, key=lambda i: rollouts[i].num_tokens)
            packed = pack([shortest])
            yield from [replace(packed, mask=torch.zeros_like(packed.mask))] * missing

    @torch.no_grad()
    def _record_before(self, batch: Batch) -> None:
        """Record what advantages and loss need before the update: log-probabilities of both models, values.

        Advantages of stored answers, which have a success rate, need neither values nor a penalty.
        """
        samples = range(len(batch.rollouts))
        kl_in_reward = self.algorithm.use_kl_in_reward
        if (self.critic is not None or kl_in_reward) and not batch.only_stored:
            self._record_logprobs(batch, samples)
        if self.reference is not None and not (kl_in_reward and batch.only_stored):
            reference_logprobs = batch.empty_table()
            with self.reference.packed_attention(), without_adapters(self.reference.model):
                for packed in self._micro_batches(batch.rollouts, samples):
                    logprobs, _, _ = self.reference.token_logprobs(packed, self.temperature)
                    scatter_rows(reference_logprobs, packed, logprobs)
            batch.reference_logprobs = self.ranks.merge(reference_logprobs)

    @torch.no_grad()
    def _record_logprobs(self, batch: Batch, samples: Sequence[int]) -> None:
        """Record log-probabilities before the update, with a critic its values too.

        A single optimizer step takes them from its own pass, unless advantages need them earlier.
        """
        old_logprobs, values = batch.empty_table(), batch.empty_table()
        for packed in self._micro_batches(batch.rollouts, samples):
            logprobs, _, states = self.policy.token_logprobs(packed, self.temperature)
            scatter_rows(old_logprobs, packed, logprobs)
            if self.critic is not None:
                scatter_rows(values, packed, self.critic(packed, states))
        batch.old_logprobs = self.ranks.merge(old_logprobs)
        if self.critic is not None:
            batch.values = self.ranks.merge(values)

    def state_dict(self) -> dict[str, Any]:
        """Return weights and moments."""
        critic = None
        if self.critic is not None:
            critic = {"model": self.critic.state_dict(), "optimizer": self.critic.optimizer.state_dict()}
        return {"model": self._weights(), "optimizer": self.optimizer.state_dict(), "critic": critic}

    def _weights(self) -> dict[str, Any]:
        """Return the weights by name; only those of the adapters if only these train."""
        weights = self.policy.model.state_dict()
        if not self.policy.adapted:
            return weights
        return {name: weight for name, weight in weights.items() if is_adapter(name)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`, from any precision or shards; RuntimeError or KeyError for another model."""
        if self.policy.adapted and saved["model"].keys() != self._weights().keys():
            raise KeyError("adapters of other layers, or none")
        load_weights(self.policy.model, saved["model"], partly=self.policy.adapted)
        self.optimizer.load_state_dict(saved.get("optimizer", {}), saved["model"])
        if self.critic is not None:
            critic = saved["critic"]
            load_weights(self.critic, critic["model"])
            self.critic.optimizer.load_state_dict(critic.get("optimizer", {}), critic["model"])
