"""The fused ops by backend, and their gradient."""

from typing import Any

import torch

from rlkernels import _gradients
from rlkernels import backend as _backend

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(op: str, tensor: torch.Tensor, backend: str) -> str:
    """Choose the backend of an op for a tensor of logits or hidden states; our kernels take no float64."""
    chosen = _backend.choose(op, tensor.device, backend)
    if chosen == "torch" or tensor.dtype in KERNEL_DTYPES:
        return chosen
    if backend != "auto":
        raise ValueError(f"backend={backend!r} runs {op} on 16 and 32 bit floats, got {tensor.dtype}")
    return "torch"


def fused(backend: str) -> tuple[Any, Any]:
    """Return the ops that compute token_logprobs and its gradient, on "cpu" or "triton"."""
    if backend == "triton":
        from rlkernels.logprobs import triton_kernels

        return triton_kernels.forward, triton_kernels.backward
    return torch.ops.rlkernels.token_logprobs.default, torch.ops.rlkernels.token_logprobs_backward.default


def given_gradients(
    stats: torch.Tensor, entropies: torch.Tensor, grad_logprobs: Any, grad_entropies: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return entropies and both gradients as the backward ops take them: zeros, and [0], where there is none."""
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(stats[:, 0])
    if grad_entropies is None:
        entropies = grad_entropies = grad_logprobs.new_empty(0)
    return entropies, grad_logprobs.contiguous(), grad_entropies.contiguous()


class TokenLogprobs(torch.autograd.Function):
    """logits [N, V], ids int64 [N] -> logprobs [N], entropies [N] or [0], stats [N, 2] for the gradient."""

    @staticmethod
    def forward(logits: torch.Tensor, ids: torch.Tensor, temperature: float, with_entropy: bool, backend: str) -> Any:
        forward, _ = fused(backend)
        return forward(logits, ids, temperature, with_entropy)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, ids, ctx.temperature, _, ctx.backend = inputs
        _, entropies, stats = output
        ctx.save_for_backward(logits, ids, stats, entropies)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)

    @staticmethod
    @_gradients.once("token_logprobs", "; backend='torch' has one")
    def backward(ctx: Any, saved: Any, grad_logprobs: Any, grad_entropies: Any, _: Any) -> Any:
        logits, ids, stats, entropies = saved
        given = given_gradients(stats, entropies, grad_logprobs, grad_entropies)
        _, backward = fused(ctx.backend)
        return backward(logits, ids, stats, *given, ctx.temperature), None, None, None, None
