"""Log-probabilities of given tokens, and the entropy of their distributions."""

from typing import Literal, overload

import torch

from rlkernels import _check
from rlkernels import backend as _backend
from rlkernels.logprobs import _autograd, reference
from rlkernels.logprobs.linear import linear_token_logprobs

__all__ = ["linear_token_logprobs", "token_logprobs"]

if _backend.extension_error() is None:
    _autograd.register("rlkernels::token_logprobs")


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
        temperature: > 0.
        return_entropy: also return the entropy in nats.

    Returns:
        logprobs [...] (and entropy [...]), float32; float64 for float64 logits.

    Raises:
        ValueError: a shape that does not fit, a temperature that is not positive, an id outside the vocabulary (on a
            GPU nothing is raised for it and its log-probability is NaN).
        TypeError: a wrong dtype.
    """
    _check.tensor("logits", logits, floating=True)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape [..., V] with V >= 1, got {list(logits.shape)}")
    _check.tensor("ids", ids, dtype=torch.int64, device=logits.device)
    _check.shape("ids", ids, logits.shape[:-1])
    _check.positive("temperature", temperature)
    chosen = _backend.choose("token_logprobs", logits.device, backend)
    temperature = max(float(temperature), reference.LEAST_DOUBLE)
    if temperature < reference.LEAST and logits.dtype != torch.float64:
        wide = token_logprobs(logits.double(), ids, temperature=temperature, return_entropy=True)
        return (wide[0].float(), wide[1].float()) if return_entropy else wide[0].float()
    if chosen != "torch" and logits.dtype != torch.float64:
        logprobs, entropy = _fused(chosen, logits, ids, temperature, return_entropy)
    else:
        _check.indices("ids", ids, logits.shape[-1])
        logprobs, entropy = reference.token_logprobs(logits, ids, temperature, return_entropy)
    return (logprobs, entropy) if return_entropy else logprobs


def _fused(
    chosen: str, logits: torch.Tensor, ids: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, flat = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1).contiguous()
    if chosen == "triton":
        from rlkernels.logprobs import triton_kernels

        _check.indices("ids", ids, logits.shape[-1])
        logprobs, entropy, _ = triton_kernels.forward(rows.contiguous(), flat, temperature, with_entropy)
    else:
        rows = rows if rows.dtype in (torch.float32, torch.bfloat16) else rows.float()
        logprobs, entropy, _ = torch.ops.rlkernels.token_logprobs(rows.contiguous(), flat, temperature, with_entropy)
    return logprobs.view(ids.shape), entropy.view(ids.shape) if with_entropy else entropy
