"""What the timed cases of a proof look like."""

import hashlib
from dataclasses import astuple, dataclass

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
        """A short name, equal for equal workloads."""
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:12]
