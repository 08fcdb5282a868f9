"""Settings of advantages and loss, and what can be chosen by name: a function and a line here each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from python_trainer.settings import Registry, Section, imported

HOME = "python_trainer.algorithms"
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]  # TRL's names


@dataclass(frozen=True)
class Advantage:
    """An estimator of how much better an answer, or the rest of it from a token on, was than expected.

    Called with :class:`~python_trainer.algorithms.advantages.StepRewards` and the settings of the algorithm; returns
    the advantages, [B] of answers or [B, T] of tokens, and the targets of a critic, [B, T] or None.
    """

    function: str | Callable[[Any, "AlgorithmConfig"], tuple[Any, Any]]  # the function, or its module:function
    needs_group: bool = False  # compares the answers of a group: there must be at least two
    scales: bool = False  # divides by a standard deviation, unless scale_rewards is none
    critic: bool = False  # needs the values of a critic

    def __call__(self, step: Any, settings: "AlgorithmConfig") -> tuple[Any, Any]:
        return imported(self.function)(step, settings)


ADVANTAGES: Registry[Advantage] = Registry(
    "advantage",
    {
        "group": Advantage(f"{HOME}.advantages:group_advantages", needs_group=True, scales=True),
        "rloo": Advantage(f"{HOME}.advantages:rloo_advantages", needs_group=True),
        "gae": Advantage(f"{HOME}.advantages:gae_advantages", critic=True, scales=True),
        "reinforce++": Advantage(f"{HOME}.advantages:reinforce_pp_advantages", scales=True),
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
    """`group`: reward minus the mean of the group (GRPO). `rloo`: minus the mean of the others in the group. `gae`: PPO
    with a critic. `reinforce++`: return of a token, whitened over the batch. The last two need no groups."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide the `group` advantage by the standard deviation of the group or the batch, or by nothing (Dr. GRPO). gae
    and reinforce++ whiten their advantages over all tokens of a step unless this is none."""
    policy_loss: Annotated[str, POLICY_LOSSES] = "clip"
    """Loss of a token from its probability ratio and advantage: `clip` (PPO and GRPO; dual clip with delta, GSPO with
    importance_sampling_level) or `cispo`."""
    loss_type: Annotated[str, LOSS_TYPES] = "dapo"
    """Average of token losses: grpo is seq-mean-token-mean, dapo token-mean, dr_grpo sum / (answers x length limit)."""
    epsilon: float = Field(0.2, gt=0, lt=1)
    """The probability ratio is clipped below 1 - epsilon, and above 1 + epsilon unless epsilon_high is set."""
    epsilon_high: float | None = Field(None, gt=0)
    """The ratio is clipped above 1 + epsilon_high (DAPO: 0.28), with cispo too, so TRL's 5 is 4 here."""
    delta: float | None = Field(None, gt=1)
    """clip: upper bound of the ratio for negative advantages (dual clip); above 1 + epsilon_high."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL to the starting policy; 0: no reference model."""
    kl_estimator: Annotated[str, KL_ESTIMATORS] = "k3"
    """Estimator of that KL."""
    use_bias_correction_kl: bool = False
    """Weigh the KL in the loss by the probability ratio. The gradient of k1 and k3 is then unbiased too."""
    use_kl_in_reward: bool = False
    """Subtract beta x KL from the reward of each token instead of adding it to the loss."""
    gamma: float = Field(1.0, ge=0, le=1)
    """gae, reinforce++: discount factor per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """gae: lambda. 1: the advantage uses the return after the token; 0: the critic's value of the next token."""
    vf_coef: float = Field(0.1, ge=0)
    """gae: weight of the value loss."""
    cliprange_value: float | None = Field(0.2, gt=0)
    """gae: clip range of the change of a value in one step; null: no clipping."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the mean over tokens, under every loss_type."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each batch of answers."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps in one pass."""
    overlong_cache: int | None = Field(None, ge=1)
    """DAPO's soft overlong penalty: reward falls linearly, by up to 1, over this many last tokens of the limit."""
    mask_truncated_completions: bool = False
    """Leave answers that reach max_completion_length out of the loss."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Probability ratio per token, or per whole answer (GSPO; use an epsilon near 1e-3)."""
    importance_sampling: Correction | Literal["auto", "none"] = "auto"
    """Correct differences between sampler and trainer by the probability ratio of a token or of the whole answer.
    `truncate` limits it to the cap; `mask` drops what is above it. auto: token_truncate with vllm, else none."""
    importance_sampling_cap: float = Field(2.0, gt=1)
    """The cap of importance_sampling."""

    def with_sampler(self, engine: str) -> "AlgorithmConfig":
        """Return settings with ``auto`` replaced: the trainer's own engine needs no correction."""
        if self.importance_sampling != "auto":
            return self
        return self.model_copy(update={"importance_sampling": "token_truncate" if engine == "vllm" else "none"})

    @property
    def advantage_fn(self) -> Advantage:
        """Return the estimator that ``advantage`` names."""
        return ADVANTAGES.resolve(self.advantage)

    @property
    def correction(self) -> tuple[str, str] | None:
        """Return (level, mode) of ``importance_sampling``; None without a correction, and while it is ``auto``."""
        level, _, mode = self.importance_sampling.partition("_")
        return (level, mode) if mode else None

    @property
    def in_deviations(self) -> bool:
        """Return whether advantages are in standard deviations of the rewards."""
        return self.advantage_fn.scales and self.scale_rewards != "none"

    @property
    def clip_bounds(self) -> tuple[str, ...]:
        """Return the bounds that ``policy_loss`` puts on the ratio, low or high; none are known of a user's loss."""
        return {"clip": ("low", "high"), "cispo": ("high",)}.get(self.policy_loss, ())

    @property
    def clip_range(self) -> tuple[float, float]:
        """Return the lowest and highest probability ratio that is not clipped."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @model_validator(mode="after")
    def delta_beyond_clip(self) -> "AlgorithmConfig":
        high = self.clip_range[1]
        if self.delta is not None and self.delta <= high:
            raise ValueError(
                f"delta must be above {high:g}, which is 1 + epsilon_high, or 1 + epsilon while that is null, got "
                f"{self.delta:g}"
            )
        return self
