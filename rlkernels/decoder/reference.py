"""The small operations between the matrix products of a decoder layer in plain torch, for tests and benchmarks."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467), in float32 at least."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm_(residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`rlkernels.decoder.add_rms_norm_`."""
    if x is not None:
        residual += x
    return rms_norm(residual, weight, eps)


def rope_(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_heads: int,
    heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See :func:`rlkernels.decoder.rope_`."""
    dim = cos.shape[1]
    part = x[:, : heads * dim].unflatten(1, (heads, dim))
    turned = part
    if q_weight is not None and k_weight is not None:
        turned = torch.cat([rms_norm(part[:, :q_heads], q_weight, eps), rms_norm(part[:, q_heads:], k_weight, eps)], 1)
    low, high = turned.chunk(2, -1)
    part.copy_(turned * cos[positions][:, None] + torch.cat([-high, low], -1) * sin[positions][:, None])


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See :func:`rlkernels.decoder.silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
