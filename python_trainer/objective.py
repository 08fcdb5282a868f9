"""From scored rollouts to a loss: one step's batch, and its loss and metrics per micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from python_trainer.accelerators.base import Rollout
from python_trainer.algorithms import (
    LOSS_TYPES,
    group_advantages,
    importance_weights,
    kl_estimate,
    policy_loss,
    rloo_advantages,
    token_weights,
)
from python_trainer.config import AlgorithmConfig
from python_trainer.packing import Answer, Packed


class Ragged:
    """One number per response token of every sample of a step."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self.starts = torch.tensor([0, *lengths], device=device).cumsum(0)
        self.flat = torch.full((int(self.starts[-1]),), torch.nan, device=device)

    def _index(self, packed: Packed) -> torch.Tensor:
        starts = self.starts[torch.tensor(packed.samples, device=self.starts.device)]
        return starts[:, None] + torch.arange(packed.mask.shape[1], device=self.starts.device)

    def get(self, packed: Packed) -> torch.Tensor:
        """[B, L] of the samples of a micro-batch, 0 where masked."""
        if not self.flat.numel():
            return torch.zeros(packed.mask.shape, device=self.flat.device)
        return torch.where(packed.mask, self.flat[torch.where(packed.mask, self._index(packed), 0)], 0.0)

    def put(self, packed: Packed, values: torch.Tensor) -> None:
        """Stores the values [B, L] of a micro-batch."""
        self.flat[self._index(packed)[packed.mask]] = values[packed.mask]


@dataclass
class StepBatch:
    """Everything the update of one step needs, B samples."""

    answers: list[Answer]
    advantages: torch.Tensor  # float32 [B]
    in_loss: torch.Tensor  # bool [B]
    loss_tokens: torch.Tensor  # int64 [B] response tokens in the loss
    sampler: Ragged  # log-probabilities of the sampler; NaN on given prefixes
    old: Ragged | None = None  # log-probabilities before the update; None: those of the current pass
    reference: Ragged | None = None  # log-probabilities of the reference model, with beta > 0


def make_batch(rollouts: Sequence[Rollout], config: AlgorithmConfig, device: torch.device) -> StepBatch:
    """Advantages and masks of a step's rollouts, in their order."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
    groups = torch.tensor([rollout.group for rollout in rollouts])
    if config.advantage == "rloo":
        advantages = rloo_advantages(rewards, groups)
    else:
        advantages = group_advantages(rewards, groups, scale_rewards=config.scale_rewards)
    lengths = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
    unscored = [0 if config.prefix_in_loss else rollout.prefix_len for rollout in rollouts]
    in_loss = torch.tensor(
        [not (config.mask_truncated_completions and rollout.finish_reason == "length") for rollout in rollouts]
    )
    sampler = Ragged(lengths.tolist(), device)
    recorded = [[torch.nan] * rollout.prefix_len + list(rollout.logprobs) for rollout in rollouts]
    sampler.flat = torch.tensor([value for row in recorded for value in row], dtype=torch.float32, device=device)
    return StepBatch(
        answers=[Answer(r.prompt_ids, r.response_ids, r.prefix_len, skip) for r, skip in zip(rollouts, unscored)],
        advantages=advantages.to(device),
        in_loss=in_loss.to(device),
        loss_tokens=(lengths - torch.tensor(unscored, dtype=torch.int64)) * in_loss,
        sampler=sampler,
    )


# what Objective.loss counts, summed over the tokens in the loss unless it says otherwise
SUMS = ("tokens", "loss", "entropy", "kl", "ratio", "clip_low", "clip_high", "sampled", "logprob_diff")
MAXIMA = ("ratio_max", "logprob_diff_max")


class Objective:
    """The loss of a micro-batch as its share of the loss of the whole minibatch."""

    def __init__(self, config: AlgorithmConfig, max_completion_length: int):
        self.config = config
        self.aggregation = LOSS_TYPES.get(config.loss_type, config.loss_type)
        self.max_length = max_completion_length

    def loss(
        self, packed: Packed, logprobs: torch.Tensor, entropy: torch.Tensor, batch: StepBatch, minibatch: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss (a scalar to call backward on) and metrics [len(SUMS) + len(MAXIMA)], detached.

        Args:
            logprobs, entropy: [B, L] from ``Policy.score``.
            minibatch: all samples of the optimizer step that this micro-batch is a part of.
        """
        config = self.config
        rows = torch.tensor(packed.samples, device=logprobs.device)
        mask = packed.mask & batch.in_loss[rows, None]
        weight = token_weights(
            mask, self.aggregation, num_tokens=int(batch.loss_tokens[list(minibatch)].sum()),
            num_sequences=len(minibatch), max_length=self.max_length,
        )  # fmt: skip
        old = logprobs.detach() if batch.old is None else batch.old.get(packed)
        sampler = batch.sampler.get(packed)
        sampled = mask & ~sampler.isnan()
        correction = None
        if config.importance_sampling != "none":
            correction = importance_weights(
                old, sampler, sampled, mode=config.importance_sampling, cap=config.importance_sampling_cap
            )
        out = policy_loss(
            logprobs, old, batch.advantages[rows], mask, epsilon=config.epsilon, epsilon_high=config.epsilon_high,
            delta=config.delta, weights=correction,
        )  # fmt: skip
        per_token = out.loss
        kl = torch.zeros_like(logprobs)
        if batch.reference is not None:
            kl = kl_estimate(logprobs, batch.reference.get(packed), mask, config.kl_estimator)
            per_token = per_token + config.beta * kl
        if config.entropy_coef:
            per_token = per_token - config.entropy_coef * torch.where(mask, entropy, 0.0)
        loss = (per_token * weight).sum()
        with torch.no_grad():
            difference = torch.where(sampled, (old - sampler).abs(), 0.0)
            entropy = torch.where(mask, entropy, 0.0)
            sums = (mask, loss, entropy, kl, out.ratio, out.clipped_low, out.clipped_high, sampled, difference)
            maxima = (out.ratio, difference)
            metrics = [value.sum().float() for value in sums]
            metrics += [value.max() if value.numel() else value.sum() for value in maxima]
            return loss, torch.stack(metrics)


class MetricSums:
    """Adds up what :meth:`Objective.loss` counted, over all micro-batches of a step, without waiting for the device."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def add(self, metrics: torch.Tensor) -> None:
        self.rows.append(metrics)

    def means(self, optimizer_steps: int) -> dict[str, float]:
        """Metrics of the step: means over tokens, the loss as a mean over optimizer steps."""
        if not self.rows:
            return {}
        table = torch.stack(self.rows)
        sums = dict(zip(SUMS, table[:, : len(SUMS)].sum(0).tolist()))
        maxima = dict(zip(MAXIMA, table[:, len(SUMS) :].amax(0).tolist()))
        tokens, sampled = max(sums["tokens"], 1.0), max(sums["sampled"], 1.0)
        return {
            "loss": sums["loss"] / max(optimizer_steps, 1),
            "entropy": sums["entropy"] / tokens,
            "kl": sums["kl"] / tokens,
            "clip_ratio/low_mean": sums["clip_low"] / tokens,
            "clip_ratio/high_mean": sums["clip_high"] / tokens,
            "importance_ratio/mean": sums["ratio"] / tokens,
            "importance_ratio/max": maxima["ratio_max"],
            "sampling/logp_difference/mean": sums["logprob_diff"] / sampled,
            "sampling/logp_difference/max": maxima["logprob_diff_max"],
        }
