"""The batch of one step: rewards, masks and advantages of its rollouts, and the loss of each minibatch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch

from python_trainer.algorithms.advantages import StepRewards, explained_variance, success_rate_advantages
from python_trainer.algorithms.losses import (
    Aggregation,
    PolicyLoss,
    importance_weights,
    kl_estimate,
    policy_loss,
    value_loss,
)
from python_trainer.algorithms.settings import LOSS_TYPES, AlgorithmConfig
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.model.packing import PackedRollouts, logprob_mask

# metric -> the kind of tokens that it is a mean, or the maximum, over
MEANS = {
    "clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high",
    "importance_ratio/mean": "in_pass", "kl": "with_reference",
    "value_loss": "with_return", "clip_ratio/value": "with_return",
    "sampling/logp_difference/mean": "fresh_sampled", "sampling/importance_sampling_ratio/mean": "fresh_corrected",
}  # fmt: skip
MAXIMA = {"importance_ratio/max": "in_pass", "sampling/logp_difference/max": "fresh_sampled"}
# kinds of tokens that micro-batches count; low and high, where the loss has that bound, are all tokens in the loss
COUNTS = ("in_pass", "with_reference", "with_return", "fresh_sampled", "fresh_corrected")

TokenMetrics = dict[str, torch.Tensor]  # metric or count -> values [M, L], 0 where they do not count


def gather_rows(table: torch.Tensor, packed: PackedRollouts) -> torch.Tensor:
    """Return the entries [M, L] of a micro-batch in a table of all samples, 0 where masked."""
    rows = table[torch.tensor(packed.samples, device=table.device), : packed.mask.shape[1]]
    return torch.where(packed.mask, rows, 0.0)


def scatter_rows(table: torch.Tensor, packed: PackedRollouts, values: torch.Tensor) -> None:
    """Store the values [M, L] of a micro-batch in a table of all samples."""
    cells = torch.tensor(packed.samples, device=table.device), slice(packed.mask.shape[1])
    table[cells] = torch.where(packed.mask, values, table[cells])


class Batch:
    """Everything that the update of one step needs, for B samples of up to T response tokens.

    Args:
        rollouts: with rewards; their order is that of the samples.
        max_completion_length: most tokens that an answer may have.
        prefix_in_loss: train on given prefixes too.

    Attributes:
        rewards: float32 [B].
        groups: int64 [B].
        success_rates: float32 [B], baselines of stored answers; NaN: the group is the baseline.
        only_stored: every answer has a success rate.
        importance_caps: float32 [B], limits of the importance weights of stored answers; NaN: a fresh answer.
        in_loss: bool [B].
        loss_tokens: int64 [B] on the CPU, response tokens in the loss.
        critic_tokens: int64 [B] on the CPU, those of them that a critic learns from: none of a stored answer.
        lengths: int64 [B], response tokens that the policy wrote, with a given prefix.
        present: bool [B, T], response tokens.
        logprob_mask: bool [B, T], response tokens that are more than context; they get a log-probability.
        sampler_logprobs: [B, T]; NaN on given prefixes and where unknown, anything on tokens of an environment.
        old_logprobs: [B, T] before the update, NaN where masked; None: use those of the current pass.
        reference_logprobs: [B, T] of the reference model, with beta > 0.
        values: [B, T] of the critic before the update.
        advantages: [B, T], set by :meth:`set_advantages`.
        returns: [B, T] targets of the critic, set by :meth:`set_advantages`; NaN: none.
    """

    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        config: AlgorithmConfig,
        max_completion_length: int,
        device: torch.device,
        *,
        prefix_in_loss: bool = False,
    ):
        for rollout in rollouts:
            num_tokens = len(rollout.response_ids)
            mask = rollout.response_mask
            assert mask is None or len(mask) == num_tokens, "a response mask has an entry for each response token"
            assert len(rollout.logprobs) == num_tokens - rollout.prefix_len, "each generated token has a logprob"
        self.rollouts = rollouts
        self.config = config
        self.max_completion_length = max_completion_length
        self.device = device
        self.aggregate: Aggregation = LOSS_TYPES.resolve(config.loss_type)

        # nothing compares answers then; in an empty batch there is nothing stored either
        self.only_stored = bool(rollouts) and all(r.success_rate is not None for r in rollouts)
        self.rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float32, device=device)
        self.groups = torch.tensor([r.group for r in rollouts], device=device)
        self.success_rates = torch.tensor([_or_nan(r.success_rate) for r in rollouts], device=device)
        self.importance_caps = torch.tensor([_or_nan(r.importance_cap) for r in rollouts], device=device)

        ended = torch.tensor([r.finish_reason != "length" for r in rollouts], dtype=torch.bool)
        in_loss = ended if config.mask_truncated_completions else torch.ones_like(ended)
        self.in_loss = in_loss.to(device)

        masks = [logprob_mask(r, include_prefix=prefix_in_loss) for r in rollouts]
        self.loss_tokens = torch.tensor([sum(row) for row in masks], dtype=torch.int64) * in_loss
        self.critic_tokens = self.loss_tokens * self.importance_caps.isnan().cpu()
        lengths = [sum(logprob_mask(r, include_prefix=True)) for r in rollouts]
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device=device)

        widths = [len(r.response_ids) for r in rollouts]
        columns = torch.arange(max(widths, default=0), device=device)
        self.present = columns < torch.tensor(widths, device=device)[:, None]
        flags = torch.tensor([flag for row in masks for flag in row], dtype=torch.bool, device=device)
        self.logprob_mask = torch.zeros_like(self.present).masked_scatter(self.present, flags)
        logprobs = [logprob for r in rollouts for logprob in [torch.nan] * r.prefix_len + list(r.logprobs)]
        sampler_logprobs = torch.tensor(logprobs, dtype=torch.float32, device=device)
        self.sampler_logprobs = self.empty_table().masked_scatter(self.present, sampler_logprobs)

    def empty_table(self) -> torch.Tensor:
        """Return room for a number per response token, float32 [B, T], NaN so far."""
        return torch.full(self.present.shape, torch.nan, device=self.device)

    def set_advantages(self) -> dict[str, float]:
        """Compute advantages, and returns for a critic, from what was recorded before the update; return metrics.

        The KL penalty is per token for advantages of tokens, and a sum per answer for those that compare answers.
        A stored answer with a success rate has that as its baseline, and changes nothing for others. A critic learns
        from fresh answers alone: stored ones are right, and would teach it that every answer is.
        """
        config, mask = self.config, self.logprob_mask
        grouped = self.success_rates.isnan()
        success_rates = self.success_rates[~grouped]
        stored_advantages = success_rate_advantages(success_rates, deviations=config.in_deviations)
        advantages = torch.zeros(mask.shape, device=mask.device)
        advantages[~grouped] = stored_advantages[:, None].expand(-1, mask.shape[1])
        penalty, metrics = self._kl_penalty()
        if not self.only_stored:
            step = StepRewards(
                self.rewards[grouped],
                self.groups[grouped],
                mask[grouped],
                (mask & self.in_loss[:, None])[grouped],
                penalty[grouped],
                None if self.values is None else self.values[grouped],
            )
            group_advantages, returns = config.advantage_fn(step, config)
            if group_advantages.ndim == 1:
                group_advantages = group_advantages[:, None].expand(step.mask.shape)
            advantages[grouped] = group_advantages
            if returns is not None:
                metrics |= self._set_returns(step, returns, grouped)
        self.advantages = torch.where(self.present, advantages, 0.0)
        return metrics

    def _kl_penalty(self) -> tuple[torch.Tensor, dict[str, float]]:
        """Return beta x KL of every token, which ``use_kl_in_reward`` subtracts from rewards, [B, T], and metrics."""
        config, mask = self.config, self.logprob_mask
        if not config.use_kl_in_reward or self.old_logprobs is None or self.reference_logprobs is None:
            return torch.zeros(mask.shape, device=mask.device), {}
        kl = kl_estimate(self.old_logprobs, self.reference_logprobs, mask, config.kl_estimator)
        return config.beta * kl, {"kl": float(kl.sum() / mask.sum().clamp(min=1))}

    def _set_returns(self, step: StepRewards, returns: torch.Tensor, samples: torch.Tensor) -> dict[str, float]:
        """Set the targets of the critic from the returns of the samples, a mask [B]; return metrics of the critic."""
        if step.values is None:
            return {}
        fresh = self.importance_caps[samples].isnan()[:, None]
        self.returns = self.empty_table()
        self.returns[samples] = torch.where(fresh, returns, torch.nan)
        learned = step.in_loss & fresh
        if not learned.any():
            return {}
        return {
            "explained_variance": explained_variance(step.values, returns, learned),
            "values/mean": float(step.values[learned].mean()),
            "returns/mean": float(returns[learned].mean()),
        }

    def split(self) -> list[list[int]]:
        """Split the samples into ``num_minibatches`` parts, or fewer if there are fewer groups; no group is split."""
        members: dict[int, list[int]] = {}
        for index, rollout in enumerate(self.rollouts):
            members.setdefault(rollout.group, []).append(index)
        groups = list(members.values())
        num_minibatches = min(self.config.num_minibatches, len(groups))
        return [list(chain.from_iterable(groups[i::num_minibatches])) for i in range(num_minibatches)]

    def minibatches(self, has_gradient: Sequence[bool]) -> Iterator["Minibatch"]:
        """Yield the minibatches of one pass over the batch, without those of which nothing is in the loss.

        Args:
            has_gradient: one entry per sample.
        """
        for samples in self.split():
            if self.loss_tokens[samples].any():  # else every answer was truncated and is masked
                yield Minibatch(self, samples, [index for index in samples if has_gradient[index]])


def _or_nan(number: float | None) -> float:
    return torch.nan if number is None else number


class Minibatch:
    """The samples of one optimizer step.

    The loss of a micro-batch is a sum of terms, each of which returns its loss and its metrics.

    Args:
        indices: of all its samples, within the batch.
        trained: the samples that have a gradient; None: all.

    Attributes:
        samples: those that go through the forward pass: the shortest one if none has a gradient, since each optimizer
            step needs one, even if it is 0.
    """

    def __init__(self, batch: Batch, indices: Sequence[int], trained: Sequence[int] | None = None):
        self.batch = batch
        self.config = batch.config
        self.rollouts = batch.rollouts
        self.indices = list(indices)
        self.trained = self.indices if trained is None else list(trained)
        self.samples = self.trained or [min(self.indices, key=lambda index: self.rollouts[index].num_tokens)]
        self.num_tokens = int(batch.loss_tokens[self.indices].sum())
        self.critic_tokens = max(int(batch.critic_tokens[self.indices].sum()), 1)

    def loss(
        self, packed: PackedRollouts, logprobs: torch.Tensor, entropy: torch.Tensor, values: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch, as its share of the minibatch's loss, and its metrics.

        Args:
            logprobs, entropy: [M, L] from ``Policy.token_logprobs``.
            values: [M, L] from the critic, if there is one.

        Returns:
            A scalar to call backward on, and detached numbers by metric and kind of tokens, for :func:`mean_metrics`.
        """
        batch = self.batch
        rows = torch.tensor(packed.samples, device=logprobs.device)
        mask = packed.mask & batch.in_loss[rows, None]
        old_logprobs = logprobs.detach() if batch.old_logprobs is None else gather_rows(batch.old_logprobs, packed)
        weights, metrics = self.importance_term(packed, mask, old_logprobs)
        assert batch.advantages is not None, "set_advantages comes first"
        advantages = gather_rows(batch.advantages, packed)
        surrogate, policy_metrics = self.policy_term(mask, logprobs, old_logprobs, advantages, weights)
        metrics |= policy_metrics
        token_loss = surrogate.loss
        if batch.reference_logprobs is not None and not self.config.use_kl_in_reward:
            reference_logprobs = gather_rows(batch.reference_logprobs, packed)
            kl_loss, kl_metrics = self.kl_term(mask, logprobs, reference_logprobs, surrogate.ratio)
            token_loss = token_loss + kl_loss
            metrics |= kl_metrics
        token_weights = batch.aggregate(
            mask,
            num_tokens=self.num_tokens,
            num_sequences=len(self.indices),
            max_length=batch.max_completion_length,
            lengths=batch.lengths[rows],
        )
        loss = (token_loss * token_weights).sum()
        if self.config.entropy_coef:
            loss = loss + self.entropy_term(mask, entropy)
        if values is not None and batch.values is not None and batch.returns is not None:
            old_values = gather_rows(batch.values, packed)
            returns = gather_rows(batch.returns, packed)
            critic_loss, critic_metrics = self.critic_term(mask, values, old_values, returns)
            loss = loss + critic_loss
            metrics |= critic_metrics
        return loss, reduce_metrics(metrics | {"in_pass": mask})

    def importance_term(
        self, packed: PackedRollouts, mask: torch.Tensor, old_logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, TokenMetrics]:
        """Return the factor [M, L] by which the sampler of a token corrects its loss, and metrics.

        The settings decide for fresh answers; a stored answer has the truncated weight of its own cap.
        """
        caps = self.batch.importance_caps[torch.tensor(packed.samples, device=mask.device), None]
        sampler_logprobs = gather_rows(self.batch.sampler_logprobs, packed)
        has_sampler_logprob = mask & ~sampler_logprobs.isnan()
        fresh_sampled = has_sampler_logprob & caps.isnan()
        difference = torch.where(fresh_sampled, (old_logprobs - sampler_logprobs).abs(), 0.0)
        metrics = {
            "fresh_sampled": fresh_sampled,
            "sampling/logp_difference/mean": difference,
            "sampling/logp_difference/max": difference,
        }
        fresh_weights = torch.ones_like(old_logprobs)
        if self.config.correction is not None:
            level, mode = self.config.correction
            cap = self.config.importance_sampling_cap
            fresh_weights = importance_weights(
                old_logprobs, sampler_logprobs, has_sampler_logprob, mode=mode, cap=cap, level=level
            )
            metrics["fresh_corrected"] = fresh_sampled
        stored_weights = importance_weights(
            old_logprobs, sampler_logprobs, has_sampler_logprob, mode="truncate", cap=caps
        )
        weights = torch.where(caps.isnan(), fresh_weights, stored_weights)
        return weights, metrics | {"sampling/importance_sampling_ratio/mean": weights * fresh_sampled}

    def policy_term(
        self,
        mask: torch.Tensor,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[PolicyLoss, TokenMetrics]:
        """Return the policy loss per token with its ratios, and metrics; all arguments are [M, L]."""
        surrogate = policy_loss(logprobs, old_logprobs, advantages, mask, self.config, weights=weights)
        metrics = {"importance_ratio/mean": surrogate.ratio, "importance_ratio/max": surrogate.ratio}
        metrics |= {f"clip_ratio/{bound}_mean": tokens for bound, tokens in surrogate.clipped.items()}
        return surrogate, metrics

    def kl_term(
        self, mask: torch.Tensor, logprobs: torch.Tensor, reference_logprobs: torch.Tensor, ratio: torch.Tensor
    ) -> tuple[torch.Tensor, TokenMetrics]:
        """Return the KL penalty per token, [M, L] as the arguments, and metrics."""
        kl = kl_estimate(logprobs, reference_logprobs, mask, self.config.kl_estimator)
        loss = self.config.beta * (kl * ratio if self.config.use_bias_correction_kl else kl)
        return loss, {"with_reference": mask, "kl": kl}

    def entropy_term(self, mask: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """Return the loss of the entropy bonus: a mean over tokens, whatever weights ``loss_type`` gives them."""
        return -self.config.entropy_coef * torch.where(mask, entropy, 0.0).sum() / max(self.num_tokens, 1)

    def critic_term(
        self, mask: torch.Tensor, values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor
    ) -> tuple[torch.Tensor, TokenMetrics]:
        """Return the loss of the critic's values, and metrics; all arguments are [M, L]."""
        clip = self.config.cliprange_value
        with_return = mask & ~returns.isnan()
        error = value_loss(values, old_values, returns, with_return, clip=clip)
        clipped = with_return & ((values - old_values).abs() > (torch.inf if clip is None else clip))
        loss = self.config.vf_coef * error.sum() / self.critic_tokens
        return loss, {"with_return": with_return, "value_loss": error, "clip_ratio/value": clipped}


class ReferenceAnswers:
    """Reference answers of one optimizer step; their loss is the mean negative log-probability of their tokens."""

    def __init__(self, rollouts: Sequence[Rollout]):
        self.rollouts = rollouts
        self.samples = self.trained = list(range(len(rollouts)))
        self.num_tokens = sum(len(rollout.response_ids) for rollout in rollouts)

    def loss(
        self, packed: PackedRollouts, logprobs: torch.Tensor, entropy: torch.Tensor, values: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch, as its share of the loss of the step, and no metrics."""
        return torch.where(packed.mask, -logprobs, 0.0).sum() / self.num_tokens, {}


@torch.no_grad()
def reduce_metrics(metrics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the sum of each metric over the tokens of a micro-batch, or the maximum of those in MAXIMA."""
    return {
        name: values.max() if name in MAXIMA and values.numel() else values.sum() for name, values in metrics.items()
    }


def mean_metrics(
    micro_batches: Sequence[Mapping[str, torch.Tensor]], optimizer_steps: Sequence[Minibatch], ranks: RankGroup
) -> dict[str, float]:
    """Return the metrics of a step from those of its micro-batches, as :meth:`Minibatch.loss` returns them.

    They are means over tokens, or maxima; a metric without tokens is missing.
    """
    columns: dict[str, list[float]] = {}  # a rank may have no micro-batch, as in a step with a single sample
    if micro_batches:
        table = torch.stack([torch.stack([*metrics.values()]) for metrics in micro_batches], 1)
        columns = dict(zip(micro_batches[0], table.tolist()))  # at once: the host waits for a GPU here
    rank_columns = ranks.gather(columns)

    def total(name: str, reduce: Callable[[Iterable[float]], float] = sum) -> float:
        """Reduce a metric over the micro-batches of all ranks."""
        return reduce(chain.from_iterable(of_rank.get(name, ()) for of_rank in rank_columns))

    # tokens without a gradient are never clipped, and count all the same
    num_tokens = sum(minibatch.num_tokens for minibatch in optimizer_steps)
    tokens = {kind: total(kind) for kind in COUNTS} | dict.fromkeys(optimizer_steps[0].config.clip_bounds, num_tokens)
    means = {name: total(name) / tokens[kind] for name, kind in MEANS.items() if tokens.get(kind)}
    return means | {name: total(name, max) for name, kind in MAXIMA.items() if tokens[kind]}
