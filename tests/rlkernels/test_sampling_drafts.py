"""verify_drafts: equal to the reference, token by token to sampling without drafts, and statistically."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sampling_cases import SETTINGS, distribution, rows_of_every_kind, uniforms
from scipy import stats
from support import WaitsForNothing

import rlkernels
from rlkernels.sampling import reference


def test_native_verification_equals_reference(cpu_isa):
    starts = torch.tensor([0, 1, 4, 12, 13, 32])
    logits, u = rows_of_every_kind(37), uniforms(32)
    t, p = torch.tensor([1.0, 0.0, 0.7, 1.0, 0.4]), torch.tensor([1.0, 1.0, 0.9, 0.5, 0.9])
    k = torch.tensor([0, 0, 3, 0, 9])
    lengths = starts.diff()
    plain, _ = reference.sample_tokens(logits, u, *(s.repeat_interleave(lengths) for s in (t, p, k)))
    for wrong in range(32):  # the plain tokens as drafts, with one of them spoilt
        draft = plain.clone()
        draft[wrong] = (draft[wrong] + 1) % 37
        drafts = torch.cat([draft[a : b - 1] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist())])
        ours = torch.ops.rlkernels.verify_drafts(logits, drafts, starts, u, t, p, k)
        for a, b in zip(ours, reference.verify_drafts(logits, drafts, starts, u, t, p, k)):
            assert torch.equal(a, b)


def target_logits(prefix: tuple[int, ...], vocab: int) -> torch.Tensor:
    """A made-up language model: logits that depend on everything before."""
    generator = torch.Generator().manual_seed(hash(prefix) % 2**31)
    return torch.randn(vocab, generator=generator) * 2


def decode(sample: int, length: int, vocab: int, settings: dict, draft_of) -> tuple[list[int], list[float], int]:
    """Decodes ``length`` tokens, drafting with ``draft_of(prefix)``; returns tokens, log-probabilities and steps."""
    tokens: list[int] = []
    scores: list[float] = []
    steps = 0
    while len(tokens) < length:
        draft = draft_of(tuple(tokens))[: length - len(tokens) - 1]
        logits = torch.stack([target_logits((*tokens, *draft[:i]), vocab) for i in range(len(draft) + 1)])
        positions = torch.arange(len(tokens), len(tokens) + len(draft) + 1)
        u = rlkernels.keyed_uniform(3, torch.full_like(positions, sample), positions)
        accepted, ids, logprobs = rlkernels.verify_drafts(logits, [draft], [0, len(draft) + 1], u, **settings)
        taken = int(accepted[0]) + 1
        assert (ids[taken:] == -1).all() and (logprobs[taken:] == 0).all()
        tokens += ids[:taken].tolist()
        scores += logprobs[:taken].tolist()
        steps += 1
    return tokens, scores, steps


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
def test_drafts_change_no_token(temperature, top_p, top_k):
    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    vocab, length = 11, 24
    for sample in range(3):
        plain, scores, steps = decode(sample, length, vocab, settings, lambda prefix: [])
        assert steps == length
        drafters = {
            "right": lambda prefix, plain=plain: plain[len(prefix) : len(prefix) + 5],
            "wrong": lambda prefix, plain=plain: [(t + 1) % vocab for t in plain[len(prefix) : len(prefix) + 5]],
            "likely": lambda prefix: [int(target_logits(prefix, vocab).argmax())] * 4,
            "unlikely": lambda prefix: [int(target_logits(prefix, vocab).argmin())] * 4,
            "mixed": lambda prefix, plain=plain: [*plain[len(prefix) : len(prefix) + 3], 0, 0, 0],
        }
        taken = {}
        for name, draft_of in drafters.items():
            tokens, drafted_scores, taken[name] = decode(sample, length, vocab, settings, draft_of)
            assert tokens == plain and drafted_scores == scores, name
        assert taken["right"] == length / 6 and taken["wrong"] == length and taken["mixed"] <= length / 4


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 17, 300, 1023, 2053, 20_011]), st.sampled_from(SETTINGS), st.integers(0, 2**31), st.data()
)
def test_drafts_change_no_token_in_any_vocabulary(vocab, setting, sample, data):
    settings = dict(zip(("temperature", "top_p", "top_k"), setting))
    plain, scores, _ = decode(sample, 9, vocab, settings, lambda prefix: [])

    def draft_of(prefix):
        """Right for a while, then anything."""
        right = data.draw(st.integers(0, 4))
        return plain[len(prefix) : len(prefix) + right] + data.draw(st.lists(st.integers(0, vocab - 1), max_size=3))

    assert decode(sample, 9, vocab, settings, draft_of)[:2] == (plain, scores)


@pytest.mark.parametrize("draft", ["likely", "unlikely"])
def test_chi_square_of_tokens_drawn_with_drafts(draft):
    """Sequences of two tokens, the second of which depends on the first: both marginals and the pair."""
    vocab, n = 6, 20_000
    first = target_logits((), vocab)
    guess = int(first.argmax() if draft == "likely" else first.argmin())
    rows = torch.stack([first, target_logits((guess,), vocab)]).repeat(n, 1)
    accepted, ids, _ = rlkernels.verify_drafts(
        rows, torch.full((n,), guess), torch.arange(0, 2 * n + 1, 2), uniforms(2 * n, 11)
    )
    drawn = ids.view(n, 2)
    counts = np.bincount(drawn[:, 0].numpy(), minlength=vocab)
    assert stats.chisquare(counts, distribution(first, 1.0, 1.0, 0).numpy() * n).pvalue > 1e-3
    assert torch.equal(accepted == 1, drawn[:, 0] == guess)
    second = drawn[accepted == 1, 1].numpy()
    wanted = distribution(rows[1], 1.0, 1.0, 0).numpy() * len(second)
    many = wanted >= 5
    counts = np.bincount(second, minlength=vocab)
    counts = np.append(counts[many], counts[~many].sum())
    wanted = np.append(wanted[many], wanted[~many].sum() + 1e-9)
    assert len(second) > 50 and stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue > 1e-3


def test_ragged_batch_equals_one_sequence_at_a_time():
    drafts = [[1, 2, 3], [], [4], [0] * 9]
    starts = torch.tensor([0, 4, 5, 7, 17])
    logits, u = torch.randn(17, 5) * 2, uniforms(17)
    t, p, k = torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([1.0, 1.0, 0.9, 0.95]), torch.tensor([0, 0, 3, 4])
    accepted, ids, logprobs = rlkernels.verify_drafts(logits, drafts, starts, u, temperature=t, top_p=p, top_k=k)
    flat = torch.tensor([token for draft in drafts for token in draft])
    again = rlkernels.verify_drafts(logits, flat, starts, u, temperature=t, top_p=p, top_k=k)
    assert all(torch.equal(a, b) for a, b in zip(again, (accepted, ids, logprobs)))
    for b, draft in enumerate(drafts):
        rows = slice(starts[b], starts[b + 1])
        alone = rlkernels.verify_drafts(
            logits[rows], [draft], [0, len(draft) + 1], u[rows], temperature=t[b], top_p=p[b], top_k=k[b]
        )
        assert alone[0].item() == accepted[b]
        assert torch.equal(alone[1], ids[rows]) and torch.equal(alone[2], logprobs[rows])


def test_verification_without_validation_waits_for_nothing():
    drafts, logits, u = torch.tensor([3, 4, 5, 6, 7, 8]), torch.randn(9, 20), uniforms(9)
    wanted = rlkernels.verify_drafts(logits, drafts, [0, 1, 4, 9], u)
    with WaitsForNothing():
        got = rlkernels.verify_drafts(logits, drafts, [0, 1, 4, 9], u, validate=False, backend="torch")
    torch.testing.assert_close(got, wanted, atol=2e-7, rtol=2e-7)


def test_acceptance_rate_is_the_probability_of_the_draft():
    row, n = torch.tensor([0.0, 1.0, 2.0, -1.0]), 20_000
    starts = torch.arange(0, 2 * n + 1, 2)
    for token in range(4):
        accepted, _, _ = rlkernels.verify_drafts(
            row.expand(2 * n, -1), torch.full((n,), token), starts, uniforms(2 * n, token), temperature=0.8
        )
        p = float(torch.softmax(row / 0.8, 0)[token])
        assert abs(float(accepted.float().mean()) - p) < 4 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize(
    ("drafts", "starts", "error", "message"),
    [
        ([[1], [2]], [0, 2, 3], ValueError, r"drafts must have the lengths \[1, 0\] .* got \[1, 1\]"),
        ([[1], []], [0, 2], ValueError, "starts must run from 0 to the number of rows, 3"),
        ([[1], []], [0, 0, 3], ValueError, "starts must ascend"),
        ([[1], []], None, TypeError, "starts must be a tensor or a list of integers, got None"),
        ([[2**70], []], [0, 2, 3], ValueError, "an entry of drafts must be between .* got 1180591620717411303424"),
        (torch.zeros(2).long(), [0, 2, 3], ValueError, r"drafts must have shape \[1\], got \[2\]"),
        ([[1.5], []], [0, 2, 3], TypeError, "an entry of drafts must be an integer, got 1.5"),
        ([1], [0, 2, 3], TypeError, r"drafts must be a tensor of all tokens or hold a sequence .* got \[1\]"),
        ([[1], []], [0, 2.5, 3], TypeError, "an entry of starts must be an integer, got 2.5"),
        ([[1], []], torch.tensor([0.0, 2.0, 3.0]), TypeError, "starts must have dtype .* got torch.float32"),
    ],
)
def test_bad_drafts(drafts, starts, error, message):
    with pytest.raises(error, match=message):
        rlkernels.verify_drafts(torch.zeros(3, 4), drafts, starts, torch.zeros(3))
