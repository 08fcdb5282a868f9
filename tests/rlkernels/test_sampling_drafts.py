"""verify_drafts: equal to the reference, and token by token to sampling without drafts."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sampling_cases import SETTINGS, rows_of_every_kind, uniforms
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


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 17, 300, 1023, 2053, 20_011]), st.sampled_from(SETTINGS), st.integers(0, 2**31), st.data()
)
def test_drafts_change_no_token_in_any_vocabulary(vocab, setting, sample, data):
    settings = dict(zip(("temperature", "top_p", "top_k"), setting))
    plain, scores, steps = decode(sample, 9, vocab, settings, lambda prefix: [])
    right = decode(sample, 9, vocab, settings, lambda prefix: plain[len(prefix) : len(prefix) + 2])
    wrong = decode(sample, 9, vocab, settings, lambda prefix: [(plain[len(prefix)] + 1) % vocab])
    assert steps == 9 and right == (plain, scores, 3) and (vocab == 1 or wrong == (plain, scores, 9))

    def draft_of(prefix):
        """Right for a while, then anything."""
        right = data.draw(st.integers(0, 4))
        return plain[len(prefix) : len(prefix) + right] + data.draw(st.lists(st.integers(0, vocab - 1), max_size=3))

    assert decode(sample, 9, vocab, settings, draft_of)[:2] == (plain, scores)


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


@pytest.mark.parametrize(("drafts", "starts", "error", "message"), [
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
])  # fmt: skip
def test_bad_drafts(drafts, starts, error, message):
    with pytest.raises(error, match=message):
        rlkernels.verify_drafts(torch.zeros(3, 4), drafts, starts, torch.zeros(3))
