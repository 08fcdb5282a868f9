"""Settings of the policy, its optimizer and the critic."""

from typing import Annotated, Literal

from pydantic import Field

from python_trainer.model.schedule import Decay
from python_trainer.settings import LOCAL, Section


class LoraSettings(Section):
    """Low-rank adapters."""

    r: int = Field(16, ge=1)
    """Rank of the update of each weight matrix."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the update: the product of the two matrices times alpha / r."""
    target_modules: list[str] | str = "all-linear"
    """Names of the linear layers with an adapter, such as [q_proj, v_proj]; all-linear: all but the output layer."""


class ModelConfig(Section):
    """The policy."""

    path: Annotated[str, LOCAL] = "sums"
    """Causal language model: a folder in Hugging Face format, a Hub id (`owner/name`, or `owner/name@revision` for a
    branch, tag or commit), or the name of a shipped policy, such as `sums`. For a PEFT adapter the trainer loads the
    base model and merges the adapter; a tokenizer beside the adapter takes the place of the base's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. With bfloat16 the optimizer keeps float32 master weights. auto: bfloat16 on a GPU, and on a
    CPU with bfloat16 products if float32 weights would take more than 256 MB; else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: the GPU if there is one."""
    matmul_precision: Literal["highest", "medium"] = "highest"
    """medium: float32 matrix products round their inputs to bfloat16 (CPU) or TensorFloat-32 (GPU), which is faster."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. auto: on a GPU, if they would
    not fit by the estimate of `train --dry-run`."""
    lora: LoraSettings | None = None
    """Train low-rank adapters (PEFT) and nothing else, such as {r: 16, alpha: 32, target_modules: all-linear}; null:
    train all weights. Generation and the exported model use merged weights."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Decay = "constant"
    """Learning rate after the warm-up: constant, or down to 0 at max_steps."""
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
    """Scale gradients with a larger norm down to this norm."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Tokens in one forward and backward pass. Changes memory and speed, not the loss."""
    offload: bool = False
    """Keep float32 weights, gradients and moments in host memory and run AdamW there. Needs parallel: fsdp2, also in
    one process. Changes memory and speed, not the result."""


class CriticConfig(Section):
    """The value function of PPO, with algorithm.advantage gae."""

    separate: bool = False
    """Train a second model that starts as a copy of the policy, instead of one more output of the policy."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate of the critic. It shares all other settings of the optimizer."""
