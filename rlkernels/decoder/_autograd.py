"""Gradients of the compiled ops. Not registered with torch's library, whose wrapper would cost as much as the op."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple:
        total, out, factor = torch.ops.rlkernels.add_rms_norm(residual, x, weight, eps)
        ctx.added = x is not None
        ctx.save_for_backward(total if ctx.added else residual, factor, weight)
        ctx.set_materialize_grads(False)
        return (total, out) if ctx.added else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        total, factor, weight = ctx.saved_tensors
        *of_total, of_out = [None if grad is None else grad.contiguous() for grad in grads]
        other = of_total[0] if of_total else None
        if of_out is None:
            return other, other, None, None
        grad, of_weight = torch.ops.rlkernels.rms_norm_backward(of_out, other, total, factor, weight)
        return grad, grad if ctx.added else None, of_weight, None


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_heads: int,
                heads: int, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
                eps: float) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(None if q_weight is None else x, positions, cos, sin, q_weight, k_weight)
        ctx.settings = q_heads, heads, eps
        return torch.ops.rlkernels.rope(x, positions, cos, sin, q_heads, heads, q_weight, k_weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple:
        x, positions, cos, sin, *weights = ctx.saved_tensors
        q_heads, heads, eps = ctx.settings
        grad_out = grad_out.contiguous()
        x = grad_out if x is None else x  # without norms it is not looked at
        tables = positions, cos, sin, q_heads, heads
        grad, of_weights = torch.ops.rlkernels.rope_backward(grad_out, x, *tables, *weights, eps)
        found = [None if weight is None else g.to(weight.dtype) for weight, g in zip(weights, of_weights, strict=True)]
        return grad, None, None, None, None, None, *found, None


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return torch.ops.rlkernels.silu_mul(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> torch.Tensor:
        return torch.ops.rlkernels.silu_mul_backward(grad_out.contiguous(), *ctx.saved_tensors)
