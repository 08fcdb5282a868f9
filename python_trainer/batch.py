"""The batch of one step: rewards, masks and advantages of its rollouts, and the loss of each minibatch."""

from collections.abc import Iterator, Sequence

import torch

from python_trainer.algorithms.advantages import StepRewards, against_chance, explained_variance
from python_trainer.algorithms.losses import Aggregation, importance_weights, kl_estimate, policy_loss, value_loss
from python_trainer.algorithms.settings import LOSS_TYPES, AlgorithmConfig
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.model.packing import Packed, pack, scored_tokens

# metric -> the tokens that it is a mean, or the maximum, over; Minibatch.loss sums metrics and counts tokens
MEANS = {
    "clip_ratio/low_mean": "all", "clip_ratio/high_mean": "all",  # tokens without a gradient are never clipped
    "importance_ratio/mean": "passed", "kl": "compared", "value_loss": "valued", "clip_ratio/value": "valued",
    "sampling/logp_difference/mean": "sampled", "sampling/importance_sampling_ratio/mean": "corrected",
}  # fmt: skip
MAXIMA = {"importance_ratio/max": "passed", "sampling/logp_difference/max": "sampled"}
COUNTS = ("passed", "compared", "valued", "sampled", "corrected")
SUMS = ("loss", *COUNTS, *MEANS)


def take(table: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Returns the entries [B, L] of a micro-batch in a table of all samples, 0 where masked."""
    rows = table[torch.tensor(packed.samples, device=table.device), : packed.mask.shape[1]]
    return torch.where(packed.mask, rows, 0.0)


def put(table: torch.Tensor, packed: Packed, values: torch.Tensor) -> None:
    """Stores the values [B, L] of a micro-batch in a table of all samples."""
    place = torch.tensor(packed.samples, device=table.device), slice(packed.mask.shape[1])
    table[place] = torch.where(packed.mask, values, table[place])


class Batch:
    """Everything that the update of one step needs, for B samples of up to T response tokens.

    Args:
        rollouts: scored; their order is that of the samples.
        longest: most tokens that an answer may have.
        prefix_in_loss: train on given prefixes too.

    Attributes:
        rewards: float32 [B].
        groups: int64 [B].
        expected: float32 [B], chances that stored answers are judged against; NaN: judged against the group.
        caps: float32 [B], truncation of the importance weights of stored answers; NaN: a fresh answer.
        in_loss: bool [B].
        loss_tokens: int64 [B] on the CPU, response tokens in the loss.
        critic_tokens: int64 [B] on the CPU, those of them that a critic learns from: none of a stored answer.
        lengths: int64 [B], response tokens without those of others; a given prefix counts.
        present: bool [B, T], response tokens.
        scored: bool [B, T], those of them that are more than context.
        sampler: [B, T] log-probabilities of the sampler; NaN on given prefixes and where unknown. Those of tokens of
            others may be anything.
        old: [B, T] log-probabilities before the update, NaN where not scored; None: those of the current pass.
        reference: the same of the reference model, with beta > 0.
        values: the same of the critic.
        advantages: [B, T], set by :meth:`set_advantages`.
        returns: [B, T] targets of the critic, set by :meth:`set_advantages`; NaN: none.
    """

    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        config: AlgorithmConfig,
        longest: int,
        device: torch.device,
        *,
        prefix_in_loss: bool = False,
    ):
        for rollout in rollouts:
            answer, mask = len(rollout.response_ids), rollout.response_mask
            assert mask is None or len(mask) == answer, "a response mask has an entry for each token of the response"
            assert len(rollout.logprobs) == answer - rollout.prefix_len, "each token after the prefix has a logprob"
        self.rollouts, self.config, self.longest, self.device = rollouts, config, longest, device
        self.prefix_in_loss = prefix_in_loss
        self.weigh: Aggregation = LOSS_TYPES.resolve(config.loss_type)
        self.rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float32, device=device)
        self.groups = torch.tensor([r.group for r in rollouts], device=device)
        self.expected = torch.tensor([torch.nan if r.expected is None else r.expected for r in rollouts], device=device)
        caps = [torch.nan if r.importance_cap is None else r.importance_cap for r in rollouts]
        self.caps = torch.tensor(caps, device=device)
        ended = torch.tensor([r.finish_reason != "length" for r in rollouts], dtype=torch.bool)
        in_loss = ended if config.mask_truncated_completions else torch.ones_like(ended)
        self.in_loss = in_loss.to(device)
        flags = [scored_tokens(r, score_prefix=prefix_in_loss) for r in rollouts]
        self.loss_tokens = torch.tensor([sum(row) for row in flags], dtype=torch.int64) * in_loss
        self.critic_tokens = self.loss_tokens * self.caps.isnan().cpu()
        lengths = [sum(scored_tokens(r, score_prefix=True)) for r in rollouts]
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
        recorded = [x for r in rollouts for x in [torch.nan] * r.prefix_len + list(r.logprobs)]
        tokens = torch.tensor([len(r.response_ids) for r in rollouts], device=device)
        self.present = torch.arange(max(tokens.tolist(), default=0), device=device) < tokens[:, None]
        scored = torch.tensor([flag for row in flags for flag in row], dtype=torch.bool, device=device)
        self.scored = torch.zeros_like(self.present).masked_scatter(self.present, scored)
        known = torch.tensor(recorded, dtype=torch.float32, device=device)
        self.sampler = self.record().masked_scatter(self.present, known)

    def record(self) -> torch.Tensor:
        """Returns room for a number per response token, float32 [B, T], NaN so far."""
        return torch.full(self.present.shape, torch.nan, device=self.device)

    def pack(self, samples: Sequence[int]) -> Packed:
        """Returns these samples as a micro-batch; see :func:`python_trainer.model.packing.pack`."""
        return pack(self.rollouts, samples, score_prefix=self.prefix_in_loss, device=self.device)

    def set_advantages(self) -> dict[str, float]:
        """Computes advantages, and returns for a critic, from what was recorded before the update -> metrics.

        The KL penalty is per token for advantages of tokens, and a sum per answer for those that compare answers.
        Answers that are judged against a chance change nothing for others. A critic learns from fresh answers alone:
        stored ones are right, and would teach it that every answer is.
        """
        config, mask = self.config, self.scored
        in_loss = mask & self.in_loss[:, None]
        penalty = torch.zeros(mask.shape, device=mask.device)
        metrics = {}
        if config.use_kl_in_reward and self.old is not None and self.reference is not None:
            kl = kl_estimate(self.old, self.reference, mask, config.kl_estimator)
            penalty = config.beta * kl
            metrics["kl"] = float(kl.sum() / mask.sum().clamp(min=1))
        advantages = torch.zeros(mask.shape, device=mask.device)
        advantages += against_chance(self.expected, deviations=config.in_deviations)[:, None]
        judged = torch.arange(len(self.rewards), device=mask.device)[self.expected.isnan()]  # against their group
        if len(judged) or not self.rollouts:
            step = StepRewards(
                self.rewards[judged], self.groups[judged], mask[judged], in_loss[judged], penalty[judged],
                None if self.values is None else self.values[judged],
            )  # fmt: skip
            own, returns = config.judge(step, config)
            advantages[judged] = own[:, None].expand(step.mask.shape) if own.ndim == 1 else own
            if step.values is not None and returns is not None:
                fresh = self.caps[judged].isnan()[:, None]
                self.returns = self.record().index_copy(0, judged, torch.where(fresh, returns, torch.nan))
                learned = step.in_loss & fresh
                if learned.any():
                    metrics["explained_variance"] = explained_variance(step.values, returns, learned)
                    metrics |= {
                        "values/mean": float(step.values[learned].mean()),
                        "returns/mean": float(returns[learned].mean()),
                    }
        self.advantages = torch.where(self.present, advantages, 0.0)
        return metrics

    def split(self) -> list[list[int]]:
        """Splits the samples into ``num_minibatches`` parts.

        The samples of a group stay side by side, and groups of similar length too.
        """
        groups: dict[int, list[int]] = {}
        for index, rollout in enumerate(self.rollouts):
            groups.setdefault(rollout.group, []).append(index)

        def longest(group: list[int]) -> int:
            return max(len(self.rollouts[index].response_ids) for index in group)

        parts, members = self.config.num_minibatches, list(groups.values())
        split = [sorted(members[part::parts], key=longest) for part in range(parts)]
        return [[index for group in part for index in group] for part in split if part]

    def minibatches(self, trained: Sequence[bool]) -> Iterator["Minibatch"]:
        """Yields the minibatches of one pass over the batch, without those of which nothing is in the loss.

        Args:
            trained: of each sample, whether it has a gradient.
        """
        for part in self.split():
            if self.loss_tokens[part].any():  # else every answer was truncated and is masked
                yield Minibatch(self, part, [index for index in part if trained[index]])


class Minibatch:
    """The samples of one optimizer step.

    Args:
        indices: of all its samples, within the batch.
        trained: those of them that have a gradient; None: all.

    Attributes:
        samples: those that are passed: one at least, so that there is a gradient, even if it is 0.
    """

    def __init__(self, batch: Batch, indices: Sequence[int], trained: Sequence[int] | None = None):
        self.batch, self.indices = batch, list(indices)
        self.trained = self.indices if trained is None else list(trained)
        self.samples = self.trained or self.indices[:1]
        self.num_tokens = int(batch.loss_tokens[self.indices].sum())
        self.critic_tokens = max(int(batch.critic_tokens[self.indices].sum()), 1)

    def loss(
        self, packed: Packed, logprobs: torch.Tensor, entropy: torch.Tensor, values: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss of a micro-batch, as its share of the minibatch's loss, and what was counted on the way.

        Args:
            logprobs, entropy: [B, L] from ``Policy.score``.
            values: [B, L] from the critic, if there is one.

        Returns:
            A scalar to call backward on, and numbers for :func:`mean_metrics` [len(SUMS) + len(MAXIMA)], detached.
        """
        batch, config = self.batch, self.batch.config
        assert batch.advantages is not None, "set_advantages comes first"
        rows = torch.tensor(packed.samples, device=logprobs.device)
        mask = packed.mask & batch.in_loss[rows, None]
        weight = batch.weigh(
            mask,
            num_tokens=self.num_tokens,
            num_sequences=len(self.indices),
            max_length=batch.longest,
            lengths=batch.lengths[rows],
        )
        old = logprobs.detach() if batch.old is None else take(batch.old, packed)
        sampler = take(batch.sampler, packed)
        sampled = mask & ~sampler.isnan()
        correction = torch.ones_like(old)
        if config.correction is not None:
            level, mode = config.correction
            cap = config.importance_sampling_cap
            correction = importance_weights(old, sampler, sampled, mode=mode, cap=cap, level=level)
        caps = batch.caps[rows, None]
        fresh = sampled & caps.isnan()
        stored = importance_weights(old, sampler, sampled, mode="truncate", cap=caps)
        correction = torch.where(caps.isnan(), correction, stored)
        out = policy_loss(logprobs, old, take(batch.advantages, packed), mask, config, weights=correction)
        per_token = out.loss
        kl, none = torch.zeros_like(logprobs), torch.zeros_like(mask)
        compared = mask if batch.reference is not None and not config.use_kl_in_reward else none
        if batch.reference is not None and not config.use_kl_in_reward:
            kl = kl_estimate(logprobs, take(batch.reference, packed), mask, config.kl_estimator)
            per_token = per_token + config.beta * (kl * out.ratio if config.use_bias_correction_kl else kl)
        loss = (per_token * weight).sum()
        if config.entropy_coef:  # a mean over tokens, whatever weight loss_type gives to a token
            loss = loss - config.entropy_coef * torch.where(mask, entropy, 0.0).sum() / max(self.num_tokens, 1)
        error, due, moved_far = torch.zeros_like(logprobs), none, none
        if values is not None and batch.values is not None and batch.returns is not None:
            before, returns, clip = take(batch.values, packed), take(batch.returns, packed), config.cliprange_value
            due = mask & ~returns.isnan()
            error = value_loss(values, before, returns, due, clip=clip)
            loss = loss + config.vf_coef * error.sum() / self.critic_tokens
            moved_far = due & ((values - before).abs() > (torch.inf if clip is None else clip))
        with torch.no_grad():
            difference = torch.where(fresh, (old - sampler).abs(), 0.0)
            sums = {
                "loss": loss, "passed": mask, "compared": compared, "valued": due, "sampled": fresh,
                "corrected": none if config.correction is None else fresh,
                "clip_ratio/low_mean": out.clipped_low, "clip_ratio/high_mean": out.clipped_high,
                "importance_ratio/mean": out.ratio, "kl": kl, "value_loss": error, "clip_ratio/value": moved_far,
                "sampling/logp_difference/mean": difference,
                "sampling/importance_sampling_ratio/mean": correction * fresh,
            }  # fmt: skip
            maxima = (out.ratio, difference)
            numbers = [sums[name].sum().float() for name in SUMS]
            numbers += [value.max() if value.numel() else value.sum() for value in maxima]
            return loss, torch.stack(numbers)


def mean_metrics(
    counted: list[torch.Tensor], optimizer_steps: Sequence[Minibatch], device: torch.device, ranks: RankGroup
) -> dict[str, float]:
    """Returns the metrics of a step from what :meth:`Minibatch.loss` counted in each micro-batch.

    The loss is a mean over optimizer steps, the others are means over tokens or maxima; what has no tokens is missing.
    """
    # of a step with a single sample, other ranks have seen nothing
    table = torch.stack(counted) if counted else torch.zeros(1, len(SUMS) + len(MAXIMA), device=device)
    sums = dict(zip(SUMS, ranks.sum(table[:, : len(SUMS)].sum(0)).tolist()))
    largest = [max(values) for values in zip(*ranks.gather(table[:, len(SUMS) :].amax(0).tolist()))]
    tokens = sums | {"all": sum(minibatch.num_tokens for minibatch in optimizer_steps)}
    row = {"loss": sums["loss"] / len(optimizer_steps)}
    row |= {name: sums[name] / tokens[kind] for name, kind in MEANS.items() if tokens[kind]}
    return row | {name: value for (name, kind), value in zip(MAXIMA.items(), largest) if tokens[kind]}
