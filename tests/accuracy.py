"""The rule by which a kernel is right: its error is at most twice that of plain torch, both against float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def with_gradients(function: Callable[..., Any], inputs: Sequence[torch.Tensor], *grads: torch.Tensor
                   ) -> list[torch.Tensor]:  # fmt: skip
    """The outputs of a function, then the gradients of its inputs for these gradients of the outputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    found = torch.autograd.grad(outs, leaves, [grad.to(o.dtype) for grad, o in zip(grads, outs, strict=True)])
    return [*(o.detach() for o in outs), *found]


def assert_as_plain(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], exact: Sequence[torch.Tensor],
                    floor: float = 2e-6, relative: float = 0.0) -> None:  # fmt: skip
    """Fails where ours is more than twice as far from ``exact`` as ``plain`` is, or infinite where ``exact`` is not.

    Args:
        floor: error that is always allowed.
        relative: the same, as a share of the largest magnitude.
    """
    for number, (a, b, gold) in enumerate(zip(ours, plain, exact, strict=True)):
        assert a.dtype == b.dtype and a.shape == gold.shape
        seen = gold.isfinite()
        assert torch.equal(a.isfinite(), seen) and not a.isnan().any()
        if seen.any():
            error, allowed = (float((x.double() - gold)[seen].abs().max()) for x in (a, b))
            most = 2 * allowed + floor + relative * float(gold[seen].abs().max())
            assert error <= most, (
                f"result {number}: error {error:.3g}, of plain torch {allowed:.3g}, allowed {most:.3g}"
            )
