"""The small operations between the matrix products of a decoder layer (Llama, Mistral, Qwen), one pass each.

Differentiable. Compiled code runs float32 and bfloat16 on a CPU; its gradients have no gradient and raise. It computes
bfloat16 in float32 and rounds each tensor once, where plain torch rounds after every operation.
"""

import torch

from rlkernels import _check, _gradients
from rlkernels import backend as _backend
from rlkernels._contexts import public_op
from rlkernels.decoder import _autograd, reference

__all__ = ["add_rms_norm", "rope", "silu_mul"]

KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def _is_compiled(op: str, x: torch.Tensor, backend: str) -> bool:
    """Return whether compiled code runs the op on x, else plain torch."""
    chosen = _backend.choose(op, x.device, backend)
    if backend == "cpu" and x.dtype not in KERNEL_DTYPES:
        raise ValueError(f"backend='cpu' computes {op} in float32 or bfloat16, got {x.dtype}")
    return chosen == "cpu" and x.dtype in KERNEL_DTYPES


def _check_norm(residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, **_: object) -> None:
    _check.tensor("residual", residual, floating=True)
    if x is not None:
        _check.tensor("x", x, device=residual.device)
    _check.tensor("weight", weight, device=residual.device)


@public_op("add_rms_norm", _check_norm)
def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``residual + x``, and normalise the sum by its root mean square (arXiv 1910.07467).

    Args:
        residual: [T, D], contiguous.
        x: [T, D], contiguous; None: the sum is the residual itself.
        weight: [D]; compiled code wants x and the weight of the dtype of the residual.
        eps: added to the mean square.

    Returns:
        sum [T, D] and ``sum * rsqrt(mean(sum^2) + eps) * weight`` [T, D].

    Raises:
        ValueError, RuntimeError: shapes that do not fit, or tensors that are not contiguous.
    """
    mixed = backend == "auto" and any(t is not None and t.dtype != residual.dtype for t in (x, weight))
    if mixed or not _is_compiled("add_rms_norm", residual, backend):
        if x is not None:
            _check.shape("x", x, residual.shape)
        _check.shape("weight", weight, residual.shape[-1:])
        return reference.add_rms_norm(residual, x, weight, eps)
    total, normed, _ = _gradients.apply(_autograd.AddRmsNorm, residual, x, weight, eps)
    return residual if x is None else total, normed


def _check_rope(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: object) -> None:
    _check.tensor("x", x, floating=True)
    for name, tensor in (("positions", positions), ("cos", cos), ("sin", sin)):
        _check.tensor(name, tensor, device=x.device)


@public_op("rope", _check_rope)
def rope(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_heads: int, heads: int,
         q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, eps: float = 0.0, *,
         backend: str = "auto") -> torch.Tensor:  # fmt: skip
    """Apply rotary position embedding (arXiv 2104.09864, halves layout) to the first ``heads`` heads of each row.

    Args:
        x: [T, at least heads * d], contiguous: queries, keys, then columns that stay as they are (values).
        positions: int64 [T], rows of the tables.
        cos, sin: [P, d] of the dtype of x or float32, as Transformers' rotary embeddings give them: both halves alike.
            They get no gradient.
        q_heads: how many of the heads are queries.
        heads: queries and keys together.
        q_weight, k_weight: [d] each, of the dtype of x or float32, to normalise every query and key head before
            (Qwen3); None, both: no norm.
        eps: added to the mean square in that norm.

    Returns:
        A tensor like x.

    Raises:
        ValueError, RuntimeError: shapes that do not fit, one norm weight without the other, positions outside the
            tables (on a GPU negative ones count from the end), tensors that are not contiguous (compiled code).
    """
    if (q_weight is None) != (k_weight is None):
        name = "q_weight" if k_weight is None else "k_weight"
        raise ValueError(f"q_weight and k_weight must be given together, got {name} alone")
    arguments = x, positions, cos, sin, q_heads, heads, q_weight, k_weight
    if not _is_compiled("rope", x, backend):
        width, dim = x.shape[1], cos.shape[1]
        _check.shape("positions", positions, x.shape[:1])
        _check.shape("sin", sin, cos.shape)
        if q_weight is not None and k_weight is not None:
            _check.shape("q_weight", q_weight, (dim,))
            _check.shape("k_weight", k_weight, (dim,))
        if not 0 <= q_heads <= heads or heads * dim > width:
            raise ValueError(f"{heads} heads ({q_heads} of queries) of {dim} numbers do not fit into rows of {width}")
        _check.indices("positions", positions, len(cos))
        return reference.rope(*arguments, eps)
    return _gradients.apply(_autograd.Rope, *arguments, eps)


@public_op("silu_mul", lambda gate_up, **_: _check.tensor("gate_up", gate_up, floating=True))
def silu_mul(gate_up: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Compute the gate of a SwiGLU layer (arXiv 2002.05202).

    Args:
        gate_up: [T, 2 I], contiguous: both halves of the projection.

    Returns:
        ``silu(gate) * up`` [T, I].

    Raises:
        ValueError, RuntimeError: another shape, or a tensor that is not contiguous.
    """
    if not _is_compiled("silu_mul", gate_up, backend):
        if gate_up.shape[-1] % 2:
            raise ValueError(f"gate_up must have an even width, got {gate_up.shape[-1]}")
        return reference.silu_mul(gate_up)
    return _gradients.apply(_autograd.SiluMul, gate_up)
