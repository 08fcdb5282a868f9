"""Functions timed with their backward pass."""

from collections.abc import Callable

import torch


def run_both_ways(function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *tensors: torch.Tensor
                  ) -> list[torch.Tensor]:  # fmt: skip
    """Return the outputs of a function, and the gradients of their sum by its arguments."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    sums = [output.sum() for output in outputs]
    return [*(output.detach() for output in outputs), *torch.autograd.grad(sums, leaves)]
