"""Settings, rows and random numbers of every kind, and the plain distribution: what tests of sampling share."""

import torch
from support import assert_equal

import rlkernels

SETTINGS = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.9, 0), (1.0, 1.0, 5), (1.3, 0.8, 7), (0.0, 1.0, 0), (1e-3, 0.5, 3)]


def distribution(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Return the distribution that one row [V] is sampled from, in float64, by the words of the docstring."""
    order = logits.double().argsort(descending=True, stable=True)
    probs = torch.softmax(logits.double() / temperature, 0)[order]
    if top_k:
        probs[top_k:] = 0
        probs /= probs.sum()
    nucleus_size = int((probs.cumsum(0) < top_p).sum()) + 1
    probs[nucleus_size:] = 0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


def compute_logprobs(model, context: list[int], ids: list[int], sampling) -> list[float]:
    """Return log-probabilities of the tokens after a context, at the temperature, before top-k and top-p: one pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / sampling.temperature, -1)
    return [row[token].item() for row, token in zip(logprobs, ids)]


def uniforms(count: int, seed: int = 0) -> torch.Tensor:
    return rlkernels.keyed_uniform(seed, torch.zeros(count, dtype=torch.int64), torch.arange(count))


def rows_of_every_kind(vocab: int) -> torch.Tensor:
    """Return sharp, flat, tied, ruled-out and wide rows."""
    kinds = [
        torch.randn(6, vocab) * 3,
        torch.randn(6, vocab) * 0.01,
        torch.randn(6, vocab).round() * 2,  # ties, signed zeros
        torch.zeros(2, vocab),
        torch.randn(6, vocab).masked_fill(torch.rand(6, vocab) < 0.9, -torch.inf),
        torch.randn(6, vocab) * 20 + 100,
    ]
    rows = torch.cat(kinds)
    rows[:, -1] = rows[:, -1].nan_to_num(neginf=0.0)  # each row keeps a token
    return rows


def check_no_gradient(backend: str) -> None:
    """Check that drawn and verified tokens have no gradient."""
    logits = torch.randn(3, 9, requires_grad=True)
    u = uniforms(3)
    ids, logprobs = rlkernels.sample_tokens(logits, u, backend=backend)
    accepted, *verified = rlkernels.verify_drafts(logits, [[int(ids[0])], []], [0, 2, 3], u, backend=backend)
    assert not logprobs.requires_grad and not verified[1].requires_grad
    assert accepted[0] == 1
    assert_equal(verified, [ids, logprobs])
