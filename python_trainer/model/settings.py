"""Settings of the policy, its optimizer and the critic."""

from typing import Literal

from pydantic import Field

from python_trainer.settings import Section


class LoraSettings(Section):
    """Low-rank adapters."""

    r: int = Field(16, ge=1)
    """Rank of the update of each weight matrix."""
    alpha: float = Field(32.0, gt=0)
    """The product of the two matrices counts alpha / r times."""
    target_modules: list[str] | str = "all-linear"
    """Names of the linear layers with an adapter, such as [q_proj, v_proj]; all-linear: all but the output layer."""


class ModelConfig(Section):
    """The policy."""

    path: str = "sums"
    """Causal language model: a folder in Hugging Face format, an id of the Hub (`owner/name`, or `owner/name@revision`
    for a branch, tag or commit), or a shipped base policy by name, such as `sums`. An adapter of PEFT selects its
    base with the adapter merged in."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights in memory: bfloat16 keeps float32 master weights in the optimizer. auto: bfloat16 on a GPU,
    and of more than 256 MB of float32 weights on a CPU that has products of bfloat16; else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU when there is one."""
    matmul_precision: Literal["highest", "medium"] = "highest"
    """medium lets float32 matrix products round their inputs: bfloat16 on a CPU, TensorFloat-32 on a GPU. Faster."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. auto: in training on a GPU
    whose memory does not hold them by `train --dry-run`."""
    lora: LoraSettings | None = None
    """Train low-rank adapters (PEFT) and nothing else: {r: 16, alpha: 32, target_modules: all-linear}, for example.
    Generation and the exported model have them merged into the weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""


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
    offload: bool = False
    """Keep float32 weights, gradients and moments in the memory of the host, where AdamW then runs; with parallel:
    fsdp2, in one process too. Changes memory and speed."""


class CriticConfig(Section):
    """The value function of PPO, with algorithm.advantage gae."""

    separate: bool = False
    """A model of its own, begun as a copy of the policy, instead of one more output of the policy."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate of that model or output; schedule and the rest are the optimizer's."""
