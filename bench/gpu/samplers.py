"""Peers that draw tokens. They use other noise, so the check is whether each token was possible."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.rivals import Rival

Call = Callable[[], Any]
TOP_P_SLACK = 1e-3  # of top_p: sums of 151,936 rounded probabilities


def possible(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Return bool [T, V]: the tokens that top-k, then top-p allow, with ties of the last one."""
    probs = (logits.double() / temperature).softmax(-1)
    descending = probs.sort(-1, descending=True).values
    if top_k:
        probs = probs.masked_fill(probs < descending[:, top_k - 1 : top_k], 0.0)
        probs, descending = (t / descending[:, :top_k].sum(-1, keepdim=True) for t in (probs, descending[:, :top_k]))
    mass_above = descending.cumsum(-1) - descending  # mass above each
    last_place = (mass_above < top_p + TOP_P_SLACK).sum(-1, keepdim=True) - 1
    return (probs >= descending.gather(-1, last_place)) & (probs > 0)


def share_of_impossible(allowed: torch.Tensor, returned: Any) -> tuple[float, float]:
    """Return (share of drawn tokens that were impossible, 0)."""
    ids = (returned[0] if isinstance(returned, tuple) else returned).flatten().long()
    if ids.shape != allowed.shape[:1] or bool(((ids < 0) | (ids >= allowed.shape[1])).any()):
        return float("inf"), 0.0
    return 1.0 - allowed.gather(1, ids[:, None]).double().mean().item(), 0.0


def race(logits: torch.Tensor, noise: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens by the smallest of exponential waiting times, with log-probabilities; ``noise`` [T, V]."""
    logprobs = (logits.float() / temperature).log_softmax(-1)
    ids = (logprobs - noise.log()).argmax(-1, keepdim=True)
    return ids[:, 0], logprobs.gather(1, ids)[:, 0]


def rivals(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> dict[str, Rival]:
    """Make the peers for logits [T, V]; temperature above 0."""
    allowed = possible(logits, temperature, top_p, top_k)
    rows = len(logits)
    judge = partial(share_of_impossible, allowed)

    def multinomial() -> Call:
        def call() -> tuple[torch.Tensor, torch.Tensor]:
            logprobs = (logits.float() / temperature).log_softmax(-1)
            ids = torch.multinomial(logprobs.exp(), 1)
            return ids[:, 0], logprobs.gather(1, ids)[:, 0]

        return call

    def compiled() -> Call:
        run = torch.compile(race, dynamic=False)
        return lambda: run(logits, torch.empty_like(logits, dtype=torch.float32).exponential_(), temperature)

    def flashinfer() -> Call:
        from flashinfer import sampling

        k = torch.full((rows,), top_k or logits.shape[1], dtype=torch.int32, device=logits.device)
        p = torch.full((rows,), top_p, device=logits.device)
        if top_k or top_p < 1:
            return lambda: sampling.top_k_top_p_sampling_from_logits(logits.float() / temperature, k, p)
        return lambda: sampling.sampling_from_logits(logits.float() / temperature)

    plain = (
        {} if top_k or top_p < 1 else {"torch multinomial": multinomial, "torch.compile, exponential race": compiled}
    )
    return {name: Rival(make, judge=judge) for name, make in {**plain, "FlashInfer": flashinfer}.items()}
