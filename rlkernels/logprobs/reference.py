"""Token log-probabilities in plain torch: the single source of truth for tests and benchmarks."""

import torch


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of ``ids`` and entropy, both [...], in float32 (float64 for float64 logits [..., V])."""
    work = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(work / temperature, dim=-1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)  # p log p is 0 at p = 0
    return log_p.gather(-1, ids[..., None])[..., 0], entropy


def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of the logits of hidden [..., H] under weight [V, H] and bias [V], which are all held."""
    return token_logprobs(torch.nn.functional.linear(hidden, weight, bias), ids, temperature)
