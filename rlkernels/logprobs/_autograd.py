"""Gradient of ``torch.ops.rlkernels.token_logprobs``; import it after the extension."""

from typing import Any

import torch


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    logits, ids, temperature, _ = inputs
    _, entropies, stats = output
    ctx.save_for_backward(logits, ids, stats, entropies)
    ctx.temperature = temperature
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_logprobs: Any, grad_entropies: Any, _: Any) -> tuple:
    logits, ids, stats, entropies = ctx.saved_tensors
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(stats[:, 0])
    if grad_entropies is None:
        entropies = grad_entropies = grad_logprobs.new_empty(0)
    grad = torch.ops.rlkernels.token_logprobs_backward(
        logits, ids, stats, entropies, grad_logprobs.contiguous(), grad_entropies.contiguous(), ctx.temperature
    )
    return grad, None, None, None


torch.library.register_autograd("rlkernels::token_logprobs", _backward, setup_context=_setup_context)
