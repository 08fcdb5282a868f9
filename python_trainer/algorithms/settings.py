"""Settings of advantages and loss, and what can be chosen by name: a function and a line here each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from python_trainer.settings import Registry, Section, load

HOME = "python_trainer.algorithms"
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]  # TRL's names


@dataclass(frozen=True)
class Advantage:
    """How much better an answer, or what was done from a token on, was than was to be expected.

    Called with :class:`~python_trainer.algorithms.advantages.StepRewards` and the settings of the algorithm; returns
    the advantages, [B] of answers or [B, T] of tokens, and what a critic should have predicted, [B, T] or None.
    """

    function: str | Callable[[Any, "AlgorithmConfig"], tuple[Any, Any]]  # itself, or module:function where it lies
    compares: bool = False  # the answers of a group: there must be two at least
    critic: bool = False  # needs the values of one

    def __call__(self, step: Any, settings: "AlgorithmConfig") -> tuple[Any, Any]:
        function = load(self.function) if isinstance(self.function, str) else self.function
        return function(step, settings)


ADVANTAGES: Registry[Advantage] = Registry(
    "advantage",
    {
        "group": Advantage(f"{HOME}.advantages:against_group", compares=True),
        "rloo": Advantage(f"{HOME}.advantages:against_others", compares=True),
        "gae": Advantage(f"{HOME}.advantages:against_critic", critic=True),
        "reinforce++": Advantage(f"{HOME}.advantages:against_batch"),
    },
    of=Advantage,
)
# TRL's names, then verl's: each a losses.Aggregation
LOSS_TYPES: Registry[Callable[..., Any]] = Registry(
    "loss_type",
    {
        "grpo": f"{HOME}.losses:sequence_token_mean",
        "dapo": f"{HOME}.losses:token_mean",
        "dr_grpo": f"{HOME}.losses:constant",
        "token-mean": f"{HOME}.losses:token_mean",
        "seq-mean-token-sum": f"{HOME}.losses:sequence_token_sum",
        "seq-mean-token-mean": f"{HOME}.losses:sequence_token_mean",
    },
)
# f(logprobs, ratio, advantages, settings) -> loss of every token, all [B, T]; logprobs and ratio (pi / pi_old, at the
# level of importance_sampling_level) are differentiable. Where masked they are 0, 1 and 0, and the result is ignored.
POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    "policy_loss", {kind: f"{HOME}.losses:{kind}" for kind in ("clip", "cispo")}
)
KL_ESTIMATORS: Registry[Callable[..., Any]] = Registry(
    "kl_estimator", {kind: f"{HOME}.losses:{kind}" for kind in ("k1", "k2", "k3")}
)


class AlgorithmConfig(Section):
    """Advantages and loss."""

    advantage: Annotated[str, ADVANTAGES] = "group"
    """`group`: reward minus the mean of the group (GRPO); `rloo`: of the others in the group; `gae`: PPO, with a
    critic; `reinforce++`: what comes after a token, whitened over the batch. The last two need no groups."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the `group` advantage is divided by: deviation of the group, of the whole batch, or nothing (Dr. GRPO).
    gae and reinforce++: whiten the advantages over all tokens of a step, unless it is none."""
    policy_loss: Annotated[str, POLICY_LOSSES] = "clip"
    """Loss of a token from its probability ratio and advantage: `clip` (PPO, GRPO; with delta and
    importance_sampling_level the dual clip and GSPO), or `cispo`."""
    loss_type: Annotated[str, LOSS_TYPES] = "dapo"
    """How token losses are averaged: grpo is seq-mean-token-mean, dapo token-mean, dr_grpo sum / (B x max length)."""
    epsilon: float = Field(0.2, gt=0, lt=1)
    """Clip range of the probability ratio below 1, and above it unless epsilon_high is set."""
    epsilon_high: float | None = Field(None, gt=0)
    """Clip range above 1 (DAPO: 0.28; cispo: TRL's 5 is 4 here, as the bound is 1 + epsilon_high)."""
    delta: float | None = Field(None, gt=1)
    """clip: upper bound of the ratio where the advantage is negative; above 1 + epsilon_high (dual clip)."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the starting policy; 0 loads no reference model."""
    kl_estimator: Annotated[str, KL_ESTIMATORS] = "k3"
    """Estimator of that KL."""
    use_bias_correction_kl: bool = False
    """Weigh the KL in the loss by the probability ratio, which makes the gradient of k1 and k3 right too."""
    use_kl_in_reward: bool = False
    """Take beta x KL off the reward of each token, instead of adding it to the loss."""
    gamma: float = Field(1.0, ge=0, le=1)
    """gae, reinforce++: discount of a reward per token in between."""
    lam: float = Field(0.95, ge=0, le=1)
    """gae: 1 judges a token by what was earned after it, 0 by the value of the next token."""
    vf_coef: float = Field(0.1, ge=0)
    """gae: weight of the value loss."""
    cliprange_value: float | None = Field(0.2, gt=0)
    """gae: how far a value may move in one step before its loss stops pulling; null for no limit."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus, a mean over tokens whatever loss_type is."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each batch of answers."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps in one pass."""
    overlong_cache: int | None = Field(None, ge=1)
    """Answers in the last so many tokens before max_completion_length lose reward, up to 1 (DAPO)."""
    mask_truncated_completions: bool = False
    """Leave answers that hit max_completion_length out of the loss."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """What the probability ratio belongs to: a token, or the whole answer (GSPO; epsilon is then ~1e-3)."""
    importance_sampling: Correction | Literal["auto", "none"] = "auto"
    """Correct for differences between sampler and trainer, by the ratio of a token or of the whole answer: `truncate`
    it to the cap, or `mask` (drop) what is above it. auto: token_truncate with engine vllm, else none."""
    importance_sampling_cap: float = Field(2.0, gt=1)
    """The cap of importance_sampling."""

    def with_sampler(self, engine: str) -> "AlgorithmConfig":
        """Returns settings with ``auto`` replaced: the trainer's own engine needs no correction."""
        if self.importance_sampling != "auto":
            return self
        return self.model_copy(update={"importance_sampling": "token_truncate" if engine == "vllm" else "none"})

    @property
    def judge(self) -> Advantage:
        return ADVANTAGES.resolve(self.advantage)

    @property
    def correction(self) -> tuple[str, str] | None:
        """Returns (level, mode) of ``importance_sampling``; None without a correction, and while it is ``auto``."""
        level, _, mode = self.importance_sampling.partition("_")
        return (level, mode) if mode else None

    @property
    def in_deviations(self) -> bool:
        """Returns whether advantages are in standard deviations of the rewards."""
        return self.advantage in ("group", "gae", "reinforce++") and self.scale_rewards != "none"

    @property
    def clip_range(self) -> tuple[float, float]:
        """Returns the lowest and highest probability ratio that is not clipped."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @model_validator(mode="after")
    def delta_beyond_clip(self) -> "AlgorithmConfig":
        high = self.clip_range[1]
        if self.delta is not None and self.delta <= high:
            raise ValueError(f"delta must be above 1 + epsilon_high = {high:g}, got {self.delta:g}")
        return self
