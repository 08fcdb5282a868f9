"""Peers that draw tokens. They use other noise, so the check is whether each token was possible."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.gpu.rivals import Rival, Rivals
from bench.sampling import heated
from rlkernels.proof.problem import ErrorBound
from rlkernels.sampling import reference

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


def share_of_impossible(allowed: torch.Tensor, returned: Any) -> ErrorBound:
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


def rivals(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> Rivals:
    """Make the peers for logits [T, V]; temperature above 0."""
    filtered = bool(top_k) or top_p < 1
    allowed = possible(logits, temperature, top_p, top_k)
    rows = len(logits)
    judge = partial(share_of_impossible, allowed)

    def multinomial(filters: Sequence[Callable[..., Any]] = ()) -> Call:
        def call() -> tuple[torch.Tensor, torch.Tensor]:
            scores = heated(logits, temperature)
            for keep in filters:
                scores = keep(None, scores)
            logprobs = scores.log_softmax(-1)
            ids = torch.multinomial(logprobs.exp(), 1)
            return ids[:, 0], logprobs.gather(1, ids)[:, 0]

        return call

    def transformers() -> Call:
        from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

        return multinomial([*([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p)])

    def compiled() -> Call:
        run = torch.compile(race, dynamic=False)
        return lambda: run(logits, torch.empty_like(logits, dtype=torch.float32).exponential_(), temperature)

    def flashinfer() -> Call:
        from flashinfer import sampling

        k = torch.full((rows,), top_k or logits.shape[1], dtype=torch.int32, device=logits.device)
        p = torch.full((rows,), top_p, device=logits.device)
        if filtered:
            return lambda: sampling.top_k_top_p_sampling_from_logits(heated(logits, temperature), k, p)
        return lambda: sampling.sampling_from_logits(heated(logits, temperature))

    makers: dict[str, Callable[[], Call]] = {"Transformers": transformers}
    if not filtered:
        makers = {"torch multinomial": multinomial, "torch.compile, exponential race": compiled}
    return {name: Rival(make, judge=judge) for name, make in {**makers, "FlashInfer": flashinfer}.items()}


def verifiers(logits: torch.Tensor, drafts: Sequence[Sequence[int]], starts: torch.Tensor, temperature: float
              ) -> Rivals:  # fmt: skip
    """Make rivals of verify_drafts: torch draws a token for every row, and drafts are accepted while they equal them.

    Args:
        logits: [R, V].
        drafts, starts: as for :func:`rlkernels.verify_drafts`.
    """
    bounds = starts.tolist()

    def verified(draw: Rival) -> Rival:
        def make() -> Call:
            call = draw.make()

            def verify() -> Any:
                draft_ids = torch.tensor([*itertools.chain(*drafts)], device=logits.device)
                rows = reference.draft_rows(bounds, logits.device)
                ids, logprobs = call()
                return reference.accept(ids, logprobs, draft_ids, rows)

            return verify

        def judge(returned: Any) -> ErrorBound:
            """Judge the new tokens: the accepted ones and one more of each sequence."""
            accepted, ids, _ = returned
            assert draw.judge
            if int((ids >= 0).sum()) != int(accepted.sum()) + len(accepted):
                return float("inf"), 0.0
            return draw.judge(ids.where(ids >= 0, logits.argmax(-1)))

        return Rival(make, judge=judge)

    drawn = rivals(logits, temperature, 1.0, 0)
    return {name: verified(rival) for name, rival in drawn.items() if name.startswith("torch")}
