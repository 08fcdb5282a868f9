"""Log-probabilities of given tokens, and the entropy of their distributions."""

from typing import Literal, overload

import torch

from rlkernels import _check, _gradients
from rlkernels._contexts import public_op
from rlkernels.logprobs import reference
from rlkernels.logprobs._autograd import TokenLogprobs, choose
from rlkernels.logprobs.linear import linear_token_logprobs

__all__ = ["linear_token_logprobs", "token_logprobs"]


def _check_types(logits: torch.Tensor, ids: torch.Tensor, **_: object) -> None:
    _check.tensor("logits", logits, floating=True)
    if logits.ndim == 0:
        raise ValueError("logits must have shape [..., V] with V >= 1, got []")
    _check.tensor("ids", ids, dtype=torch.int64, device=logits.device)


@overload
def token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: Literal[False] = False,
    backend: str = "auto",
) -> torch.Tensor: ...
@overload
def token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: Literal[True],
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@public_op("token_logprobs", _check_types)
def token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute log softmax(logits / temperature) at ``ids``, and that distribution's entropy; both differentiable.

    Args:
        logits: floating point [..., V]; -inf rules a token out (probability 0, gradient 0). A row of nothing but
            -inf, or with NaN, gives NaN.
        ids: int64 [...], in [0, V).
        temperature: > 0. Below 1.2e-38 plain torch computes in float64, whatever the backend.
        return_entropy: also return the entropy in nats.

    Returns:
        logprobs [...] (and entropy [...]), float32; float64 for float64 logits.

    Raises:
        ValueError: a shape that does not fit, a temperature that is not positive, an id outside the vocabulary (on a
            GPU nothing is raised for it and its log-probability is NaN), float64 with a backend of our kernels.
        TypeError: a wrong dtype.
    """
    shape = logits.shape
    if ids.shape != shape[:-1]:
        _check.shape("ids", ids, shape[:-1])
    if shape[-1] == 0:
        raise ValueError(f"logits must have shape [..., V] with V >= 1, got {list(shape)}")
    if not (type(temperature) is float and reference.MIN_FLOAT32_TEMPERATURE < temperature <= reference.MOST_FLOAT32):
        _check.positive("temperature", temperature)
        temperature = reference.bounded(temperature, logits.dtype)
        if temperature < reference.MIN_FLOAT32_TEMPERATURE and logits.dtype != torch.float64:
            wide = token_logprobs(logits.double(), ids, temperature=temperature, return_entropy=True)
            return (wide[0].float(), wide[1].float()) if return_entropy else wide[0].float()
    chosen = choose("token_logprobs", logits, backend)
    if chosen == "torch":
        _check.indices("ids", ids, shape[-1])
        logprobs, entropy = reference.token_logprobs(logits, ids, temperature, return_entropy)
        return (logprobs, entropy) if return_entropy else logprobs
    if chosen == "triton":
        _check.indices("ids", ids, shape[-1])
    elif logits.dtype == torch.float16:
        logits = logits.float()
    rows, flat = logits, ids
    if len(shape) != 2:
        rows, flat = logits.reshape(-1, shape[-1]), ids.reshape(-1)
    logprobs, entropy, _ = _gradients.apply(
        TokenLogprobs, rows.contiguous(), flat.contiguous(), temperature, return_entropy, chosen
    )
    if len(shape) != 2:
        logprobs = logprobs.view(ids.shape)
        entropy = entropy.view(ids.shape) if return_entropy else entropy
    return (logprobs, entropy) if return_entropy else logprobs
