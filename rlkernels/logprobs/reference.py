"""Token log-probabilities in plain torch: the single source of truth for tests and benchmarks."""

import torch

MIN_SAFE_TEMPERATURE = 2.0**-20  # above this temperature the quotient of a logit below 2**107 does not overflow
MIN_FLOAT32_TEMPERATURE = torch.finfo(torch.float32).tiny  # below this temperature the division is in float64
LEAST_DOUBLE = torch.finfo(torch.float64).tiny  # replaces all smaller temperatures
MOST_FLOAT32 = torch.finfo(torch.float32).max


def bounded(temperature: float, dtype: torch.dtype) -> float:
    """Return a temperature > 0 as one by which logits of a dtype are divided; infinity would make -inf NaN."""
    most = torch.finfo(torch.float64).max if dtype == torch.float64 else MOST_FLOAT32
    return min(max(float(temperature), LEAST_DOUBLE), most)


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0, with_entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of ``ids`` and entropy, both [...], in float32 (float64 for float64 logits [..., V]).

    The log-probability of an id outside the vocabulary is NaN: a GPU does not check ids before, and the gather would
    end its context. The entropy is [0] unless ``with_entropy``: it needs four more tensors of the size of the logits.
    """
    work = logits if logits.dtype == torch.float64 else logits.float()
    if temperature < MIN_SAFE_TEMPERATURE:
        work = work - work.detach().amax(-1, keepdim=True)
    log_p = torch.log_softmax(work if temperature == 1 else work / temperature, dim=-1)
    entropy = log_p.new_empty(0)
    if with_entropy:
        p = log_p.exp()
        entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)  # p log p is 0 at p = 0
    inside = (ids >= 0) & (ids < logits.shape[-1])
    logprobs = log_p.gather(-1, ids.where(inside, 0)[..., None])[..., 0]
    return logprobs.masked_fill(~inside, torch.nan), entropy


def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the logits of hidden [..., H] under weight [V, H] and bias [V], stored as a whole."""
    return token_logprobs(torch.nn.functional.linear(hidden, weight, bias), ids, temperature)
