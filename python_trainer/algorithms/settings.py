"""Settings of advantages and loss."""

from typing import Literal

from pydantic import Field, model_validator

from python_trainer.settings import Section


class AlgorithmConfig(Section):
    """Advantages and loss."""

    advantage: Literal["group", "rloo", "gae", "reinforce++"] = "group"
    """`group`: reward minus the mean of the group (GRPO); `rloo`: of the others in the group; `gae`: PPO, with a
    critic; `reinforce++`: what comes after a token, whitened over the batch. The last two need no groups."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the `group` advantage is divided by: deviation of the group, of the whole batch, or nothing (Dr. GRPO)."""
    loss_type: Literal["grpo", "dapo", "dr_grpo", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "dapo"
    """How token losses are averaged: grpo is seq-mean-token-mean, dapo token-mean, dr_grpo sum / (B x max length)."""
    epsilon: float = Field(0.2, gt=0, lt=1)
    """Clip range of the probability ratio below 1, and above it unless epsilon_high is set."""
    epsilon_high: float | None = Field(None, gt=0)
    """Clip range above 1 (DAPO: 0.28)."""
    delta: float | None = Field(None, gt=1)
    """Upper bound of the ratio where the advantage is negative; above 1 + epsilon_high."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the starting policy; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    use_bias_correction_kl: bool = False
    """Weigh the KL in the loss by the probability ratio, which makes the gradient of k1 and k3 right too."""
    use_kl_in_reward: bool = False
    """Take beta x KL off the reward of each token, instead of adding it to the loss."""
    gamma: float = Field(1.0, ge=0, le=1)
    """gae, reinforce++: discount of a reward per token in between."""
    lam: float = Field(0.95, ge=0, le=1)
    """gae: 1 judges a token by what was earned after it, 0 by the value of the next token."""
    whiten_advantages: bool = True
    """gae, reinforce++: bring the advantages of a step to mean 0 and variance 1 over all its tokens."""
    vf_coef: float = Field(0.1, ge=0)
    """gae: weight of the value loss."""
    cliprange_value: float | None = Field(0.2, gt=0)
    """gae: how far a value may move in one step before its loss stops pulling; null for no limit."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each batch of answers."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps in one pass."""
    prefix_in_loss: bool = False
    """Of answers that continue a given prefix (`rpo`), train on the prefix too, as the paper does; costs time."""
    overlong_cache: int | None = Field(None, ge=1)
    """Answers in the last so many tokens before max_completion_length lose reward, more the longer (DAPO)."""
    overlong_penalty: float = Field(1.0, gt=0)
    """What an answer of max_completion_length tokens loses, with overlong_cache."""
    mask_truncated_completions: bool = False
    """Leave answers that hit max_completion_length out of the loss."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """What the clipped probability ratio belongs to: a token, or the whole answer (GSPO; epsilon is then ~1e-3)."""
    importance_sampling: Literal["none", "truncate", "mask"] = "none"
    """Correct for differences between sampler and trainer, per token: min(ratio, cap), or drop outside [1/cap, cap]."""
    importance_sampling_cap: float = Field(2.0, gt=1)
    """The cap of importance_sampling."""

    @model_validator(mode="after")
    def delta_beyond_clip(self) -> "AlgorithmConfig":
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ValueError(f"delta must be above 1 + epsilon_high = {1 + high:g}, got {self.delta:g}")
        return self
