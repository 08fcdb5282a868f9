"""Shapes and dtype of the timed cases of a proof."""

import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Workload:
    """Shapes and dtype of a training step; by default one of Qwen2.5-0.5B."""

    dtype: str = "bfloat16"  # of weights, cache and logits, as torch names it
    heads: int = 14
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 896
    vocab: int = 151_936
    prompts: int = 32  # of a step
    samples: int = 8  # completions of each
    prompt_tokens: int = 256  # typical lengths
    completion_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    def digest(self) -> str:
        """Return a short name, equal for equal workloads."""
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:12]


def workload_of_run(settings: Mapping[str, Any], model: Any) -> Workload:
    """Return the workload of a run with these nested settings of python_trainer and configuration of a decoder."""
    rollout = settings["rollout"]
    dtype = settings["model"]["dtype"]
    heads = getattr(model, "num_attention_heads", Workload.heads)
    return Workload(
        dtype=Workload.dtype if dtype == "auto" else dtype,
        heads=heads,
        kv_heads=getattr(model, "num_key_value_heads", None) or heads,
        head_dim=getattr(model, "head_dim", None) or model.hidden_size // heads,
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        prompts=rollout["prompts_per_step"],
        samples=rollout["num_generations"],
        completion_tokens=max(16, rollout["max_completion_length"] // 2),  # few answers are as long as they may be
        **{name: rollout[name] for name in ("temperature", "top_p", "top_k")},
    )
