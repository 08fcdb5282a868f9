"""The native rank-1 solver: accuracy against float64, honesty of its certificate, bits, instruction sets."""

import itertools
import math

import pytest
import torch
from rank1_cases import angle, check_add_rank1, check_matvec, planted, with_spectrum

import rlkernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def scalars(update):
    return [getattr(update, f) for f in ("sigma", "frobenius", "gap", "residual", "angle_bound", "passes", "changed")]


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (1, 2053), (2053, 1), (67, 1023), (257, 131)])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=2)), ids=str)
def test_every_instruction_set_agrees_with_the_reference(cpu_isa, shape, dtypes):
    weight, base = planted(*shape, 3e-3, dtype=torch.float32)
    weight, base = weight.to(dtypes[0]), base.to(dtypes[1])
    ours = rlkernels.top1_delta(weight, base, tol=1e-4, backend="cpu")
    plain = rlkernels.top1_delta(weight, base, tol=1e-4, backend="torch")
    assert ours.status == plain.status and ours.changed == plain.changed
    assert math.isclose(ours.sigma, plain.sigma, rel_tol=1e-5)
    assert math.isclose(ours.frobenius, plain.frobenius, rel_tol=1e-5)
    assert angle(ours.v, plain.v) <= ours.angle_bound + plain.angle_bound
    check_matvec("cpu", weight, base)
    assert not rlkernels.delta_matvec(weight, weight, torch.randn(shape[1]), backend="cpu").any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_add_rank1_on_every_instruction_set(cpu_isa, dtype, stochastic):
    weight = torch.randn(33, 129).to(dtype)
    check_add_rank1("cpu", dtype, stochastic, weight, equal=0.97 if dtype == torch.float32 else 0.995)


@pytest.mark.parametrize("shape", [(300, 513), (2100, 1000)])
def test_same_bits_for_any_number_of_threads(shape, set_threads):
    weight, base = planted(*shape, 1e-5)
    pairs = {"a": (weight, base), "b": planted(64, 64, 1e-4), "c": planted(31, 200, 1e-4)}
    runs = []
    for count in (1, 2, 3):
        set_threads(count)
        runs.append((rlkernels.top1_delta(weight, base, tol=1e-3), rlkernels.top1_deltas(pairs, tol=1e-3)))
    first, grouped = runs[0]
    assert scalars(grouped["a"]) == scalars(first)
    for single, group in runs[1:]:
        for one, two in [(first, single), *((grouped[k], group[k]) for k in pairs)]:
            assert torch.equal(one.u, two.u) and torch.equal(one.v, two.v) and scalars(one) == scalars(two)


@pytest.mark.parametrize(("rms", "unchanged"), [(1e-4, 0.32), (1e-5, 0.88), (3e-6, 0.96)])
def test_accuracy_on_bfloat16_checkpoints(rms, unchanged):
    # the direction a trained layer moved along, after both checkpoints were rounded to bfloat16
    weight, base = planted(1024, 1024, rms)
    got = rlkernels.top1_delta(weight, base)
    delta = weight.double() - base.double()
    values, vectors = torch.linalg.eigh(delta.T @ delta)
    truth = angle(got.v, vectors[:, -1])
    assert abs(got.changed - (1 - unchanged)) < 0.01
    assert got.status == "ok" and truth <= got.angle_bound <= 1e-2
    assert abs(got.sigma / values[-1].sqrt().item() - 1) < 1e-4
    torch.manual_seed(0)
    stock = torch.svd_lowrank(weight.float() - base.float(), q=6, niter=2)[2][:, 0]
    assert truth <= angle(stock, vectors[:, -1])


def test_many_passes_stay_accurate():
    """A basis of more than a hundred columns, as a flat spectrum and a tight tolerance need."""
    delta, v = with_spectrum(220, 180, torch.cat([torch.tensor([1.0, 0.97]), torch.linspace(0.969, 0.5, 178)]))
    got = rlkernels.top1_delta(delta, torch.zeros_like(delta), tol=1e-5, max_passes=40)
    assert got.status == "ok" and got.passes >= 12
    assert angle(got.v, v[:, 0]) <= got.angle_bound <= 1e-5 and abs(got.gap - 0.03) < 1e-4


def spectrum(kind: str, ratio: float, size: int, g: torch.Generator) -> torch.Tensor:
    """Singular values with sigma2 / sigma1 = ratio and a tail of some kind."""
    steps = torch.arange(size - 1, dtype=torch.float64)
    tails = {
        "power": (steps + 1) ** -(0.3 + 1.5 * torch.rand(1, generator=g).item()),
        "geometric": 0.9**steps,
        "cluster": torch.where(steps < 8, 1.0, 0.3),
        "noise": (1 - (steps / size) ** 0.7).clamp_min(0),
    }
    return torch.cat([torch.ones(1, dtype=torch.float64), ratio * tails[kind]])


def random_cases(count: int):
    """(delta, start, true v): all kinds of spectra and of warm starts, misleading ones included."""
    g = torch.Generator().manual_seed(1)
    kinds, starts = ["power", "geometric", "cluster", "noise"], ["none", "good", "second", "third", "orthogonal"]
    for i in range(count):
        m, n = (int(x) for x in torch.randint(40, 200, (2,), generator=g))
        size = min(m, n)
        ratio = 0.3 + 0.65 * torch.rand(1, generator=g).item()
        sigmas = spectrum(kinds[i % 4], ratio, size, g)
        scale = 10 ** (4 * torch.rand(1, generator=g).item() - 6)
        delta, v = with_spectrum(m, n, sigmas * scale, seed=i)
        noise = torch.randn(n, generator=g, dtype=torch.float64)
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
    got = rlkernels.top1_deltas(pairs, starts=starts, max_passes=12)
    truth = torch.tensor([angle(got[str(i)].v, v) for i, (_, _, v) in enumerate(cases)])
    bound = torch.tensor([update.angle_bound for update in got.values()])
    assert (truth <= bound).all(), "an angle above its bound"
    assert (bound / truth.clamp_min(1e-8)).median() <= 20
    assert sum(update.status == "ok" for update in got.values()) >= 396
    early = rlkernels.top1_deltas(pairs, starts=starts, max_passes=3, seed=9)  # stopped anywhere, still honest
    truth = torch.tensor([angle(early[str(i)].v, v) for i, (_, _, v) in enumerate(cases)])
    assert (truth <= torch.tensor([update.angle_bound for update in early.values()])).all()
