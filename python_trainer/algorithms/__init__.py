"""Advantages, losses and KL estimates: pure functions on [batch, time], the only copy of the maths."""

from python_trainer.algorithms.advantages import (
    explained_variance,
    gae,
    group_advantages,
    group_statistics,
    has_spread,
    overlong_penalties,
    rloo_advantages,
    token_rewards,
    whiten,
)
from python_trainer.algorithms.kl import kl_estimate
from python_trainer.algorithms.losses import (
    AGGREGATIONS,
    LOSS_TYPES,
    PolicyLoss,
    importance_weights,
    policy_loss,
    token_weights,
    value_loss,
)

__all__ = [
    "AGGREGATIONS",
    "LOSS_TYPES",
    "PolicyLoss",
    "explained_variance",
    "gae",
    "group_advantages",
    "group_statistics",
    "has_spread",
    "importance_weights",
    "kl_estimate",
    "overlong_penalties",
    "policy_loss",
    "rloo_advantages",
    "token_rewards",
    "token_weights",
    "value_loss",
    "whiten",
]
