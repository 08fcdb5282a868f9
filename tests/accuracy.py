"""The rule by which a kernel is right: its error is at most twice that of plain torch, both against float64."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import rlkernels
from rlkernels.logprobs import reference
from rlkernels.proof.problem import largest_error


def with_gradients(function: Callable[..., Any], inputs: Sequence[torch.Tensor], *grads: torch.Tensor
                   ) -> list[torch.Tensor]:  # fmt: skip
    """Return the outputs of a function, then the gradients of its inputs for these gradients of the outputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    result = function(*leaves)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    output_grads = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
    input_grads = torch.autograd.grad(outputs, leaves, output_grads)
    return [*(output.detach() for output in outputs), *input_grads]


def assert_as_plain(results: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], exact: Sequence[torch.Tensor],
                    floor: float = 2e-6, relative: float = 0.0) -> None:  # fmt: skip
    """Fail where a result is more than twice as far from ``exact`` as ``plain`` is, or infinite where it is finite.

    Args:
        floor: error that is always allowed.
        relative: the same, as a share of the largest magnitude.
    """
    for number, (result, reference_result, expected) in enumerate(zip(results, plain, exact, strict=True)):
        assert result.dtype == reference_result.dtype and result.shape == expected.shape
        finite = expected.isfinite()
        assert torch.equal(result.isfinite(), finite) and not result.isnan().any()
        assert not reference_result[finite].isnan().any()
        if finite.any():
            error = largest_error(result[finite], expected[finite])
            plain_error = largest_error(reference_result[finite], expected[finite])
            max_error = 2 * plain_error + floor + relative * float(expected[finite].abs().max())
            assert error <= max_error, (
                f"result {number}: error {error:.3g}, of plain torch {plain_error:.3g}, allowed {max_error:.3g}"
            )


def draw_logits(rows: int, vocab: int, scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [rows, vocab], of which the second row is ruled out in part, and ids [rows]."""
    logits = (torch.randn(rows, vocab) * scale + 5).to(dtype)
    ids = torch.randint(vocab, (rows,))
    logits[1, ::3] = -torch.inf
    logits[1, -1] = 0
    ids[1] = vocab - 1
    return logits, ids


def check_logprobs(backend: str, logits: torch.Tensor, ids: torch.Tensor, temperature: float, floor: float) -> None:
    """Judge log-probabilities, entropies and the gradients of both by their reference."""
    grads = torch.randn(2, *ids.shape)
    score = partial(rlkernels.token_logprobs, ids=ids, temperature=temperature, return_entropy=True, backend=backend)
    plain, exact = (
        with_gradients(partial(reference.token_logprobs, ids=ids, temperature=temperature), [x], *grads)
        for x in (logits, logits.double())
    )
    assert_as_plain(with_gradients(score, [logits], *grads), plain, exact, floor)


def check_linear_logprobs(backend: str, tensors: Sequence[torch.Tensor | None], ids: torch.Tensor, temperature: float,
                          chunk: int | None, **slack: float) -> None:  # fmt: skip
    """Judge the same from hidden states, weight and bias (or None)."""
    inputs = [t for t in tensors if t is not None]
    grads = torch.randn(2, *ids.shape)

    def score(hidden, weight, bias=None):
        options = {"bias": bias, "temperature": temperature, "chunk": chunk, "backend": backend}
        return rlkernels.linear_token_logprobs(hidden, weight, ids, return_entropy=True, **options)

    def score_plainly(hidden, weight, bias=None):
        return reference.linear_token_logprobs(hidden, weight, ids, temperature, bias)

    plain = with_gradients(score_plainly, inputs, *grads)
    exact = with_gradients(score_plainly, [t.double() for t in inputs], *grads)
    assert_as_plain(with_gradients(score, inputs, *grads), plain, exact, **slack)


def check_blocks(backend: str) -> None:
    """Check blocks of the vocabulary that the bias rules out, and NaN.

    The bias rules out one block and a part of the next. NaN in a state stays in its row, NaN in the bias reaches all.
    """
    hidden, weight, bias = torch.randn(4, 8), torch.randn(40, 8), torch.zeros(40)
    hidden[2, 0] = torch.nan
    bias[:17] = -torch.inf
    ids = torch.tensor([17, 3, 30, 39])
    score = partial(rlkernels.linear_token_logprobs, ids=ids, bias=bias, return_entropy=True, chunk=10, backend=backend)
    *results, hidden_grad, _ = with_gradients(score, [hidden, weight], *torch.ones(2, 4))
    expected = reference.linear_token_logprobs(hidden, weight, ids, 1.0, bias)
    assert expected[0][1] == -torch.inf and expected[0].isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(results, list(expected), equal_nan=True)
    assert torch.equal(hidden_grad.isnan().any(1), results[0].isnan())
    for others, entry in ((-torch.inf, -torch.inf), (-torch.inf, torch.nan), (0.0, torch.nan)):
        bias[:] = others
        bias[4] = entry
        assert score(hidden, weight)[0].isnan().all()
