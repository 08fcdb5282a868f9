"""Sampling: one token per row of logits. Verification: a batch of drafts at once."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import rlkernels
from bench import Case, read_bandwidth
from rlkernels.sampling import reference

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "T 0.7, top_k 50, top_p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}


def heated(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return float32 logits by a temperature; samplers of others skip the division by 1, too."""
    return logits.float() if temperature == 1 else logits.float() / temperature


def plain_torch(logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Callable:
    """Return the sampler of a trainer without a kernel: softmax, sort if needed, multinomial; it draws other tokens."""

    def run() -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(1)
        scaled = heated(logits, temperature)
        if top_k:
            scaled, ids = scaled.topk(top_k, dim=1)
        elif top_p < 1:
            scaled, ids = scaled.sort(dim=1, descending=True)
        probs = scaled.softmax(1)
        if top_p < 1:
            probs = probs.masked_fill(probs.cumsum(1) - probs >= top_p, 0.0)
        places = torch.multinomial(probs, 1)
        return places if top_k == 0 and top_p == 1 else ids.gather(1, places)

    return run


def compare_tokens(out: Any, expected: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Compare the tokens of our sampler with the reference; plain torch uses other random numbers."""
    if isinstance(out, torch.Tensor):
        return "other numbers"
    return "exact" if torch.equal(out[0], expected[0]) else "differs"


def logits_of(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Make Gaussian logits, wider for a large vocabulary: an entropy of a few nats, as in language models."""
    scale = 3.0 if vocab < 1000 else 5.0
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)


def cases(quick: bool) -> Iterator[Case]:
    for rows, vocab in ((256, 300), (4, 20_000)) if quick else ((256, 300), (64, 151_936)):
        for dtype in (torch.float32, torch.bfloat16):
            logits = logits_of(rows, vocab, dtype)
            uniforms = rlkernels.keyed_uniform(0, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
            for name, settings in SETTINGS.items():
                if dtype == torch.bfloat16 and name not in ("plain", "top_p 0.95"):
                    continue
                yield Case(
                    op="sample_tokens",
                    shape=f"[{rows}, {vocab}] {name}",
                    dtype=str(dtype).removeprefix("torch."),
                    providers={
                        "rlkernels": partial(rlkernels.sample_tokens, logits, uniforms, **settings),
                        "plain torch": plain_torch(logits, **settings),
                    },
                    reference=partial(rlkernels.sample_tokens, logits, uniforms, backend="torch", **settings),
                    compare=compare_tokens,
                    limit=("read bandwidth", logits.nbytes / read_bandwidth(logits.nbytes)),
                    work=("tokens", rows),
                )
    yield verification(*(8, 2000) if quick else (16, 151_936))


def verification(sequences: int, vocab: int, draft_len: int = 7) -> Case:
    """Make the case of drafts of which half are right throughout and half wrong at the third token."""
    rows = sequences * (draft_len + 1)
    logits = logits_of(rows, vocab, torch.float32)
    uniforms = rlkernels.keyed_uniform(0, torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    drafts = rlkernels.sample_tokens(logits, uniforms)[0].view(sequences, -1)[:, :draft_len].clone()
    drafts[::2, 2] = (drafts[::2, 2] + 1) % vocab
    starts = torch.arange(0, rows + 1, draft_len + 1)
    settings = [torch.ones(sequences), torch.ones(sequences), torch.zeros(sequences, dtype=torch.int64)]
    return Case(
        op="verify_drafts",
        shape=f"{sequences} drafts of {draft_len}, V={vocab}",
        providers={
            "rlkernels": partial(rlkernels.verify_drafts, logits, drafts.flatten(), starts, uniforms),
            "torch reference": partial(reference.verify_drafts, logits, drafts.flatten(), starts, uniforms, *settings),
        },
        work=("drafts", sequences),
    )
