"""What the timed cases of a proof look like."""

import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Workload:
    """Shapes and dtype of a training step; by default one of Qwen2.5-0.5B.

    Attributes:
        dtype: of weights, cache and logits, as torch names it.
        heads, kv_heads, head_dim, hidden, vocab: of the model.
        prompts, samples: prompts of a step, and completions of each.
        prompt_tokens, completion_tokens: typical lengths.
        temperature, top_p, top_k: of sampling.
    """

    dtype: str = "bfloat16"
    heads: int = 14
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 896
    vocab: int = 151_936
    prompts: int = 32
    samples: int = 8
    prompt_tokens: int = 256
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


def workload_of_run(settings: Mapping[str, Any], model: Mapping[str, Any]) -> Workload:
    """Return the workload of a run.

    Args:
        settings: of python_trainer, nested; what is missing counts as in the default workload.
        model: the configuration of a Transformers model.
    """
    rollout = settings.get("rollout") or {}
    longest = rollout.get("max_completion_length")
    found = {
        "dtype": (settings.get("model") or {}).get("dtype"),
        "heads": model.get("num_attention_heads"),
        "kv_heads": model.get("num_key_value_heads") or model.get("num_attention_heads"),
        "head_dim": model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"],
        "hidden": model.get("hidden_size"),
        "vocab": model.get("vocab_size"),
        "prompts": rollout.get("prompts_per_step"),
        "samples": rollout.get("num_generations"),
        "completion_tokens": max(16, longest // 2) if longest else None,  # few answers are as long as they may be
        **{name: rollout.get(name) for name in ("temperature", "top_p", "top_k")},
    }
    given = {name: value for name, value in found.items() if value is not None}
    if given.get("dtype") not in ("float32", "bfloat16", "float16"):
        given.pop("dtype", None)
    return replace(Workload(), **given)
