"""Gradients of the fused ops."""

import functools
from typing import Any

import torch


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    logits, ids, temperature, _ = inputs
    _, entropies, stats = output
    ctx.save_for_backward(logits, ids, stats, entropies)
    ctx.temperature = temperature
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _gradient(op: str, ctx: Any, grad_logprobs: Any, grad_entropies: Any, _: Any) -> tuple:
    logits, ids, stats, entropies = ctx.saved_tensors
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(stats[:, 0])
    if grad_entropies is None:
        entropies = grad_entropies = grad_logprobs.new_empty(0)
    backward = getattr(torch.ops.rlkernels, op.removeprefix("rlkernels::") + "_backward")
    grad = backward(
        logits, ids, stats, entropies, grad_logprobs.contiguous(), grad_entropies.contiguous(), ctx.temperature
    )
    return grad, None, None, None


def _second_gradient(*_: Any) -> tuple:
    raise RuntimeError("token_logprobs is compiled here and its gradient has no gradient; backend='torch' has one")


def register(op: str) -> None:
    """Gives ``op``, which must be loaded, its gradient; the op ``{op}_backward`` computes it and has none."""
    torch.library.register_autograd(op, functools.partial(_gradient, op), setup_context=_setup_context)
    torch.library.register_autograd(f"{op}_backward", _second_gradient)
