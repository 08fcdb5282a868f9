"""From scored rollouts to a loss: one step's batch, its advantages, and loss and metrics per micro-batch."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from python_trainer.algorithms.advantages import (
    StepRewards,
    against_chance,
    explained_variance,
)
from python_trainer.algorithms.kl import kl_estimate
from python_trainer.algorithms.losses import Aggregation, importance_weights, policy_loss, value_loss
from python_trainer.algorithms.settings import LOSS_TYPES, AlgorithmConfig
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.model.packing import Packed, pack, scored_tokens


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

    def mask(self) -> torch.Tensor:
        """bool [B, T] of all samples: where a row of T has a response token."""
        lengths = self.starts.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        return torch.arange(longest, device=lengths.device) < lengths[:, None]

    def padded(self) -> torch.Tensor:
        """All samples as rows [B, T], 0 beyond their ends."""
        mask = self.mask()
        return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, self.flat)

    def like(self, padded: torch.Tensor) -> "Ragged":
        """Of the same lengths, with numbers from rows [B, T]."""
        other = copy.copy(self)
        other.flat = padded[self.mask()]
        return other


@dataclass
class StepBatch:
    """Everything the update of one step needs, B samples."""

    rollouts: Sequence[Rollout]
    rewards: torch.Tensor  # float32 [B]
    groups: torch.Tensor  # int64 [B]
    in_loss: torch.Tensor  # bool [B]
    loss_tokens: torch.Tensor  # int64 [B] response tokens in the loss
    scored: torch.Tensor  # bool [B, T] response tokens that are no mere context
    lengths: torch.Tensor  # int64 [B] response tokens without those of others; a given prefix counts
    sampler: Ragged  # log-probabilities of the sampler; NaN on given prefixes, tokens of others and where unknown
    caps: torch.Tensor  # float32 [B] truncation of the importance weights of stored answers; NaN for fresh ones
    # the next three are NaN where nothing is scored
    old: Ragged | None = None  # log-probabilities before the update; None: those of the current pass
    reference: Ragged | None = None  # log-probabilities of the reference model, with beta > 0
    values: Ragged | None = None  # what the critic predicted before the update
    advantages: Ragged | None = None  # from here on by set_advantages
    returns: Ragged | None = None  # what the critic should have predicted; NaN: nothing
    expected: torch.Tensor | None = (
        None  # float32 [B] chances that answers are judged against; NaN: against their group
    )
    score_prefix: bool = True  # whether given prefixes are in the loss

    @cached_property
    def critic_tokens(self) -> torch.Tensor:
        """int64 [B] response tokens in the loss that a critic learns from."""
        return self.loss_tokens if self.expected is None else self.loss_tokens * self.expected.isnan().cpu()

    def pack(self, samples: Sequence[int], *, share: bool = True) -> Packed:
        """These samples as a micro-batch."""
        return pack(self.rollouts, samples, share=share, score_prefix=self.score_prefix)


def make_batch(rollouts: Sequence[Rollout], config: AlgorithmConfig, device: torch.device) -> StepBatch:
    """Rewards and masks of a step's rollouts, in their order.

    Raises:
        ValueError: a rollout whose mask or log-probabilities are not one for each of its tokens.
    """
    for index, r in enumerate(rollouts):
        _check_lengths(index, r)
    in_loss = torch.tensor(
        [not (config.mask_truncated_completions and rollout.finish_reason == "length") for rollout in rollouts]
    )
    sampler = Ragged([len(rollout.response_ids) for rollout in rollouts], device)
    own = [[True] * len(r.response_ids) if r.response_mask is None else r.response_mask for r in rollouts]
    recorded = [
        value if mine else torch.nan
        for r, row in zip(rollouts, own)
        for value, mine in zip([torch.nan] * r.prefix_len + list(r.logprobs), row)
    ]
    sampler.flat = torch.tensor(recorded, dtype=torch.float32, device=device)
    flags = [scored_tokens(rollout, score_prefix=config.prefix_in_loss) for rollout in rollouts]
    mask = sampler.mask()
    scored = torch.tensor([flag for row in flags for flag in row], dtype=torch.bool, device=device)
    return StepBatch(
        rollouts=rollouts,
        score_prefix=config.prefix_in_loss,
        rewards=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32, device=device),
        groups=torch.tensor([rollout.group for rollout in rollouts], device=device),
        in_loss=in_loss.to(device),
        loss_tokens=torch.tensor([sum(row) for row in flags], dtype=torch.int64) * in_loss,
        scored=torch.zeros_like(mask).masked_scatter(mask, scored),
        lengths=torch.tensor([sum(row) for row in own], dtype=torch.int64, device=device),
        sampler=sampler,
        caps=torch.tensor(
            [torch.nan if r.importance_cap is None else r.importance_cap for r in rollouts], device=device
        ),
        expected=torch.tensor([torch.nan if r.expected is None else r.expected for r in rollouts], device=device),
    )


def _check_lengths(index: int, rollout: Rollout) -> None:
    tokens, mask = len(rollout.response_ids), rollout.response_mask
    if mask is not None and len(mask) != tokens:
        raise ValueError(
            f"rollouts[{index}].response_mask must have {tokens} entries like response_ids, got {len(mask)}"
        )
    if len(rollout.logprobs) != tokens - rollout.prefix_len:
        raise ValueError(
            f"rollouts[{index}].logprobs must have {tokens - rollout.prefix_len} entries, one for each token after "
            f"the prefix (any number for tokens of others), got {len(rollout.logprobs)}"
        )


def set_advantages(batch: StepBatch, config: AlgorithmConfig) -> dict[str, float]:
    """Advantages (and returns, for a critic) of the whole step, from what was recorded before the update -> metrics.

    The KL penalty goes where the reward is: per token for what looks at what comes after a token, as a sum per answer
    for what compares answers. Answers that are judged against a chance change nothing for others, and nothing for a
    critic: all of them are right.
    """
    mask = batch.scored
    in_loss = mask & batch.in_loss[:, None]
    penalty = torch.zeros(mask.shape, device=mask.device)
    metrics = {}
    if config.use_kl_in_reward and batch.old is not None and batch.reference is not None:
        kl = kl_estimate(batch.old.padded(), batch.reference.padded(), mask, config.kl_estimator)
        penalty = config.beta * kl
        metrics["kl"] = float(kl.sum() / mask.sum().clamp(min=1))
    values = None if batch.values is None else batch.values.padded()
    every = torch.arange(len(batch.rewards), device=mask.device)
    judged = every if batch.expected is None else every[batch.expected.isnan()]
    advantages = torch.zeros(mask.shape, device=mask.device)
    if batch.expected is not None:
        advantages += against_chance(batch.expected, deviations=config.in_deviations)[:, None]
    if len(judged) or not len(every):  # else all are judged against a chance
        step = StepRewards(
            batch.rewards[judged], batch.groups[judged], mask[judged], in_loss[judged], penalty[judged],
            None if values is None else values[judged],
        )  # fmt: skip
        own, returns = config.judge(step, config)
        advantages[judged] = own[:, None].expand(step.mask.shape) if own.ndim == 1 else own
        if step.values is not None and returns is not None:
            batch.returns = batch.sampler.like(torch.full_like(advantages, torch.nan).index_copy(0, judged, returns))
            metrics["explained_variance"] = explained_variance(step.values, returns, step.in_loss)
            for name, table in (("values", step.values), ("returns", returns)):
                metrics[f"{name}/mean"] = float(table[step.in_loss].mean()) if step.in_loss.any() else 0.0
    batch.advantages = batch.sampler.like(advantages)
    return metrics


# what Objective.loss counts, summed over the tokens in the loss unless it says otherwise
SUMS = ("tokens", "loss", "entropy", "kl", "ratio", "clip_low", "clip_high", "sampled", "logprob_diff", "correction",
        "value_loss", "value_clip")  # fmt: skip
MAXIMA = ("ratio_max", "logprob_diff_max")


class Objective:
    """The loss of a micro-batch as its share of the loss of the whole minibatch."""

    def __init__(self, config: AlgorithmConfig, max_completion_length: int):
        self.config = config
        self.weigh: Aggregation = LOSS_TYPES.resolve(config.loss_type)
        self.max_length = max_completion_length
        level, _, mode = config.importance_sampling.partition("_")
        self.correction = (level, mode) if mode else None

    def loss(
        self,
        packed: Packed,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        batch: StepBatch,
        minibatch: Sequence[int],
        values: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss (a scalar to call backward on) and metrics [len(SUMS) + len(MAXIMA)], detached.

        Args:
            logprobs, entropy: [B, L] from ``Policy.score``.
            minibatch: all samples of the optimizer step that this micro-batch is a part of.
            values: [B, L] from the critic, where there is one.
        """
        config = self.config
        assert batch.advantages is not None, "set_advantages comes first"
        rows = torch.tensor(packed.samples, device=logprobs.device)
        mask = packed.mask & batch.in_loss[rows, None]
        num_tokens = int(batch.loss_tokens[list(minibatch)].sum())
        weight = self.weigh(
            mask,
            num_tokens=num_tokens,
            num_sequences=len(minibatch),
            max_length=self.max_length,
            lengths=batch.lengths[rows],
        )
        old = logprobs.detach() if batch.old is None else batch.old.get(packed)
        sampler = batch.sampler.get(packed)
        sampled = mask & ~sampler.isnan()
        correction = torch.ones_like(old)
        if self.correction is not None:
            level, mode = self.correction
            cap = config.importance_sampling_cap
            correction = importance_weights(old, sampler, sampled, mode=mode, cap=cap, level=level)
        caps = batch.caps[rows, None]
        fresh = sampled & caps.isnan()
        stored = importance_weights(old, sampler, sampled, mode="truncate", cap=caps)
        correction = torch.where(caps.isnan(), correction, stored)
        out = policy_loss(
            logprobs,
            old,
            batch.advantages.get(packed),
            mask,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            delta=config.delta,
            weights=correction,
            level=config.importance_sampling_level,
        )
        per_token = out.loss
        kl = torch.zeros_like(logprobs)
        if batch.reference is not None and not config.use_kl_in_reward:
            kl = kl_estimate(logprobs, batch.reference.get(packed), mask, config.kl_estimator)
            per_token = per_token + config.beta * (kl * out.ratio if config.use_bias_correction_kl else kl)
        if config.entropy_coef:
            per_token = per_token - config.entropy_coef * torch.where(mask, entropy, 0.0)
        loss = (per_token * weight).sum()
        error, moved_far = torch.zeros_like(logprobs), torch.zeros_like(mask)
        if values is not None and batch.values is not None and batch.returns is not None:
            before, returns, clip = batch.values.get(packed), batch.returns.get(packed), config.cliprange_value
            due = mask & ~returns.isnan()
            error = value_loss(values, before, returns, due, clip=clip)
            loss = loss + config.vf_coef * error.sum() / max(int(batch.critic_tokens[list(minibatch)].sum()), 1)
            moved_far = due & ((values - before).abs() > (torch.inf if clip is None else clip))
        with torch.no_grad():
            difference = torch.where(fresh, (old - sampler).abs(), 0.0)
            entropy = torch.where(mask, entropy, 0.0)
            sums = (mask, loss, entropy, kl, out.ratio, out.clipped_low, out.clipped_high, fresh, difference,
                    correction * fresh, error, moved_far)  # fmt: skip
            maxima = (out.ratio, difference)
            metrics = [value.sum().float() for value in sums]
            metrics += [value.max() if value.numel() else value.sum() for value in maxima]
            return loss, torch.stack(metrics)


class MetricSums:
    """Adds up what :meth:`Objective.loss` counted, over all micro-batches of a step, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows: list[torch.Tensor] = []

    def add(self, metrics: torch.Tensor) -> None:
        self.rows.append(metrics)

    def means(self, optimizer_steps: int, ranks: RankGroup) -> dict[str, float]:
        """Metrics of the step: means over tokens, the loss as a mean over optimizer steps."""
        if not optimizer_steps:
            return {}
        # of a step with a single sample, other ranks have seen nothing
        table = torch.stack(self.rows) if self.rows else torch.zeros(1, len(SUMS) + len(MAXIMA), device=self.device)
        sums = dict(zip(SUMS, ranks.sum(table[:, : len(SUMS)].sum(0)).tolist()))
        maxima = dict(zip(MAXIMA, ranks.max(table[:, len(SUMS) :].amax(0)).tolist()))
        tokens, sampled = max(sums["tokens"], 1.0), max(sums["sampled"], 1.0)
        row = {
            "loss": sums["loss"] / optimizer_steps,
            "entropy": sums["entropy"] / tokens,
            "kl": sums["kl"] / tokens,
            "clip_ratio/low_mean": sums["clip_low"] / tokens,
            "clip_ratio/high_mean": sums["clip_high"] / tokens,
            "importance_ratio/mean": sums["ratio"] / tokens,
            "importance_ratio/max": maxima["ratio_max"],
            "sampling/logp_difference/mean": sums["logprob_diff"] / sampled,
            "sampling/logp_difference/max": maxima["logprob_diff_max"],
            "sampling/importance_sampling_ratio/mean": sums["correction"] / sampled,
        }
        if sums["value_loss"]:
            row |= {"value_loss": sums["value_loss"] / tokens, "clip_ratio/value": sums["value_clip"] / tokens}
        return row
