"""Gradients of the compiled ops."""

from typing import Any

import torch

from rlkernels import _gradients


class AddRmsNorm(torch.autograd.Function):
    """residual, x or None, weight, eps -> sum ([0, D] without x), its norm, and the factor of each row."""

    @staticmethod
    def forward(residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float) -> Any:
        return torch.ops.rlkernels.add_rms_norm(residual, x, weight, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        residual, x, weight, _ = inputs
        total, _, factor = output
        ctx.added = x is not None
        ctx.mark_non_differentiable(factor, *(() if ctx.added else (total,)))
        ctx.save_for_backward(total if ctx.added else residual, factor, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    @_gradients.once("add_rms_norm", "; backend='torch' has one")
    def backward(ctx: Any, of_total: Any, of_out: Any, _: Any) -> Any:
        total, factor, weight = ctx.saved_tensors
        other, of_out = (None if grad is None else grad.contiguous() for grad in (of_total, of_out))
        if of_out is None:
            return other, other, None, None
        grad, of_weight = torch.ops.rlkernels.rms_norm_backward(of_out, other, total, factor, weight)
        return grad, grad if ctx.added else None, of_weight, None


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_heads: int,
                heads: int, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
                eps: float) -> torch.Tensor:  # fmt: skip
        return torch.ops.rlkernels.rope(x, positions, cos, sin, q_heads, heads, q_weight, k_weight, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, positions, cos, sin, q_heads, heads, q_weight, k_weight, eps = inputs
        ctx.save_for_backward(None if q_weight is None else x, positions, cos, sin, q_weight, k_weight)
        ctx.settings = q_heads, heads, eps

    @staticmethod
    @_gradients.once("rope", "; backend='torch' has one")
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
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
    def forward(gate_up: torch.Tensor) -> torch.Tensor:
        return torch.ops.rlkernels.silu_mul(gate_up)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @_gradients.once("silu_mul", "; backend='torch' has one")
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        return torch.ops.rlkernels.silu_mul_backward(grad_out.contiguous(), *ctx.saved_tensors)
