"""Gradients, under autograd and torch.func, that cannot be differentiated again: that raises."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from rlkernels import _contexts


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply a function that has a ``setup_context``; call its ``forward`` if no gradient is needed.

    ``function.apply`` binds its arguments by ``inspect`` each time, for transforms alone: 60 µs.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    if torch.is_grad_enabled():
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return function.forward(*args)


def once(op: str, alternative: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate ``backward(ctx, saved, *grads)``, whose result has no gradient: to differentiate it raises.

    It gets the saved tensors as an argument, because a checkpointed pass gives them only once.

    torch's ``once_differentiable`` does not notice a result that depends on saved tensors alone, nor torch.func.

    Args:
        op: its name in errors.
        alternative: end of the message, for ops that have a second gradient elsewhere.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors
            if torch.compiler.is_compiling():
                return backward(ctx, saved, *grads)
            for grad in grads:
                if grad is not None and (transform := _contexts.transform_of(grad)):
                    raise TypeError(f"the gradient of {op} has no rule for {transform}: ask for one gradient at a time")
            with torch.no_grad():
                results = backward(ctx, saved, *grads)
            if not torch.is_grad_enabled():
                return results
            sources = [t for t in (*grads, *saved) if t is not None and t.requires_grad]
            if not sources:
                return results
            results = results if isinstance(results, tuple) else (results,)
            return apply(_NoSecondGradient, op, alternative, len(results), *results, *sources)

        return run

    return decorate


class _NoSecondGradient(torch.autograd.Function):
    """Return the first ``count`` tensors, as results that depend on all others; their gradient raises."""

    @staticmethod
    def forward(op: str, alternative: str, count: int, *tensors: Any) -> Any:
        return tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op, ctx.alternative = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"the gradient of {ctx.op} has no gradient{ctx.alternative}")
