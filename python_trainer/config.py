"""Settings of a run: a YAML file, checked, with overrides from the command line.

Option names are TRL's wherever TRL has the option. ``python -m python_trainer train --help-settings`` prints all.
"""

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from python_trainer.accelerators import ACCELERATORS, AcceleratorsConfig
from python_trainer.errors import UserError
from python_trainer.lora import LoraSettings
from python_trainer.settings import Section
from python_trainer.tasks import TaskConfig


class ModelConfig(Section):
    """The policy."""

    path: str = "main"
    """Folder of a causal language model in Hugging Face format, or `main` / `small`: the shipped base policies."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in memory. bfloat16 keeps float32 master weights in the optimizer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU when there is one."""
    matmul_precision: Literal["highest", "medium"] = "highest"
    """medium lets float32 matrix products round their inputs: bfloat16 on a CPU, TensorFloat-32 on a GPU. Faster."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora: LoraSettings | None = None
    """Train low-rank adapters (PEFT) and nothing else: {r: 16, alpha: 32, target_modules: all-linear}, for example.
    Generation and the exported model have them merged into the weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""


class RolloutConfig(Section):
    """How answers are generated."""

    engine: Literal["paged", "vllm"] = "paged"
    """`paged`: the trainer's own engine; `vllm`: vLLM 0.32 or newer, on the device of the model or on a server."""
    vllm_server: str | None = Field(None, pattern=r"^https?://[^/]+(/.*)?$")
    """URL of a server for engine vllm, started as docs/vllm.md says; it reads weights from OUTPUT_DIR."""
    prompts_per_step: int = Field(32, ge=1)
    """Prompts in one training step."""
    num_generations: int = Field(8, ge=1)
    """Answers sampled for each prompt: the group."""
    max_completion_length: int = Field(256, ge=1)
    """Most tokens of an answer, end token included."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of sampling; log-probabilities in the loss use the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = Field(0, ge=0)
    """Sample from this many most likely tokens; 0 for all."""
    dynamic_sampling: bool = False
    """Drop prompts whose answers are all right or all wrong, and draw others until the step is full (DAPO)."""
    max_sampling_rounds: int = Field(4, ge=1)
    """Rounds of dynamic_sampling; if the step is not full then, dropped prompts fill it up."""
    stop: list[str] = Field([])
    """Strings that end an answer, next to the model's end-of-sequence tokens."""
    workers: int = Field(1, ge=1)
    """Processes that generate; above 1 on a CPU only. `memory_bytes` is for each. Answers stay the same."""
    schedule: Literal["fifo", "history"] = "fifo"
    """history: predict lengths from earlier answers, begin with the longest, balance workers and move work between
    them. Answers stay the same."""
    memory_bytes: int | None = Field(None, ge=1)
    """Size of the KV cache; null chooses by model and device."""
    block_size: int = Field(16, ge=1)
    """Tokens in a block of the KV cache."""


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


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to 0 at max_steps."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises linearly from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the gradient's mean."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the gradient's square."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the gradient's square."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients longer than this are scaled down to it."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Tokens in one forward and backward pass. Changes memory and speed, not the loss."""
    share_prefixes: bool = True
    """Compute the prompt and prefix of a group once, not once per answer. Changes memory and speed, not the loss."""


class CriticConfig(Section):
    """The value function of PPO, with algorithm.advantage gae."""

    separate: bool = False
    """A model of its own, begun as a copy of the policy, instead of one more output of the policy."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate of that model or output; schedule and the rest are the optimizer's."""


class EvaluationConfig(Section):
    """Accuracy on the test set, sampled at temperature 1 with the same noise every time."""

    eval_steps: int = Field(0, ge=0)
    """Evaluate every so many steps; 0: only before the first and after the last step."""
    eval_limit: int | None = Field(None, ge=1)
    """Test prompts in evaluations at the start and at the end; null for all."""
    eval_limit_during: int | None = Field(512, ge=1)
    """Test prompts in evaluations in between."""
    target_accuracy: float | None = Field(None, gt=0, le=1)
    """Note when an evaluation reaches this accuracy: seconds_to_target, tokens_to_target."""
    stop_at_target: bool = False
    """End the run there; needs target_accuracy and eval_steps."""

    @model_validator(mode="after")
    def target_is_looked_for(self) -> "EvaluationConfig":
        if self.stop_at_target and self.target_accuracy is None:
            raise ValueError("stop_at_target needs target_accuracy, got null")
        if self.stop_at_target and not self.eval_steps:
            raise ValueError("stop_at_target needs eval_steps above 0, got 0")
        return self


class SaveConfig(Section):
    """Checkpoints and the final model."""

    save_steps: int = Field(50, ge=0)
    """Write a checkpoint every so many steps; 0 for none in between."""
    save_total_limit: int = Field(2, ge=1)
    """Checkpoints to keep."""
    save_model: bool = True
    """Write the trained policy to OUTPUT_DIR/model in Hugging Face format at the end."""


class Config(Section):
    """Everything that decides a run."""

    seed: int = Field(0, ge=0)
    """Decides order of prompts and all sampling noise."""
    max_steps: int = Field(100, ge=1)
    """Training steps."""
    parallel: Literal["none", "ddp", "fsdp2"] = "none"
    """How the processes that torchrun started share a run. `ddp`: each has all weights and trains on a part of the
    answers; `fsdp2`: weights, gradients and moments are sharded too."""
    max_seconds: float | None = Field(None, gt=0)
    """Stop after the step in which this much wall time, evaluations not counted, has passed."""
    task: TaskConfig = TaskConfig()
    """Prompts and rewards."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    critic: CriticConfig = CriticConfig()
    """The value function of PPO."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Accuracy on the test set."""
    save: SaveConfig = SaveConfig()
    """Checkpoints."""
    accelerators: AcceleratorsConfig = AcceleratorsConfig()
    """What makes training cheaper."""

    @model_validator(mode="after")
    def groups_are_comparable(self) -> "Config":
        kind = self.algorithm.advantage
        if kind in ("group", "rloo") and self.rollout.num_generations < 2:
            raise ValueError(
                f"rollout.num_generations must be >= 2 with algorithm.advantage {kind}: an answer is judged against "
                f"others of its group, got {self.rollout.num_generations}"
            )
        if self.rollout.dynamic_sampling and self.rollout.num_generations < 2:
            raise ValueError(
                "rollout.dynamic_sampling needs rollout.num_generations >= 2: one answer has no spread, got "
                f"{self.rollout.num_generations}"
            )
        if self.rollout.vllm_server is not None and self.rollout.engine != "vllm":
            raise ValueError(f"rollout.vllm_server needs rollout.engine vllm, got {self.rollout.engine}")
        if self.rollout.engine == "vllm" and self.rollout.workers > 1:
            raise ValueError(f"rollout.workers must be 1 with rollout.engine vllm, got {self.rollout.workers}")
        if self.rollout.engine == "vllm" and "drafts" in self.accelerators.enabled:
            raise ValueError(
                "the accelerator drafts needs rollout.engine paged, got vllm; vLLM itself drafts from a history by "
                "rlkernels.integrations.vllm.HistoryProposer (docs/vllm.md)"
            )
        if self.model.lora is not None and "alpha" in self.accelerators.enabled:
            raise ValueError(
                "accelerators.enabled: alpha follows whole weight matrices, model.lora must be null, got "
                f"{self.model.lora.model_dump()}"
            )
        cache, longest = self.algorithm.overlong_cache, self.rollout.max_completion_length
        if cache is not None and cache > longest:
            raise ValueError(
                f"algorithm.overlong_cache must be <= rollout.max_completion_length ({longest}), got {cache}"
            )
        if self.algorithm.num_minibatches > self.rollout.prompts_per_step:
            raise ValueError(
                f"algorithm.num_minibatches must be <= rollout.prompts_per_step ({self.rollout.prompts_per_step}), "
                f"got {self.algorithm.num_minibatches}"
            )
        return self

    @model_validator(mode="after")
    def processes_can_share(self) -> "Config":
        if self.parallel != "none":
            able = [name for name, kind in ACCELERATORS.items() if kind.divisible]
            for name in self.accelerators.enabled:
                if name not in able:
                    raise ValueError(
                        f"accelerators.enabled: {name} needs parallel=none, got {self.parallel}, which allows "
                        f"{', '.join(able)}"
                    )
            if self.rollout.engine == "vllm":
                raise ValueError(f"rollout.engine vllm needs parallel=none, got {self.parallel}")
        return self


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies ``a.b=value`` overrides, whose values are YAML too.

    Raises:
        UserError: names the file or key, the bad value and what is allowed.
    """
    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read the config file {path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise UserError(f"{path} must hold a mapping of settings, got {type(values).__name__}")
    for override in overrides:
        apply_override(values, override)
    return check_config(values, source=str(path) if path is not None else "the settings")


def apply_override(values: dict[str, Any], override: str) -> None:
    """Sets one nested key in place."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set takes key=value, for example optimizer.learning_rate=1e-5, got {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {key}: {text!r} is not valid YAML") from error
    *parents, last = key.strip().split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if inner is None:
            inner = values[parent] = {}
        if not isinstance(inner, dict):
            raise UserError(f"--set {key}: {parent} is not a section but {inner!r}")
        values = inner
    values[last] = value


def check_config(values: dict[str, Any], *, source: str) -> Config:
    """Validates; all problems are reported at once."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = [describe_problem(problem) for problem in error.errors()]
        raise UserError(f"{source}: {'; '.join(problems)}") from error


def describe_problem(problem: Any) -> str:
    """One pydantic error as: key, what is wrong, value."""
    key = ".".join(str(part) for part in problem["loc"]) or "settings"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        section = section_of(problem["loc"][:-1])
        known = f"; known here: {', '.join(section.model_fields)}" if section else ""
        return f"{key}: unknown setting{known}"
    if problem["type"] == "value_error":
        return f"{key}: {message}" if problem["loc"] else message
    return f"{key}: {message[0].lower() + message[1:]}, got {problem['input']!r}"


def section_of(path: Sequence[str | int]) -> type[BaseModel] | None:
    """The model class that holds the settings at a path of keys."""
    section: type[BaseModel] = Config
    for key in path:
        field = section.model_fields.get(str(key))
        options = [] if field is None else [field.annotation, *get_args(field.annotation)]
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if inner is None:
            return None
        section = inner
    return section


def dump_config(config: Config) -> str:
    """The resolved settings as YAML that :func:`load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted name -> value, as ``--set`` takes them."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: json.dumps(value)}
    return flat


def settings_used(folder: Path) -> dict[str, str]:
    """Dotted name -> value of the run in a folder; empty where there is none."""
    path = folder / "config.yaml"
    return flatten(yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.exists() else {}


def changed_settings(folder: Path, config: Config) -> list[str]:
    """What differs between the run in a folder and these settings: ``name: value there -> value here``."""
    there, here = settings_used(folder), flatten(config.model_dump(mode="json"))
    return [f"{name}: {there[name]} -> {value}" for name, value in here.items() if there.get(name, value) != value]


def describe_settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, documentation) of every setting, in order."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from describe_settings(kind, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield f"{prefix}{name}", type_name(kind), yaml.safe_dump(default).split("\n")[0], field.description or ""
            for inner in get_args(kind):  # of a section that may be null
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    yield from describe_settings(inner, f"{prefix}{name}.")


def type_name(kind: Any) -> str:
    """``int | null``, ``group | rloo`` and the like."""
    if kind is None or kind is type(None):
        return "null"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in (types.UnionType, __import__("typing").Union):
        return " | ".join(type_name(part) for part in get_args(kind))
    return getattr(kind, "__name__", str(kind))
