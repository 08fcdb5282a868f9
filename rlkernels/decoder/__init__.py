"""The small operations between the matrix products of a decoder layer (Llama, Mistral, Qwen), one pass each.

Differentiable. Compiled for float32 on a CPU; there gradients of gradients raise.
"""

import torch

from rlkernels import backend as _backend
from rlkernels.decoder import _autograd, reference

__all__ = ["add_rms_norm", "rope", "silu_mul"]


def _native(op: str, x: torch.Tensor, backend: str) -> bool:
    chosen = _backend.choose(op, x.device, backend)
    if backend == "cpu" and x.dtype != torch.float32:
        raise ValueError(f"backend='cpu' computes {op} in float32, got {x.dtype}")
    return chosen == "cpu" and x.dtype == torch.float32


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x``, and the root-mean-square norm of it (arXiv 1910.07467).

    Args:
        residual: [T, D], contiguous.
        x: [T, D], contiguous; None: the sum is the residual itself.
        weight: [D].
        eps: added to the mean square.

    Returns:
        sum [T, D] and ``sum * rsqrt(mean(sum^2) + eps) * weight`` [T, D].

    Raises:
        ValueError, RuntimeError: shapes that do not fit, or tensors that are not contiguous.
    """
    if not _native("add_rms_norm", residual, backend):
        return reference.add_rms_norm(residual, x, weight, eps)
    if torch.is_grad_enabled():
        out = _autograd.AddRmsNorm.apply(residual, x, weight, eps)
        return (residual, out) if x is None else out
    total, normed, _ = torch.ops.rlkernels.add_rms_norm(residual, x, weight, eps)
    return residual if x is None else total, normed


def rope(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_heads: int, heads: int,
         q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 0.0, *,
         backend: str = "auto") -> torch.Tensor:  # fmt: skip
    """Rotary position embedding (arXiv 2104.09864, halves layout) of the first ``heads`` heads of each row.

    Args:
        x: [T, at least heads * d], contiguous: queries, keys, then whatever is left alone (values).
        positions: int64 [T], rows of the tables.
        cos, sin: [P, d], as Transformers' rotary embeddings give them: both halves alike. They get no gradient.
        q_heads: how many of the heads are queries.
        heads: queries and keys together.
        q_weight, k_weight: [d] each, to normalise every query and key head before (Qwen3); None: no norm.
        eps: added to the mean square in that norm.

    Returns:
        A tensor like x.

    Raises:
        ValueError, RuntimeError: shapes that do not fit, positions outside the tables, tensors that are not contiguous.
    """
    arguments = x, positions, cos, sin, q_heads, heads, q_weight, k_weight, eps
    if not _native("rope", x, backend):
        return reference.rope(*arguments)
    if torch.is_grad_enabled():
        return _autograd.Rope.apply(*arguments)
    return torch.ops.rlkernels.rope(*arguments)


def silu_mul(gate_up: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """The gate of a SwiGLU layer (arXiv 2002.05202).

    Args:
        gate_up: [T, 2 I], contiguous: both halves of the projection.

    Returns:
        ``silu(gate) * up`` [T, I].

    Raises:
        ValueError, RuntimeError: another shape, or a tensor that is not contiguous.
    """
    if not _native("silu_mul", gate_up, backend):
        return reference.silu_mul(gate_up)
    if torch.is_grad_enabled():
        return _autograd.SiluMul.apply(gate_up)
    return torch.ops.rlkernels.silu_mul(gate_up)
