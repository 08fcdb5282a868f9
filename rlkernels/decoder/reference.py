"""The small operations between the matrix products of a decoder layer in plain torch, for tests and benchmarks."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square of the last dimension (arXiv 1910.07467), in float32 at least."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`rlkernels.decoder.add_rms_norm`."""
    total = residual if x is None else residual + x
    return total, rms_norm(total, weight, eps)


def rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_heads: int,
    heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """See :func:`rlkernels.decoder.rope`."""
    dim = cos.shape[1]
    queries_and_keys, values = x.split([heads * dim, x.shape[1] - heads * dim], 1)
    qk = queries_and_keys.unflatten(1, (heads, dim))
    if q_weight is not None:
        assert k_weight is not None
        qk = torch.cat([rms_norm(qk[:, :q_heads], q_weight, eps), rms_norm(qk[:, q_heads:], k_weight, eps)], 1)
    low, high = qk.chunk(2, -1)
    cos, sin = (table.detach()[positions][:, None] for table in (cos, sin))
    rotated = qk * cos + torch.cat([-high, low], -1) * sin
    return torch.cat([rotated.flatten(1).to(x.dtype), values], 1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See :func:`rlkernels.decoder.silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
