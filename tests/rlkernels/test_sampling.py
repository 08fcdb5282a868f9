"""sample_tokens and verify_drafts: exact against a plain definition, token by token to each other; keyed_uniform."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pretend_gpu import GPUTensor, pretended
from sampling_cases import SETTINGS, check_no_gradient, distribution, rows_of_every_kind, uniforms
from scipy import stats
from support import Launches, assert_equal, every_isa

import rlkernels
from rlkernels.sampling import reference


def test_weights_are_exponentials():
    z = -torch.rand(100_000) * 40
    exact = z.double().exp() * 2.0**reference.WEIGHT_BITS
    error = (reference.token_weights(z).double() - exact).abs() / exact
    assert error[exact > 2**20].max() < 4e-6  # |z| * 2**-24 from rounding z * log2(e), 1e-7 from the polynomial
    special = torch.tensor([0.0, -29.2, -1e30, -torch.inf])
    assert reference.token_weights(special).tolist() == [2**reference.WEIGHT_BITS, 0, 0, 0]


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
@pytest.mark.parametrize("vocab", [1, 2, 37, 1023, 2053])
def test_inverts_the_cumulative_distribution(temperature, top_p, top_k, vocab):
    logits = torch.randn(64, vocab) * 3
    random_numbers = uniforms(64)
    logits[:40, 1::2] = -torch.inf
    ids, logprobs = rlkernels.sample_tokens(logits, random_numbers, temperature=temperature, top_p=top_p, top_k=top_k)
    if temperature == 0:
        assert torch.equal(ids, logits.argmax(1)) and (logprobs == 0).all()
        return
    for row, number, token, logprob in zip(logits, random_numbers, ids, logprobs):
        probs = distribution(row, temperature, top_p, top_k)
        assert probs[token] > 0
        upper = float(probs.cumsum(0)[token])
        assert upper - float(probs[token]) - 2e-6 <= float(number) <= upper + 2e-6
        assert abs(float(logprob) - math.log(probs[token])) < 1e-5 * max(1, 1 / temperature)


def test_weights_are_the_same_integers_on_every_instruction_set(cpu_isa):
    z = torch.cat([-torch.rand(50_021) * 45, torch.tensor([0.0, -0.0, -1e-45, -29.2, -1e30, -torch.inf])])
    assert torch.equal(torch.ops.rlkernels.token_weights(z), reference.token_weights(z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 2, 15, 300, 1023, 1025, 2053, 20_011])
@pytest.mark.usefixtures("compiled")
def test_native_equals_reference_to_the_bit(vocab, dtype):
    logits = rows_of_every_kind(vocab).to(dtype)
    num_rows = len(logits)
    random_numbers = uniforms(num_rows, vocab)
    settings = [*SETTINGS, (1.0, 0.999, 0), (0.8, 1e-6, 0), (1.0, 1.0, 3000), (1.0, 0.95, vocab), (30.0, 0.7, 0)]
    by_row = [torch.tensor(values)[torch.arange(num_rows) % len(SETTINGS)] for values in zip(*SETTINGS)]
    for setting in [*(settings[5:] if vocab > 10_000 else settings), by_row]:
        tensors = [torch.as_tensor(value).expand(num_rows).contiguous() for value in setting]
        ids, logprobs = reference.sample_tokens(logits, random_numbers, *tensors)
        for isa in every_isa():
            result = torch.ops.rlkernels.sample_tokens(logits, random_numbers, *tensors)
            assert torch.equal(result[0], ids) and torch.equal(result[1], logprobs), (isa, setting)


@pytest.mark.parametrize("temperature", [1e-45, 1e-42, 5e-40, 2.9e-39, 1e-38])
@pytest.mark.usefixtures("compiled")
def test_temperatures_whose_inverse_is_no_float32(temperature):
    """The inverse is then the largest float32, and decides which tokens belong to the nucleus."""
    logits = torch.cat([torch.randn(8, 37), torch.randn(8, 37) * temperature, torch.zeros(8, 37)])
    for filters in ({}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 5, "top_p": 0.5}):
        native, expected = (
            rlkernels.sample_tokens(logits, uniforms(24), temperature=temperature, **filters, backend=backend)
            for backend in ("cpu", "torch")
        )
        assert_equal(native, expected)


def test_a_row_is_the_same_in_any_batch_on_any_number_of_threads(set_threads):
    logits = torch.randn(64, 5000)
    random_numbers = uniforms(64)
    order = torch.randperm(64)
    batched = rlkernels.sample_tokens(logits, random_numbers, top_p=0.95)
    set_threads(1)
    shuffled = rlkernels.sample_tokens(logits[order], random_numbers[order], top_p=0.95)
    assert_equal([t[order] for t in batched], list(shuffled))


def test_ties_go_to_lower_ids():
    logits = torch.zeros(3, 6)
    ids, logprobs = rlkernels.sample_tokens(logits, torch.full((3,), 0.99), top_k=torch.tensor([1, 3, 0]), top_p=0.99)
    assert ids.tolist() == [0, 2, 5]
    torch.testing.assert_close(logprobs, -torch.tensor([1.0, 3.0, 6.0]).log())
    ids, _ = rlkernels.sample_tokens(logits, torch.full((3,), 0.99), top_p=0.4)  # two of six are 1/3, three are 1/2
    assert ids.tolist() == [2, 2, 2]
    assert rlkernels.sample_tokens(logits, torch.full((3,), 0.99), temperature=0)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_without_a_distribution(value):
    logits = torch.randn(4, 9)
    random_numbers = uniforms(4)
    logits[2] = value
    bad_value = {math.nan: "nan", math.inf: "inf", -math.inf: "nothing but -inf"}[value]
    with pytest.raises(ValueError, match=rf"logits must be .*, got {bad_value} in row 2 \(1 bad rows\)"):
        rlkernels.sample_tokens(logits, random_numbers)
    ids, logprobs = rlkernels.sample_tokens(logits, random_numbers, validate=False)
    assert ids[2] == -1 and logprobs[2].isnan() and logprobs.isnan().sum() == 1
    with pytest.raises(ValueError, match=r"uniforms must lie in \[0, 1\), got 1.0 in row 1"):
        rlkernels.sample_tokens(torch.randn(2, 3), torch.tensor([0.5, 1.0]))


def test_views_dtypes_and_empty_batches():
    wide = torch.randn(16, 600, dtype=torch.bfloat16)
    random_numbers = uniforms(16)
    view = wide[:, ::2]
    expected = rlkernels.sample_tokens(view.float().contiguous(), random_numbers, top_p=0.9)
    assert_equal(rlkernels.sample_tokens(view, random_numbers, top_p=0.9), expected)
    ids, logprobs = rlkernels.sample_tokens(torch.zeros(0, 5), torch.zeros(0))
    assert ids.shape == logprobs.shape == (0,) and ids.dtype == torch.int64


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_filters_nothing_is_sorted_and_the_tokens_are_the_same(temperature):
    logits = torch.randn(64, 2053) * 3
    random_numbers = uniforms(64)
    logits[:, 5] = -torch.inf
    logits[3, 7:] = -torch.inf
    logits[9, 4] = torch.nan
    logits[11] = -torch.inf
    options = {"temperature": temperature, "validate": False, "backend": "torch"}
    with Launches() as launches:
        result = rlkernels.sample_tokens(logits, random_numbers, **options)
        rlkernels.verify_drafts(logits, [[1] * 63], [0, 64], random_numbers, **options)
    with Launches() as sorted_launches:  # nothing is cut off, but that is known row by row only
        expected = rlkernels.sample_tokens(logits, random_numbers, top_p=torch.ones(64), **options)
    sorts = {"sort", "argsort", "topk", "msort"}
    assert not sorts & launches.counts.keys() and sorts & sorted_launches.counts.keys()
    assert not launches.waits
    assert_equal(result, expected, equal_nan=True)
    assert (result[0] == -1).nonzero().flatten().tolist() == [9, 11]


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 7), (0.6, 30), (0.6, 0), (1.0, 0), (0.9, 40), (0.999, 0)])
@pytest.mark.parametrize("per_row", [False, True])
def test_few_candidates_stand_for_the_whole_vocabulary(monkeypatch, top_p, top_k, per_row):
    """Ties, rows that are ruled out but for a token, flat ones whose nucleus is no few: all as by a sort."""
    logits = torch.cat([rows_of_every_kind(500), torch.randn(3, 500) * 9])
    logits[-1, 3] = torch.nan
    random_numbers = uniforms(len(logits))
    options = {"top_p": top_p, "top_k": top_k, "validate": False, "backend": "torch"}
    if per_row:
        kinds = torch.arange(len(logits)) % 3
        options["top_p"] = torch.tensor([top_p, 1.0, 0.5])[kinds]
        options["top_k"] = torch.tensor([top_k, 0, 9])[kinds]
    expected = rlkernels.sample_tokens(logits, random_numbers, **options)
    monkeypatch.setattr(reference, "MAX_CANDIDATES", 32)
    for rows in (slice(None), slice(0, 6), slice(-3, None)):
        row_options = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        ids, logprobs = rlkernels.sample_tokens(logits[rows], random_numbers[rows], **row_options)
        assert torch.equal(ids, expected[0][rows])
        assert torch.equal(logprobs.nan_to_num(7), expected[1][rows].nan_to_num(7))


@pytest.mark.parametrize(
    ("options", "waits"), [({"top_k": 50}, 0), ({"top_p": 0.9}, 1), ({"top_p": 0.9, "top_k": 50}, 0)]
)
def test_filters_do_not_sort_the_vocabulary(options, waits):
    logits = torch.randn(8, 5003) * 9
    random_numbers = uniforms(8)
    drafts = [[1] * 7], [0, 8]
    with Launches() as launches:
        rlkernels.sample_tokens(logits, random_numbers, validate=False, backend="torch", **options)
    assert "sort" not in launches.counts and len(launches.waits) == waits
    with Launches() as launches:
        rlkernels.verify_drafts(logits, *drafts, random_numbers, validate=False, backend="torch", **options)
    assert "sort" not in launches.counts
    with Launches() as launches:  # too flat: its nucleus is nearly all of it
        rlkernels.sample_tokens(logits * 0, random_numbers, validate=False, backend="torch", top_p=0.9)
    assert "sort" in launches.counts


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"temperature": -1.0}, ValueError, "temperature must be >= 0, got -1.0"),
    ({"temperature": math.nan}, ValueError, "temperature must be >= 0, got nan"),
    ({"temperature": torch.ones(3)}, ValueError, r"temperature must have shape \[2\], got \[3\]"),
    ({"temperature": 1e300}, ValueError, r"temperature must be finite in float32, got 1e\+300"),
    ({"temperature": math.inf}, ValueError, "temperature must be finite in float32, got inf"),
    ({"top_p": 0.0}, ValueError, "top_p must be > 0 and <= 1, got 0.0"),
    ({"top_p": torch.tensor([0.5, 1.5])}, ValueError, "top_p must be > 0 and <= 1, got 1.5"),
    ({"top_k": -1}, ValueError, "top_k must be >= 0, got -1"),
    ({"top_p": None}, TypeError, "top_p must be a number, got None"),
    ({"top_k": 2.5}, TypeError, "top_k must be an integer, got 2.5"),
    ({"top_k": torch.ones(2)}, TypeError, "top_k must have an integer dtype, got torch.float32"),
    ({"logits": torch.zeros(2, 4, dtype=torch.int64)}, TypeError, "logits must be floating point"),
    ({"logits": torch.zeros(2, 0)}, ValueError, "the vocabulary, .* must be between 1 and 1048576, got 0"),
    ({"uniforms": torch.zeros(2).double()}, TypeError, "uniforms must have dtype torch.float32"),
    ({"uniforms": torch.zeros(3)}, ValueError, r"uniforms must have shape \[2\]"),
])  # fmt: skip
def test_bad_arguments(change, error, message):
    arguments = {"logits": torch.zeros(2, 4), "uniforms": torch.zeros(2)} | change
    with pytest.raises(error, match=message):
        rlkernels.sample_tokens(arguments.pop("logits"), arguments.pop("uniforms"), **arguments)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_no_gradient_is_recorded(backend):
    check_no_gradient(backend)


def test_top_k_beyond_the_vocabulary_is_off():
    logits = torch.randn(6, 9)
    random_numbers = uniforms(6)
    expected = rlkernels.sample_tokens(logits, random_numbers)
    assert_equal(rlkernels.sample_tokens(logits, random_numbers, top_k=2**70), expected)


def test_native_verification_equals_reference(cpu_isa):
    starts = torch.tensor([0, 1, 4, 12, 13, 32])
    logits = rows_of_every_kind(37)
    random_numbers = uniforms(32)
    temperatures = torch.tensor([1.0, 0.0, 0.7, 1.0, 0.4])
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.5, 0.9])
    top_k = torch.tensor([0, 0, 3, 0, 9])
    lengths = starts.diff()
    plain, _ = reference.sample_tokens(
        logits, random_numbers, *(s.repeat_interleave(lengths) for s in (temperatures, top_p, top_k))
    )
    for wrong in range(32):  # the plain tokens as drafts, with one of them spoilt
        draft = plain.clone()
        draft[wrong] = (draft[wrong] + 1) % 37
        drafts = torch.cat([draft[a : b - 1] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist())])
        result = torch.ops.rlkernels.verify_drafts(logits, drafts, starts, random_numbers, temperatures, top_p, top_k)
        for a, b in zip(
            result, reference.verify_drafts(logits, drafts, starts, random_numbers, temperatures, top_p, top_k)
        ):
            assert torch.equal(a, b)


def target_logits(prefix: tuple[int, ...], vocab: int) -> torch.Tensor:
    """Return logits of a made-up language model that depend on all tokens before."""
    generator = torch.Generator().manual_seed(hash(prefix) % 2**31)
    return torch.randn(vocab, generator=generator) * 2


def decode(sample: int, length: int, vocab: int, settings: dict, draft_of) -> tuple[list[int], list[float], int]:
    """Decode ``length`` tokens with drafts of ``draft_of(prefix)``; return tokens, log-probabilities and steps."""
    tokens: list[int] = []
    scores: list[float] = []
    steps = 0
    while len(tokens) < length:
        draft = draft_of(tuple(tokens))[: length - len(tokens) - 1]
        logits = torch.stack([target_logits((*tokens, *draft[:i]), vocab) for i in range(len(draft) + 1)])
        positions = torch.arange(len(tokens), len(tokens) + len(draft) + 1)
        random_numbers = rlkernels.keyed_uniform(3, torch.full_like(positions, sample), positions)
        accepted, ids, logprobs = rlkernels.verify_drafts(
            logits, [draft], [0, len(draft) + 1], random_numbers, **settings
        )
        num_taken = int(accepted[0]) + 1
        assert (ids[num_taken:] == -1).all() and (logprobs[num_taken:] == 0).all()
        tokens += ids[:num_taken].tolist()
        scores += logprobs[:num_taken].tolist()
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
        """Return a draft that is right for some tokens, then arbitrary."""
        right = data.draw(st.integers(0, 4))
        return plain[len(prefix) : len(prefix) + right] + data.draw(st.lists(st.integers(0, vocab - 1), max_size=3))

    assert decode(sample, 9, vocab, settings, draft_of)[:2] == (plain, scores)


def test_ragged_batch_equals_one_sequence_at_a_time():
    drafts = [[1, 2, 3], [], [4], [0] * 9]
    starts = torch.tensor([0, 4, 5, 7, 17])
    logits = torch.randn(17, 5) * 2
    random_numbers = uniforms(17)
    temperatures = torch.tensor([1.0, 0.0, 0.5, 2.0])
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.95])
    top_k = torch.tensor([0, 0, 3, 4])
    accepted, ids, logprobs = rlkernels.verify_drafts(
        logits, drafts, starts, random_numbers, temperature=temperatures, top_p=top_p, top_k=top_k
    )
    flat = torch.tensor([token for draft in drafts for token in draft])
    flat_result = rlkernels.verify_drafts(
        logits, flat, starts, random_numbers, temperature=temperatures, top_p=top_p, top_k=top_k
    )
    assert_equal(flat_result, (accepted, ids, logprobs))
    for b, draft in enumerate(drafts):
        rows = slice(starts[b], starts[b + 1])
        single = rlkernels.verify_drafts(
            logits[rows],
            [draft],
            [0, len(draft) + 1],
            random_numbers[rows],
            temperature=temperatures[b],
            top_p=top_p[b],
            top_k=top_k[b],
        )
        assert single[0].item() == accepted[b]
        assert torch.equal(single[1], ids[rows]) and torch.equal(single[2], logprobs[rows])


def test_verification_without_validation_waits_for_nothing():
    drafts = torch.tensor([3, 4, 5, 6, 7, 8])
    logits = torch.randn(9, 20)
    random_numbers = uniforms(9)
    expected = rlkernels.verify_drafts(logits, drafts, [0, 1, 4, 9], random_numbers)
    with Launches() as launches:
        result = rlkernels.verify_drafts(logits, drafts, [0, 1, 4, 9], random_numbers, validate=False, backend="torch")
    assert not launches.waits
    torch.testing.assert_close(result, expected, atol=2e-7, rtol=2e-7)


def test_verification_on_a_gpu_launches_little_beside_the_sample():
    logits = torch.randn(9, 20)
    random_numbers = uniforms(9)
    drafts = torch.tensor([3, 4, 5, 6, 7, 8])
    with pretended():
        on_gpu = [GPUTensor(t) for t in (logits, random_numbers, drafts)]
        for _ in range(2):  # settings that are numbers are made once
            GPUTensor.launches.clear()
            rlkernels.sample_tokens(*on_gpu[:2], top_k=3, validate=False, backend="torch")
            sample = GPUTensor.launches.total()
        for _ in range(2):
            GPUTensor.launches.clear()
            rlkernels.verify_drafts(
                on_gpu[0], on_gpu[2], [0, 1, 4, 9], on_gpu[1], top_k=3, validate=False, backend="torch"
            )
        assert GPUTensor.launches.total() - sample <= 9


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


def test_known_answer_of_keyed_numbers():
    # Philox4x32-10 with counter and key all zero: first word 0x6627e8d5 (Random123's known-answer file)
    word = 0x6627E8D5
    number = rlkernels.keyed_uniform(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert number.item() == ((word >> 9) + 0.5) * 2.0**-23


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1, 123456789012345])
def test_native_keyed_numbers_equal_the_reference(cpu_isa, seed):
    ids = torch.randint(-(2**63), 2**63 - 1, (2053,))
    positions = torch.randint(0, 2**40, (2053,))
    numbers = rlkernels.keyed_uniform(seed, ids, positions, backend="cpu")
    assert torch.equal(numbers, rlkernels.keyed_uniform(seed, ids, positions, backend="torch"))


def test_a_number_depends_on_nothing_but_its_key():
    ids = torch.arange(1000).flip(0)[::2]
    positions = torch.arange(0, 3000, 3)[:500]
    batched = rlkernels.keyed_uniform(5, ids, positions)
    single = torch.cat([rlkernels.keyed_uniform(5, ids[i : i + 1], positions[i : i + 1]) for i in range(500)])
    assert torch.equal(batched, single)
    assert rlkernels.keyed_uniform(5, ids[:0], positions[:0]).shape == (0,)


@pytest.mark.parametrize("vary", ["seed", "sample", "position"])
def test_numbers_are_uniform_along_every_part_of_the_key(vary):
    n = 20_000
    zero = torch.zeros(n, dtype=torch.int64)
    count = torch.arange(n)
    if vary == "seed":
        key = torch.zeros(1, dtype=torch.int64)
        sample = torch.cat([rlkernels.keyed_uniform(s, key, key) for s in range(n)])
    else:
        sample = rlkernels.keyed_uniform(1, count if vary == "sample" else zero, zero if vary == "sample" else count)
    assert 0 < sample.min() and sample.max() < 1
    assert stats.kstest(sample.numpy().astype(np.float64), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 4 / np.sqrt(n)


ID = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"sample_ids": torch.zeros(1)}, TypeError, "sample_ids must have dtype torch.int64"),
    ({"positions": torch.zeros(3).long()}, ValueError, r"positions must have shape \[1\], got \[3\]"),
    ({"sample_ids": [1]}, TypeError, "sample_ids must be a torch.Tensor, got list"),
    *(({"seed": seed}, TypeError, f"seed must be an integer, got {seed!r}") for seed in ("3", 1.5, None)),
    *(({"seed": seed}, ValueError, f"seed must be between {-(2**63)} and {2**64 - 1}, got {seed}")
      for seed in (2**64, 2**70, -(2**63) - 1)),
])  # fmt: skip
def test_bad_keys(changes, error, message):
    with pytest.raises(error, match=message):
        rlkernels.keyed_uniform(**{"seed": 0, "sample_ids": ID, "positions": ID} | changes)
