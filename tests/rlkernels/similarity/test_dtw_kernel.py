"""The compiled dynamic time warping kernels against the reference, for every instruction set."""

import math

import pytest
import torch
from accuracy import assert_as_plain
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pretend_gpu import GPUTensor, pretended
from support import Launches, assert_equal, draw_series, every_isa

import rlkernels
from rlkernels.similarity import arguments, gpu, reference


def test_whole_numbers_are_exact_with_long_trajectories():
    x = torch.randint(0, 3, (2, 1023)).float()
    y = torch.randint(0, 3, (3, 2053)).float()
    cost = rlkernels.dtw(x, y, band=40, backend="cpu")
    assert torch.equal(cost, rlkernels.dtw(x, y, band=40, backend="torch"))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 70), st.integers(1, 5), st.none() | st.integers(0, 12))
@example(17, 2, 2, 3, 0)  # a pair's cost in a column at the edge of a band and in one inside it
def test_costs_of_any_shape_equal_the_reference(seed, rows, columns, features, band):
    torch.manual_seed(seed)
    n = 1 + seed % 5
    m = 1 + seed % 38
    whole_series = (
        draw_series(n, rows, features, whole_numbers=True),
        draw_series(m, columns, features, whole_numbers=True),
    )
    for options in ({"band": band}, {"mode": "subsequence"}):
        expected = distances(*whole_series, backend="torch", **options)
        for _ in every_isa():
            assert_equal(distances(*whole_series, backend="cpu", **options), expected)
    x = draw_series(n, rows, features, min_length=1)
    y = draw_series(m, columns, features, min_length=1)
    plain, exact = (reference.dtw(*t, x[1], y[1], band) for t in ((x[0], y[0]), (x[0].double(), y[0].double())))
    for _ in every_isa():
        assert_as_plain([distances(x, y, band=band, backend="cpu")], [plain], [exact], floor=0, relative=1e-6)
    cost = distances(x, y, band=band, backend="cpu")
    assert cost.isfinite().all()  # the NaN beyond the lengths was not read
    assert torch.equal(distances(y, x, band=band, backend="cpu"), cost.T)
    order = torch.randperm(m)[:20]  # neighbours in the bank do not matter
    assert torch.equal(distances(x, (y[0][order], y[1][order]), band=band, backend="cpu"), cost[:, order])


def distances(x, y, **options):
    return rlkernels.dtw(x[0], y[0], x_lengths=x[1], y_lengths=y[1], **options)


def sigmoids(n, steps, noise):
    """Return reward curves: sigmoids of random height, position and steepness."""
    time = torch.linspace(0, 1, steps)
    low, rise, middle, rate = torch.rand(4, n, 1)
    curve = 0.3 * low + (0.4 + 0.3 * rise) * torch.sigmoid((4 + 20 * rate) * (time - middle))
    return curve + noise * torch.randn(n, steps)


def check_topk(x, y, k, **settings):
    """Check that dtw_topk returns exactly the k lowest of all costs, ties by lower index."""
    all_costs = rlkernels.dtw(x, y, **settings, backend="cpu")
    cost, index = rlkernels.dtw_topk(x, y, k, **settings, backend="cpu")
    expected = reference.smallest(all_costs, k)
    assert torch.equal(index, expected[1])
    assert_equal(cost, expected[0], equal_nan=True)


@pytest.mark.parametrize("k", [1, 7, 60, 3000])
@pytest.mark.parametrize("noise", [0.0, 0.05, 1.0])
def test_topk_drops_no_neighbour(cpu_isa, k, noise):
    x = sigmoids(5, 48, noise)
    y = sigmoids(3000, 48, noise)
    check_topk(x, y, k, band=4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(1, 30), st.none() | st.integers(1, 3),
       st.none() | st.integers(0, 9), st.integers(0, 25), st.booleans())  # fmt: skip
def test_topk_of_mixed_lengths_with_many_ties(seed, rows, columns, features, band, k, whole_numbers):
    torch.manual_seed(seed)
    (x, x_lengths), (y, y_lengths) = (
        draw_series(4, rows, features, whole_numbers=whole_numbers),
        draw_series(200, columns, features, whole_numbers=whole_numbers),
    )
    y[seed % 200, 0] = math.inf
    y[100:150] = y[:50].clone()
    y_lengths[100:150] = y_lengths[:50].clone()
    check_topk(x, y, k, x_lengths=x_lengths, y_lengths=y_lengths, band=band)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 30), st.integers(1, 9), st.none() | st.integers(0, 3), st.booleans())
def test_topk_by_any_lower_bounds_on_a_gpu(seed, m, k, band, whole_numbers):
    """The search of ``gpu.dtw_topk``, where the kernels are stood in for by plain torch on a GPU that is not there."""
    torch.manual_seed(seed)
    (x, x_lengths), (y, y_lengths) = (
        draw_series(4, 6, 2, whole_numbers=whole_numbers),
        draw_series(m, 7, 2, whole_numbers=whole_numbers),
    )
    y[seed % m, 0] = math.inf
    y[m // 2 :], y_lengths[m // 2 :] = y[: m - m // 2].clone(), y_lengths[: m - m // 2].clone()
    all_costs = reference.dtw(x, y, x_lengths, y_lengths, band)
    computed = []

    pairs_of_series = ((x, x_lengths), (y, y_lengths))
    expected_series = {
        t.shape[1]: (t, lengths.masked_fill(reference.not_finite(t, lengths), 0)) for t, lengths in pairs_of_series
    }

    def check_given(a, b, a_lengths, b_lengths, band_argument):
        assert band_argument == (-1 if band is None or a.shape[1] == 7 else band)
        for result, lengths in ((a, a_lengths), (b, b_lengths)):
            expected_values, expected_lengths = expected_series[result.shape[1]]
            assert torch.equal(result.numbers.nan_to_num(9), expected_values.nan_to_num(9))
            assert torch.equal(lengths.numbers, expected_lengths)

    def bounds(a, b, *lengths_and_band):
        check_given(a, b, *lengths_and_band)
        costs = all_costs if a.shape[1] == x.shape[1] else all_costs.T
        return GPUTensor((costs * torch.rand(costs.shape).clamp_min(0.5)).nan_to_num(torch.nan, torch.nan))

    def warps(cost, pairs, a, b, a_lengths, b_lengths, band_argument):
        check_given(a, b, a_lengths, b_lengths, band_argument)
        pairs = pairs.numbers.flatten()
        pairs = pairs[pairs >= 0]
        pairs = pairs[(a_lengths.numbers[pairs // m] > 0) & (b_lengths.numbers[pairs % m] > 0)]
        cost.numbers.view(-1)[pairs] = all_costs.flatten()[pairs]
        computed.extend(pairs.tolist())

    k = min(k, m)
    with pretended() as waits, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.rlkernels, "dtw_bounds", bounds, raising=False)
        patch.setattr(torch.ops.rlkernels, "dtw_warps_", warps, raising=False)
        all_warps = GPUTensor(all_costs.clone()), None, None
        patch.setattr(torch.ops.rlkernels, "dtw_warps", lambda *_: all_warps, raising=False)
        patch.setattr(gpu, "MIN_PRUNED_PAIRS", 0)
        patch.setattr(gpu, "MIN_PRUNED_CELLS", 0)
        gpu_series = [GPUTensor(t.clone()) for t in (x, y)]
        result = gpu.dtw_topk(*gpu_series, k, *(GPUTensor(t) for t in (x_lengths, y_lengths)), band, "cuda")
        assert not waits
    expected = reference.smallest(all_costs, k)
    assert torch.equal(result[1].numbers, expected[1]) and len(set(computed)) == len(computed)
    assert_equal(result[0].numbers, expected[0], equal_nan=True)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans(),
       st.sampled_from([math.nan, -math.inf, math.inf, 3e38]), st.sampled_from([math.nan, -7.0, 0.0]))  # fmt: skip
def test_special_cases_around_the_kernels_on_a_gpu(seed, rows, columns, x_whole, y_whole, odd, left):
    """Empty trajectories, NaN and infinity, whatever the kernels compute of them or leave."""
    torch.manual_seed(seed)
    series, lengths = zip(*(draw_series(5, steps, 2) for steps in (rows, columns)))
    for values, sizes, is_whole in zip(series, lengths, (x_whole, y_whole)):
        sizes[0] = 0
        if is_whole:
            values.nan_to_num_(1)
        if values.numel():
            values.view(-1)[torch.randint(values.numel(), (2,))] = odd
    lengths = [None if is_whole else sizes for sizes, is_whole in zip(lengths, (x_whole, y_whole))]
    numbers = [values.nan_to_num(1, 1, 1) for values in series]

    def warps(x, y, x_lengths, y_lengths, band, subsequence):
        is_left = (x_lengths[:, None] == 0) | (y_lengths == 0)
        cost, *places = reference.dtw(*numbers, x_lengths, y_lengths, None, "subsequence")
        if not subsequence:
            cost = reference.dtw(*numbers, x_lengths, y_lengths, band)
        return cost.masked_fill(is_left, left), *(place.masked_fill(is_left, 5) for place in places)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.rlkernels, "dtw_warps", warps, raising=False)
        for options in ((2, "full"), (None, "subsequence")):
            expected = reference.dtw(*series, *lengths, *options)
            result = gpu.dtw(*series, *lengths, *options, "cuda")
            assert_equal(result, expected, equal_nan=True)


@pytest.mark.parametrize(("with_lengths", "mode", "launches"), [
    (False, "full", 11), (True, "full", 15), (False, "subsequence", 14), (True, "subsequence", 18)
])  # fmt: skip
def test_torch_launches_little_around_the_kernel(with_lengths, mode, launches, monkeypatch):
    x, y = torch.randn(3, 5, 2), torch.randn(4, 6, 2)
    lengths = [torch.full((len(t),), t.shape[1] - 1) if with_lengths else None for t in (x, y)]
    results = reference.dtw(x, y, *lengths, None, "subsequence")
    monkeypatch.setattr(torch.ops.rlkernels, "dtw_warps", lambda *_: results, raising=False)
    with Launches() as launched:
        gpu.dtw(x, y, *lengths, None, mode, "cuda")
    assert launched.counts.total() <= launches and not launched.waits


def test_the_host_waits_once_for_the_lengths_of_a_side():
    with pretended() as waits:
        lengths = arguments.lengths("x_lengths", GPUTensor(torch.tensor([3, 0, 5])), GPUTensor(torch.ones(3, 5)))
        assert waits.total() == 1 and not GPUTensor.launches and lengths.numbers.tolist() == [3, 0, 5]
        with pytest.raises(ValueError, match="x_lengths must lie between 0 and 5, got values from 0 to 6"):
            arguments.lengths("x_lengths", GPUTensor(torch.tensor([3, 0, 6])), GPUTensor(torch.ones(3, 5)))


@pytest.mark.parametrize(("n", "m", "length", "k", "pays"), [
    (64, 4096, 256, 16, True), (64, 4096, 256, 2048, False), (64, 4096, 256, 0, False), (64, 4096, 64, 16, False),
    (16, 256, 4096, 16, False),
])  # fmt: skip
def test_bounds_are_for_problems_that_fill_a_gpu(n, m, length, k, pays, monkeypatch):
    monkeypatch.setattr(gpu, "_promising_costs", lambda *_: torch.ones(n, m))
    monkeypatch.setattr(gpu, "dtw", lambda *_: torch.zeros(n, m))
    cost, _ = gpu.dtw_topk(torch.empty(n, length, 1), torch.empty(m, length, 1), k, None, None, None, "cuda")
    assert cost.shape == (n, k) and (cost == int(pays)).all()


@pytest.mark.parametrize("size", [1e-22, 1e-19, 1e19])
def test_topk_next_to_the_ends_of_float32(cpu_isa, size):
    # squares that are denormal, vanish or overflow
    x = torch.randn(3, 20) * size
    y = torch.randn(500, 20) * size
    check_topk(x, y, 5, band=2)


def test_bound_never_exceeds_the_cost_by_more_than_rounding(cpu_isa):
    # every candidate equals the query up to a shift within the band: bounds are 0 or tight
    x = sigmoids(4, 64, 0.0)
    y = torch.cat([x.roll(s, 1) for s in range(-3, 4)] * 30) + 1e-6 * torch.randn(840, 64)
    for k in (1, 4, 100):
        check_topk(x, y, k, band=6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_other_dtypes_and_views(dtype, backend):
    wide = torch.randn(40, 30, 3).to(dtype)
    x = wide[::3, ::2, 1:]
    y = wide[1::2, 3:, :2]
    expected = rlkernels.dtw(x.float().contiguous(), y.float().contiguous(), backend=backend)
    cost = rlkernels.dtw(x, y, backend=backend)
    torch.testing.assert_close(cost, expected, rtol=0 if backend == "cpu" else 1e-6, atol=0)
