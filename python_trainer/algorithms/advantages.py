"""Advantages: rewards compared with a baseline."""

from dataclasses import dataclass

import torch

from python_trainer.algorithms.settings import AlgorithmConfig

STD_EPSILON = 1e-4  # added to the standard deviation of rewards


@dataclass(frozen=True)
class StepRewards:
    """The rewards of a step: B answers of at most T tokens."""

    rewards: torch.Tensor  # float32 [B]
    groups: torch.Tensor  # int64 [B], the group of every answer
    mask: torch.Tensor  # bool [B, T] response tokens that get an advantage
    in_loss: torch.Tensor  # bool [B, T] tokens of the mask that are in the loss
    penalty: torch.Tensor  # float32 [B, T] subtracted from the reward: beta x KL with use_kl_in_reward, else 0
    values: torch.Tensor | None = None  # float32 [B, T] predictions of the critic

    def answer_rewards(self) -> torch.Tensor:
        """Return the reward of each answer minus the penalties of its tokens, [B]."""
        return self.rewards - self.penalty.sum(1)

    def token_rewards(self) -> torch.Tensor:
        """Return the reward after each token minus its penalty, [B, T]; an answer's reward is on its last token."""
        is_last = self.mask & (self.mask.flip(1).cumsum(1).flip(1) == 1)
        return torch.where(is_last, self.rewards[:, None], 0.0) - torch.where(self.mask, self.penalty, 0.0)


Advantages = tuple[torch.Tensor, torch.Tensor | None]  # advantages [B] or [B, T], returns [B, T] or None


def group_advantages(step: StepRewards, settings: AlgorithmConfig) -> Advantages:
    """Compare answers with the mean of their group, and divide by a standard deviation.

    ``scale_rewards`` chooses that of the ``"group"`` (GRPO, arXiv 2402.03300) or of the ``"batch"``; ``"none"``
    divides by nothing (Dr. GRPO, arXiv 2503.20783). The advantage is 0 for every answer of a group whose rewards are
    all equal.
    """
    rewards = step.answer_rewards()
    _, mean, std = group_statistics(rewards, step.groups)
    if settings.scale_rewards == "none":
        return rewards - mean, None
    if settings.scale_rewards == "batch":
        std = rewards.std() if rewards.numel() > 1 else rewards.new_zeros(())
    return (rewards - mean) / (std + STD_EPSILON), None


def rloo_advantages(step: StepRewards, settings: AlgorithmConfig) -> Advantages:
    """Compare answers with the mean of the *others* of their group (RLOO, arXiv 2402.14740); 0 without others."""
    rewards = step.answer_rewards()
    size, mean, _ = group_statistics(rewards, step.groups)
    return torch.where(size > 1, (rewards - mean) * size / (size - 1).clamp(min=1), 0.0), None


def gae_advantages(step: StepRewards, settings: AlgorithmConfig) -> Advantages:
    """Compare tokens with the predictions of a critic: PPO."""
    assert step.values is not None
    advantages, returns = gae(step.token_rewards(), step.values, step.mask, gamma=settings.gamma, lam=settings.lam)
    return whiten(advantages, step, settings), returns


def reinforce_pp_advantages(step: StepRewards, settings: AlgorithmConfig) -> Advantages:
    """Compare the rewards after a token with the mean of the batch: REINFORCE++ (arXiv 2501.03262)."""
    rewards = step.token_rewards()
    advantages, _ = gae(rewards, torch.zeros_like(rewards), step.mask, gamma=settings.gamma, lam=1.0)
    return whiten(advantages, step, settings), None


def success_rate_advantages(p: torch.Tensor, *, deviations: bool) -> torch.Tensor:
    """Return advantages [B] of right answers to prompts whose success rate is ``p`` [B], 0 < p < 1.

    With ``deviations`` they are divided by the standard deviation of the reward, sqrt(p (1 - p)).
    """
    return ((1 - p) / p).sqrt() if deviations else 1 - p


def group_statistics(rewards: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute size, mean and standard deviation (n - 1) of the rewards [B] in the group of every sample, each [B].

    Groups are any numbers, in any order, int64 [B]. The deviation is exactly 0 for a group of one, and if all rewards
    of a group are equal.
    """
    _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)

    def reduce(values: torch.Tensor, operation: str) -> torch.Tensor:
        return values.new_zeros(len(sizes)).scatter_reduce_(0, index, values, operation, include_self=False)[index]

    size, mean = sizes[index], reduce(rewards, "mean")
    square = reduce((rewards - mean) ** 2, "sum")
    std = (square / (size - 1).clamp(min=1)).sqrt()
    # equal rewards can leave a rounding error in the mean, which a division by (almost) zero would blow up
    equal = reduce(rewards, "amin") == reduce(rewards, "amax")
    return size, torch.where(equal, rewards, mean), torch.where(equal, 0.0, std)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalised advantage estimates (arXiv 1506.02438) over the unmasked tokens of each row.

    Rewards [B, T] come after each token, values [B, T] predict the return before it. Masked tokens (padding on either
    side, tool output) are skipped. Returns (advantages, returns), both [B, T], 0 where masked. Rows end in a terminal
    state.
    """
    mask = mask.bool()
    advantages = torch.zeros_like(values)
    running = values.new_zeros(values.shape[0])
    next_value = torch.zeros_like(running)
    for t in reversed(range(values.shape[1])):
        unmasked = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # the TD error
        running = torch.where(unmasked, delta + gamma * lam * running, running)
        next_value = torch.where(unmasked, values[:, t], next_value)
        advantages[:, t] = torch.where(unmasked, running, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(advantages: torch.Tensor, step: StepRewards, settings: AlgorithmConfig) -> torch.Tensor:
    """Scale the advantages [B, T] in the loss to mean 0 and variance 1.

    Entries that are not in the loss become 0. With one entry, subtract the mean only. With ``scale_rewards: none``
    return the advantages unchanged.
    """
    if settings.scale_rewards == "none":
        return advantages
    in_loss = advantages[step.in_loss]
    variance, mean = torch.var_mean(in_loss) if in_loss.numel() > 1 else (in_loss.new_ones(()), in_loss.sum())
    return torch.where(step.in_loss, (advantages - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def overlong_penalties(lengths: torch.Tensor, *, max_length: int, cache: int) -> torch.Tensor:
    """Compute the (negative) reward [B] for lengths [B] in tokens (DAPO, arXiv 2503.14476, eq. 13).

    0 up to ``max_length - cache`` tokens, falling linearly to -1 at ``max_length``, -1 beyond.
    """
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0).float()


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Compute 1 - var(returns - values) / var(returns), over unmasked tokens.

    1 is a perfect critic, 0 no better than a constant. It is 0 if the returns do not vary.
    """
    mask = mask.bool()
    targets = returns[mask].double()
    if targets.numel() < 2 or not bool((targets != targets[0]).any()):
        return 0.0
    errors = targets - values[mask].double()
    return float(1 - errors.var() / targets.var())
