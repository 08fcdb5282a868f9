"""Gradients of the compiled ops."""

from typing import Any

import torch

from rlkernels import _gradients


class AddRmsNorm(torch.autograd.Function):
    """From residual, x or None, weight, eps: the sum ([0, D] without x), its norm, and the factor of each row."""

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
    def backward(ctx: Any, saved: Any, grad_total: Any, grad_out: Any, _: Any) -> Any:
        total, factor, weight = saved
        if grad_total is not None:
            grad_total = grad_total.contiguous()
        if grad_out is None:
            return grad_total, grad_total, None, None
        grads = torch.ops.rlkernels.rms_norm_backward(grad_out.contiguous(), grad_total, total, factor, weight)
        grad_sum, grad_weight = grads
        return grad_sum, grad_sum if ctx.added else None, grad_weight, None


class Rope(torch.autograd.Function):
    """From x, positions, cos, sin, q_heads, heads, q_weight, k_weight, eps: x with queries and keys turned."""

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
    def backward(ctx: Any, saved: Any, grad_out: torch.Tensor) -> Any:
        x, positions, cos, sin, *weights = saved
        q_heads, heads, eps = ctx.settings
        grad_out = grad_out.contiguous()
        x = grad_out if x is None else x  # not read without norms
        tables = positions, cos, sin, q_heads, heads
        grad_x, grad_rows = torch.ops.rlkernels.rope_backward(grad_out, x, *tables, *weights, eps)
        grad_weights = [
            None if weight is None else grad.to(weight.dtype) for weight, grad in zip(weights, grad_rows, strict=True)
        ]
        return grad_x, None, None, None, None, None, *grad_weights, None


class SiluMul(torch.autograd.Function):
    """From gate_up: ``silu(gate) * up``."""

    @staticmethod
    def forward(gate_up: torch.Tensor) -> torch.Tensor:
        return torch.ops.rlkernels.silu_mul(gate_up)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @_gradients.once("silu_mul", "; backend='torch' has one")
    def backward(ctx: Any, saved: Any, grad_out: torch.Tensor) -> Any:
        return torch.ops.rlkernels.silu_mul_backward(grad_out.contiguous(), *saved)
