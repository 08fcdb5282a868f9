"""The rule by which a kernel is right: its error is at most twice that of plain torch, both against float64."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import rlkernels
from rlkernels.logprobs import reference


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


def check_logprobs(backend: str, logits: torch.Tensor, ids: torch.Tensor, temperature: float, floor: float) -> None:
    """Judges log-probabilities, entropies and the gradients of both by their reference."""
    grads = torch.randn(2, *ids.shape)
    score = partial(rlkernels.token_logprobs, ids=ids, temperature=temperature, return_entropy=True, backend=backend)
    plain, exact = (
        with_gradients(partial(reference.token_logprobs, ids=ids, temperature=temperature), [x], *grads)
        for x in (logits, logits.double())
    )
    assert_as_plain(with_gradients(score, [logits], *grads), plain, exact, floor)


def check_linear_logprobs(backend: str, tensors: Sequence[torch.Tensor | None], ids: torch.Tensor, temperature: float,
                          chunk: int | None, **slack: float) -> None:  # fmt: skip
    """The same from hidden states, weight and bias (or None)."""
    given, grads = [t for t in tensors if t is not None], torch.randn(2, *ids.shape)

    def ours(hidden, weight, bias=None):
        options = {"bias": bias, "temperature": temperature, "chunk": chunk, "backend": backend}
        return rlkernels.linear_token_logprobs(hidden, weight, ids, return_entropy=True, **options)

    def wanted(hidden, weight, bias=None):
        return reference.linear_token_logprobs(hidden, weight, ids, temperature, bias)

    plain, exact = (with_gradients(wanted, inputs, *grads) for inputs in (given, [t.double() for t in given]))
    assert_as_plain(with_gradients(ours, given, *grads), plain, exact, **slack)


def check_blocks(backend: str) -> None:
    """Blocks of the vocabulary that are ruled out by the bias, all of one and a part of the next; NaN in a state stays
    in its row, NaN in the bias is in every row."""
    hidden, weight, bias = torch.randn(4, 8), torch.randn(40, 8), torch.zeros(40)
    hidden[2, 0], bias[:17], ids = torch.nan, -torch.inf, torch.tensor([17, 3, 30, 39])
    score = partial(rlkernels.linear_token_logprobs, ids=ids, bias=bias, return_entropy=True, chunk=10, backend=backend)
    *found, grad, _ = with_gradients(score, [hidden, weight], *torch.ones(2, 4))
    wanted = reference.linear_token_logprobs(hidden, weight, ids, 1.0, bias)
    assert wanted[0][1] == -torch.inf and wanted[0].isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(found, list(wanted), equal_nan=True)
    assert torch.equal(grad.isnan().any(1), found[0].isnan())
    for rest, entry in ((-torch.inf, -torch.inf), (-torch.inf, torch.nan), (0.0, torch.nan)):
        bias[:], bias[4] = rest, entry
        assert score(hidden, weight)[0].isnan().all()
