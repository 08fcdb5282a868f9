"""The rank-1 ops: meaning of every field, statuses, errors, rounding; the native solver and its certificate."""

import itertools
import math

import pytest
import rank1_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank1_cases import angle, exact, planted, with_spectrum
from scipy import stats
from support import assert_equal

import rlkernels
from rlkernels.rank1 import reference
from rlkernels.rank1.ops import solve_deltas

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def scalars(update):
    names = ("sigma", "frobenius", "gap", "residual", "angle_bound", "passes", "changed", "status")
    return [getattr(update, name) for name in names]


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (3, 5), (2, 1023), (1023, 2), (131, 257), (300, 64)])
def test_every_field_means_what_it_says(shape):
    m, n = shape
    weight, base = planted(m, n, 3e-3)
    update = rlkernels.top1_delta(weight, base, tol=1e-3)
    u, s, v = exact(weight, base)
    delta = weight.double() - base.double()
    assert update.status == "ok" and update.angle_bound <= 1e-3
    assert angle(update.v, v[:, 0]) <= update.angle_bound
    assert angle(update.u, u[:, 0]) <= 2 * update.angle_bound
    assert abs(update.sigma - s[0]) <= 1e-5 * s[0]
    assert abs(update.frobenius - delta.norm()) <= 1e-5 * delta.norm()
    assert abs(update.gap - (1 - s[1] / s[0] if len(s) > 1 else 1)) <= 0.02
    assert update.changed == (weight != base).double().mean()
    assert update.u.dtype == update.v.dtype == torch.float32 and update.u.shape == (m,) and update.v.shape == (n,)
    assert update.v[update.v.abs().argmax()] > 0
    direct = (delta.T @ update.u.double() - update.sigma * update.v.double()).norm() / update.sigma
    assert abs(update.residual - direct) <= 1e-5
    assert update.share == update.sigma / update.frobenius and update.alpha == update.frobenius / update.sigma
    for scalar in (update.sigma, update.frobenius, update.gap, update.residual, update.angle_bound, update.changed):
        assert type(scalar) is float
    assert type(update.passes) is int


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("rms", [1e-20, 1e15])
def test_extreme_values_take_no_further_step(backend, rms):
    """Their squares leave float32, so they are scaled and read again."""
    cases.check_extremes(backend, rms)


def test_views():
    weight, base = planted(90, 70, 1e-2, dtype=torch.float32)
    plain = rlkernels.top1_delta(weight, base)
    for w, b in [
        (weight.T.contiguous().T, base),
        (torch.stack([weight, weight], 2)[..., 0], base),
        (torch.cat([weight, weight], 1)[:, :70], torch.cat([base, base], 1)[:, 70:]),
    ]:
        update = rlkernels.top1_delta(w, b)
        assert angle(update.v, plain.v) < 1e-5 and update.passes == plain.passes


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_statuses(backend):
    cases.check_statuses(backend)


def test_warm_start_saves_reads_and_zeros_are_no_start():
    weight, base = planted(400, 300, 1e-4)
    cold = rlkernels.top1_delta(weight, base)
    warm = rlkernels.top1_delta(weight, base, start=cold.v)
    assert warm.passes < cold.passes and warm.status == "ok" and angle(warm.v, cold.v) < 2e-2
    from_zeros = rlkernels.top1_delta(weight, base, start=torch.zeros(300))
    assert torch.equal(from_zeros.v, cold.v) and from_zeros.passes == cold.passes


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_raise(bad, dtype):
    weight, base = planted(33, 65, 1e-3, dtype=dtype)
    weight[32, 64] = bad
    message = rf"must be finite, got {bad} at \[32, 64\]"
    for pair, name in (((weight, base), "weight"), ((base, weight), "base"), ((weight, weight), "weight")):
        with pytest.raises(ValueError, match=f"^{name} {message}"):
            rlkernels.top1_delta(*pair)
    with pytest.raises(ValueError, match=f"'layer.1': weight {message}"):
        rlkernels.top1_deltas({"layer.0": (base, base), "layer.1": (weight, base)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_difference_beyond_float32_raises(backend, dtype):
    weight = torch.zeros(33, 65, dtype=dtype)
    base = torch.zeros(33, 65, dtype=dtype)
    weight[32, 64] = 2.0**127
    assert rlkernels.top1_delta(weight, base, backend=backend).status == "ok"  # the largest that fits
    base[32, 64] = -weight[32, 64]
    with pytest.raises(ValueError, match=r"^weight - base must fit float32, got 1.70141e\+38 - -1.70141e\+38 at \[32"):
        rlkernels.top1_delta(weight, base, backend=backend)
    with pytest.raises(ValueError, match="'b': weight - base must fit float32"):
        rlkernels.top1_deltas({"a": (weight, weight), "b": (base, weight)}, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_starts_far_from_one(backend):
    weight, base = planted(40, 30, 1e-3)
    cold = rlkernels.top1_delta(weight, base, backend=backend)
    for scale in (1e-300, 1e-30, 1e30):  # the first is zero in float32: no start
        update = rlkernels.top1_delta(weight, base, start=cold.v.double() * scale, backend=backend)
        assert update.status == "ok" and angle(update.v, cold.v) < 2e-2
    with pytest.raises(ValueError, match="start must be finite, got entries that float32 does not hold"):
        rlkernels.top1_delta(weight, base, start=cold.v.double() * 1e300, backend=backend)


def test_grouped_equals_single_calls():
    shapes = [(64, 64), (1, 9), (200, 31), (64, 64), (5, 300)]
    pairs = {f"m{i}": planted(m, n, 1e-3, seed=i) for i, (m, n) in enumerate(shapes)}
    pairs["same"] = (pairs["m0"][1], pairs["m0"][1])
    starts = {"m2": torch.randn(31), "m3": torch.ones(64)}
    grouped = rlkernels.top1_deltas(pairs, starts=starts, seed=5)
    assert list(grouped) == list(pairs) and grouped["same"].status == "zero"
    for name, (weight, base) in pairs.items():
        single = rlkernels.top1_delta(weight, base, start=starts.get(name), seed=5)
        assert_equal((grouped[name].u, grouped[name].v), (single.u, single.v))
        assert scalars(grouped[name]) == scalars(single)
    assert rlkernels.top1_deltas({}) == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rank1_rounds_once_and_works_on_views(dtype):
    storage = torch.randn(50, 80).to(dtype)
    original = storage.clone()
    weight = storage[5:, 1::2]
    u = torch.randn(45)
    v = torch.randn(40, dtype=torch.float64)
    assert rlkernels.add_rank1_(weight, u, v, 0.37) is weight
    expected = original[5:, 1::2].double() + 0.37 * torch.outer(u.double(), v)
    assert (weight.double() - expected).abs().max() <= 0.502 * torch.finfo(dtype).eps * expected.abs().max()
    assert torch.equal(storage[:5], original[:5]) and torch.equal(storage[:, ::2], original[:, ::2])


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_add_rank1_takes_parts_of_the_weight_and_counts_as_a_change(backend):
    cases.check_in_place(backend)
    vector = torch.randn(40)
    original = vector.clone()
    rlkernels.add_rank1_(vector[:, None], vector, torch.ones(1), 0.5, backend=backend)
    torch.testing.assert_close(vector, 1.5 * original)
    with torch.inference_mode():
        weight = torch.zeros(3, 4)  # has no version, and needs none
        assert (rlkernels.add_rank1_(weight, torch.ones(3), torch.ones(4), 1.0, backend=backend) == 1).all()


@pytest.mark.parametrize("stochastic", [False, True])
def test_add_rank1_runs_the_named_kernel_on_any_view(stochastic, monkeypatch):
    cases.check_any_view("cpu", stochastic, monkeypatch)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (4, 3)])
def test_add_rank1_refuses_overlapping_entries_and_nothing_else(shape):
    for strides in itertools.product(range(6), repeat=2):
        storage = torch.zeros(30)
        weight = storage.as_strided(shape, strides)
        places = {i * strides[0] + j * strides[1] for i in range(shape[0]) for j in range(shape[1])}
        if len(places) == weight.numel():
            rlkernels.add_rank1_(weight, torch.ones(shape[0]), torch.ones(shape[1]), 1.0)
            assert {i for i, x in enumerate(storage.tolist()) if x} == places
        else:
            with pytest.raises(ValueError, match="weight must have a place in memory for every entry, got strides"):
                rlkernels.add_rank1_(weight, torch.ones(shape[0]), torch.ones(shape[1]), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_unbiased(dtype):
    # one weight and an update of 0.3 of its spacing, many times over: the mean must move by exactly that
    start = torch.full((400, 501), 1.5, dtype=dtype)
    step = torch.ones(400), torch.ones(501), 0.3 * torch.finfo(dtype).eps
    weight, same_seed, other_seed = (
        rlkernels.add_rank1_(start.clone(), *step, stochastic_rounding=True, seed=seed) for seed in (1, 1, 2)
    )
    rise = weight.double() - start.double()
    assert set(rise.unique().tolist()) == {0.0, torch.finfo(dtype).eps}
    assert stats.binomtest(int((rise > 0).sum()), rise.numel(), 0.3).pvalue > 1e-3
    assert torch.equal(rlkernels.add_rank1_(start.clone(), *step), start)
    assert torch.equal(same_seed, weight) and not torch.equal(other_seed, weight)


@given(st.floats(width=32, allow_nan=True), st.integers(0, 2**64 - 1), st.sampled_from([torch.bfloat16, torch.float16]))
@settings(max_examples=300, deadline=None)
def test_stochastic_rounding_gives_a_neighbour(value, seed, dtype):
    value = torch.full((2, 3), value)
    rounded = reference.stochastic_round(value, dtype, seed).float()
    if not value[0, 0].isfinite():
        assert torch.equal(rounded, value) or value[0, 0].isnan()
    elif value.abs().max() <= torch.finfo(dtype).max:
        spacing = max(torch.finfo(dtype).smallest_normal, value[0, 0].abs().item()) * torch.finfo(dtype).eps
        assert ((rounded - value).abs() < spacing).all() or rounded.isinf().any()
        exact_already = value.to(dtype).float() == value
        assert (rounded[exact_already] == value[exact_already]).all()


GOOD = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rlkernels.top1_delta([1], GOOD), TypeError, "weight must be a torch.Tensor, got list"),
        (lambda: rlkernels.top1_delta(GOOD.double(), GOOD), TypeError, "weight must have dtype .* got torch.float64"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD.int()), TypeError, "base must have dtype .* got torch.int32"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD.T), ValueError, r"base must have shape \[3, 4\], got \[4, 3\]"),
        (lambda: rlkernels.top1_delta(GOOD[0], GOOD[0]), ValueError, "weight must have 2 dimensions"),
        (lambda: rlkernels.top1_delta(GOOD[:0], GOOD[:0]), ValueError, "weight must have at least one row"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD.to("meta")), ValueError, "base must be on cpu, got meta"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD, start=torch.ones(3)), ValueError, r"start must have shape \[4\]"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD, start=torch.full((4,), math.nan)), ValueError, "start must be fin"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD, tol=0.0), ValueError, "tol must be between 0 and pi / 2 .* got 0.0"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD, tol=math.nan), ValueError, "tol must be .* got nan"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD, tol=None), TypeError, "tol must be a number, got None"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD, max_passes=0), ValueError, "max_passes must be between .* got 0"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD, max_passes=2**70), ValueError, "max_passes must be .* got 118"),
        (lambda: rlkernels.top1_deltas([(GOOD, GOOD)]), TypeError, "pairs must be a dictionary, .* got list"),
        (lambda: rlkernels.top1_deltas({"q": GOOD}), TypeError, r"pairs must hold \(weight, base\) .* Tensor for 'q'"),
        (lambda: rlkernels.top1_deltas({}, starts=GOOD), TypeError, "starts must be a dictionary, .* got Tensor"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD, seed="a"), TypeError, "seed must be an integer, got 'a'"),
        (lambda: rlkernels.top1_deltas({"q": (GOOD, GOOD[:2])}), ValueError, r"base of 'q' must have shape \[3, 4\]"),
        (lambda: rlkernels.top1_deltas({"q": (GOOD, GOOD)}, starts={"k": GOOD[0]}), ValueError, "starts .* got 'k'"),
        (lambda: rlkernels.delta_matvec(GOOD, GOOD, GOOD[:, 0]), ValueError, r"v must have shape \[4\], got \[3\]"),
        (lambda: rlkernels.add_rank1_(GOOD, GOOD[:, 0], GOOD[0], math.inf), ValueError, "scale .* got inf"),
        (lambda: rlkernels.add_rank1_(GOOD, GOOD[:, 0], GOOD[0], "1"), TypeError, "scale must be a number, got '1'"),
        (lambda: rlkernels.add_rank1_(GOOD, GOOD[:, 0], GOOD[0], 1, seed=0.5), TypeError, "seed must be an integer"),
        (lambda: rlkernels.add_rank1_(GOOD, GOOD[0], GOOD[0], 1.0), ValueError, r"u must have shape \[3\], got \[4\]"),
        (lambda: rlkernels.top1_delta(GOOD, GOOD, backend="gpu"), ValueError, "backend must be one of .* got 'gpu'"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_further_directions_come_from_the_same_reads(backend):
    shapes = [(1, 1), (1, 7), (7, 1), (7, 5), (60, 90)]
    pairs = {str(shape): planted(*shape, 1e-3) for shape in shapes}
    single = rlkernels.top1_deltas(pairs, backend=backend)
    for name, (update, *_) in solve_deltas(pairs, rank=4, min_passes=1, backend=backend).items():
        assert update.passes == single[name].passes and update.sigma == single[name].sigma
        torch.testing.assert_close(update.v, single[name].v, rtol=0, atol=1e-6)
    pairs["(60, 90)"] = with_spectrum(60, 90, 0.8 ** torch.arange(60))[0], torch.zeros(60, 90)
    for name, directions in solve_deltas(pairs, rank=4, min_passes=6, backend=backend).items():
        cases.check_directions(directions, *pairs[name], 4)
    delta, _ = with_spectrum(60, 33, torch.tensor([3.0, 1.0]))
    _, left, right = solve_deltas({"a": (delta, delta * 0)}, rank=4, backend=backend)["a"]
    torch.testing.assert_close(left @ right.T, delta, rtol=0, atol=1e-5)  # of rank 2: held entirely
    update, left, _ = solve_deltas({"a": planted(60, 90, 1e-3)}, rank=58, max_passes=1, backend=backend)["a"]
    assert update.passes == 15 and left.shape == (60, 58), "four columns a read"
    with pytest.raises(ValueError, match="rank must be between 1 and 2147483647, got 0"):
        solve_deltas(pairs, rank=0, backend=backend)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (1, 2053), (2053, 1), (67, 1023), (257, 131)])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=2)), ids=str)
def test_every_instruction_set_agrees_with_the_reference(cpu_isa, shape, dtypes):
    weight, base = planted(*shape, 3e-3, dtype=torch.float32)
    weight, base = weight.to(dtypes[0]), base.to(dtypes[1])
    update = rlkernels.top1_delta(weight, base, tol=1e-4, backend="cpu")
    plain = rlkernels.top1_delta(weight, base, tol=1e-4, backend="torch")
    assert update.status == plain.status and update.changed == plain.changed
    assert math.isclose(update.sigma, plain.sigma, rel_tol=1e-5)
    assert math.isclose(update.frobenius, plain.frobenius, rel_tol=1e-5)
    assert angle(update.v, plain.v) <= update.angle_bound + plain.angle_bound
    cases.check_matvec("cpu", weight, base)
    assert not rlkernels.delta_matvec(weight, weight, torch.randn(shape[1]), backend="cpu").any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_add_rank1_on_every_instruction_set(cpu_isa, dtype, stochastic):
    weight = torch.randn(33, 129).to(dtype)
    cases.check_add_rank1("cpu", dtype, stochastic, weight, min_equal=0.97 if dtype == torch.float32 else 0.995)


@pytest.mark.parametrize("shape", [(300, 513), (2100, 1000)])
def test_same_bits_for_any_number_of_threads_and_seeds_agree(shape, set_threads):
    weight, base = planted(*shape, 1e-5)
    pairs = {"a": (weight, base), "b": planted(64, 64, 1e-4), "c": planted(31, 200, 1e-4)}
    runs = []
    for count in (1, 2, 3):
        set_threads(count)
        runs.append((rlkernels.top1_delta(weight, base, tol=1e-3), rlkernels.top1_deltas(pairs, tol=1e-3)))
    first, grouped = runs[0]
    assert scalars(grouped["a"]) == scalars(first)
    for single, group in runs[1:]:
        for expected, update in [(first, single), *((grouped[k], group[k]) for k in pairs)]:
            assert_equal((update.u, update.v), (expected.u, expected.v))
            assert scalars(update) == scalars(expected)
    other_seed = rlkernels.top1_delta(weight, base, tol=1e-3, seed=2**64 - 1)
    assert (
        not torch.equal(first.v, other_seed.v)
        and angle(first.v, other_seed.v) <= first.angle_bound + other_seed.angle_bound
    )


@pytest.mark.parametrize(("rms", "unchanged"), [(1e-4, 0.32), (1e-5, 0.88), (3e-6, 0.96)])
def test_accuracy_on_bfloat16_checkpoints(rms, unchanged):
    # the direction a trained layer moved along, after both checkpoints were rounded to bfloat16
    weight, base = planted(1024, 1024, rms)
    update = rlkernels.top1_delta(weight, base)
    delta = weight.double() - base.double()
    values, vectors = torch.linalg.eigh(delta.T @ delta)
    truth = angle(update.v, vectors[:, -1])
    assert abs(update.changed - (1 - unchanged)) < 0.01
    assert update.status == "ok" and truth <= update.angle_bound <= 1e-2
    assert abs(update.sigma / values[-1].sqrt().item() - 1) < 1e-4
    torch.manual_seed(0)
    stock = torch.svd_lowrank(weight.float() - base.float(), q=6, niter=2)[2][:, 0]
    assert truth <= angle(stock, vectors[:, -1])


def test_many_passes_stay_accurate():
    """A basis of more than a hundred columns, as a flat spectrum and a tight tolerance need."""
    delta, v = with_spectrum(220, 180, torch.cat([torch.tensor([1.0, 0.97]), torch.linspace(0.969, 0.5, 178)]))
    update = rlkernels.top1_delta(delta, torch.zeros_like(delta), tol=1e-5, max_passes=40)
    assert update.status == "ok" and update.passes >= 12
    assert angle(update.v, v[:, 0]) <= update.angle_bound <= 1e-5 and abs(update.gap - 0.03) < 1e-4


def spectrum(kind: str, ratio: float, size: int, g: torch.Generator) -> torch.Tensor:
    """Return singular values with sigma2 / sigma1 = ratio and a tail of some kind."""
    steps = torch.arange(size - 1, dtype=torch.float64)
    tails = {
        "power": (steps + 1) ** -(0.3 + 1.5 * torch.rand(1, generator=g).item()),
        "geometric": 0.9**steps,
        "cluster": torch.where(steps < 8, 1.0, 0.3),
        "noise": (1 - (steps / size) ** 0.7).clamp_min(0),
    }
    return torch.cat([torch.ones(1, dtype=torch.float64), ratio * tails[kind]])


def random_cases(count: int):
    """Yield (delta, start, true v): all kinds of spectra and of warm starts, misleading ones included."""
    generator = torch.Generator().manual_seed(1)
    kinds = ["power", "geometric", "cluster", "noise"]
    starts = ["none", "good", "second", "third", "orthogonal"]
    for i in range(count):
        m, n = (int(x) for x in torch.randint(40, 200, (2,), generator=generator))
        size = min(m, n)
        ratio = 0.3 + 0.65 * torch.rand(1, generator=generator).item()
        sigmas = spectrum(kinds[i % 4], ratio, size, generator)
        scale = 10 ** (4 * torch.rand(1, generator=generator).item() - 6)
        delta, v = with_spectrum(m, n, sigmas * scale, seed=i)
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        start = {
            "none": None,
            "good": v[:, 0] + 0.1 * noise / noise.norm(),
            "second": v[:, 1],
            "third": v[:, 2] + 1e-6 * noise,
            "orthogonal": noise - v[:, 0] * (v[:, 0] @ noise),
        }[starts[i // 4 % 5]]
        yield delta, start, v[:, 0]


def test_certificate_is_honest_and_useful(set_threads):
    set_threads(1)  # many tiny decompositions: waiting for a second thread costs more than it helps
    cases = list(random_cases(400))
    pairs = {str(i): (delta, torch.zeros_like(delta)) for i, (delta, _, _) in enumerate(cases)}
    starts = {str(i): start for i, (_, start, _) in enumerate(cases) if start is not None}
    updates = rlkernels.top1_deltas(pairs, starts=starts, max_passes=12)
    true_angles = torch.tensor([angle(updates[str(i)].v, v) for i, (_, _, v) in enumerate(cases)])
    bound = torch.tensor([update.angle_bound for update in updates.values()])
    assert (true_angles <= bound).all(), "an angle above its bound"
    assert (bound / true_angles.clamp_min(1e-8)).median() <= 20
    assert sum(update.status == "ok" for update in updates.values()) >= 396
    early = rlkernels.top1_deltas(pairs, starts=starts, max_passes=3, seed=9)  # stopped anywhere, still honest
    true_angles = torch.tensor([angle(early[str(i)].v, v) for i, (_, _, v) in enumerate(cases)])
    assert (true_angles <= torch.tensor([update.angle_bound for update in early.values()])).all()
