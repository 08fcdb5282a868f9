"""The small operations between the matrix products of a decoder layer (Llama, Mistral, Qwen), one pass each.

For generation only: they have no gradient and work in place where that saves a copy. Compiled for float32 on a CPU.
"""

import torch

from rlkernels import backend as _backend
from rlkernels.decoder import reference

__all__ = ["add_rms_norm_", "rope_", "silu_mul"]


def _native(op: str, x: torch.Tensor, backend: str) -> bool:
    chosen = _backend.choose(op, x.device, backend)
    if backend == "cpu" and x.dtype != torch.float32:
        raise ValueError(f"backend='cpu' computes {op} in float32, got {x.dtype}")
    return chosen == "cpu" and x.dtype == torch.float32


def add_rms_norm_(
    residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, *, backend: str = "auto"
) -> torch.Tensor:
    """``residual += x``, then the root-mean-square norm of it (arXiv 1910.07467).

    Args:
        residual: [T, D], contiguous, changed in place.
        x: [T, D], contiguous; None leaves the residual as it is.
        weight: [D].
        eps: added to the mean square.

    Returns:
        [T, D], ``residual * rsqrt(mean(residual^2) + eps) * weight``.

    Raises:
        ValueError, RuntimeError: shapes that do not fit, or tensors that are not contiguous.
    """
    if _native("add_rms_norm", residual, backend):
        return torch.ops.rlkernels.add_rms_norm_(residual, x, weight, eps)
    return reference.add_rms_norm_(residual, x, weight, eps)


def rope_(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_heads: int, heads: int,
          q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 0.0, *,
          backend: str = "auto") -> None:  # fmt: skip
    """Rotary position embedding (arXiv 2104.09864, halves layout), in place, on the first ``heads`` heads of each row.

    Args:
        x: [T, at least heads * d], contiguous: queries, keys, then whatever is left alone (values).
        positions: int64 [T], rows of the tables.
        cos, sin: [P, d], as Transformers' rotary embeddings give them: both halves alike.
        q_heads: how many of the heads are queries.
        heads: queries and keys together.
        q_weight, k_weight: [d] each, to normalise every query and key head before (Qwen3); None: no norm.
        eps: added to the mean square in that norm.

    Raises:
        ValueError, RuntimeError: shapes that do not fit, positions outside the tables, tensors that are not contiguous.
    """
    if _native("rope", x, backend):
        torch.ops.rlkernels.rope_(x, positions, cos, sin, q_heads, heads, q_weight, k_weight, eps)
    else:
        reference.rope_(x, positions, cos, sin, q_heads, heads, q_weight, k_weight, eps)


def silu_mul(gate_up: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """The gate of a SwiGLU layer (arXiv 2002.05202).

    Args:
        gate_up: [T, 2 I], contiguous: both halves of the projection.

    Returns:
        ``silu(gate) * up`` [T, I].

    Raises:
        ValueError, RuntimeError: another shape, or a tensor that is not contiguous.
    """
    if _native("silu_mul", gate_up, backend):
        return torch.ops.rlkernels.silu_mul(gate_up)
    return reference.silu_mul(gate_up)
