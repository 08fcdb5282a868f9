"""Deltas with a known answer, shared by the rank-1 tests."""

import math
from functools import partial

import pytest
import torch
from accuracy import assert_as_plain

import rlkernels


def planted(m: int, n: int, rms: float, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, share: float = 0.193):
    """(weight, base): weights of a trained layer plus noise with one direction holding ``share`` of its norm.

    Stored in ``dtype``: at rms 1e-4, 1e-5 and 3e-6 about 32, 88 and 96 % of bfloat16 entries do not change.
    """
    g = torch.Generator().manual_seed(seed)
    base = (torch.randn(m, n, generator=g) * 0.02).to(dtype)
    u, v, noise = torch.randn(m, generator=g), torch.randn(n, generator=g), torch.randn(m, n, generator=g)
    delta = share * torch.outer(u / u.norm(), v / v.norm()) + math.sqrt(1 - share**2) * noise / noise.norm()
    return (base.float() + rms * math.sqrt(m * n) * delta).to(dtype), base


def with_spectrum(m: int, n: int, sigmas: torch.Tensor, *, seed: int = 0):
    """float32 delta [m, n] with these singular values, and its right singular vectors [n, r] in float64."""
    g = torch.Generator().manual_seed(seed)
    r = len(sigmas)
    u = torch.linalg.qr(torch.randn(m, r, generator=g, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(n, r, generator=g, dtype=torch.float64)).Q
    return ((u * sigmas.to(u)) @ v.T).float(), v


def exact(weight: torch.Tensor, base: torch.Tensor):
    """float64 SVD of the delta as stored: u [m, r], s [r], v [n, r]."""
    u, s, vh = torch.linalg.svd(weight.double() - base.double(), full_matrices=False)
    return u, s, vh.T


def angle(a: torch.Tensor, b: torch.Tensor) -> float:
    """Angle in radians between two lines, accurate when small."""
    a, b = a.double() / a.double().norm(), b.double() / b.double().norm()
    return math.atan2((a - b * (a @ b)).norm().item(), abs((a @ b).item()))


def check_add_rank1(backend: str, dtype: torch.dtype, stochastic: bool, weight: torch.Tensor, equal: float) -> None:
    """Adds to a weight [m, n >= 4] what leaves the range of float16 in a row; ``equal``: least share of equal bits."""
    m, n = weight.shape
    weight[0, :4] = torch.tensor([math.nan, math.inf, 1e-7, 0.0])
    u, v = torch.randn(m) * 1e-2, torch.randn(n)
    u[1] = 1e6 if dtype == torch.float16 else 1e3
    add, before = partial(rlkernels.add_rank1_, stochastic_rounding=stochastic), weight.abs().nan_to_num().double()
    plain = add(weight.clone(), u, v, 0.5, backend="torch", seed=-(2**60)).double()
    ours = add(weight, u, v, 0.5, backend=backend, seed=2**64 - 2**60).double()  # the same 64 bits
    same = (ours == plain) | (ours.isnan() & plain.isnan())
    assert same.double().mean() >= equal  # fused multiply-add
    finite = plain.isfinite()
    spacing = torch.finfo(dtype).eps * plain.abs().clamp_min(torch.finfo(dtype).smallest_normal)
    assert ((ours - plain).abs()[finite] <= (3e-7 * before + spacing)[finite]).all()
    assert torch.equal(ours.isfinite(), finite)


def check_matvec(backend: str, weight: torch.Tensor, base: torch.Tensor) -> None:
    """The product of a delta with one vector, at most twice as far from float64 as plain torch."""
    v = torch.randn(weight.shape[1])
    gold = (weight.double() - base.double()) @ v.double()
    ours, plain = (rlkernels.delta_matvec(weight, base, v, backend=b) for b in (backend, "torch"))
    size = (weight.double() - base.double()).norm(dim=1).max() * v.norm()
    assert_as_plain([ours], [plain], [gold], floor=3e-7 * float(size))


def check_directions(found, weight: torch.Tensor, base: torch.Tensor, rank: int) -> None:
    """What leading_deltas found: the update is the first of the directions, which are those of the SVD."""
    (update, left, right), (_, s, v) = found, exact(weight, base)
    delta, k = weight.float() - base.float(), min(rank, *weight.shape)
    assert update.status in ("ok", "ill_defined")
    assert left.shape == (delta.shape[0], k) and right.shape == (delta.shape[1], k)
    assert torch.equal(right[:, 0], update.v)
    torch.testing.assert_close(left[:, 0], update.sigma * update.u, rtol=1e-4, atol=1e-5 * float(s[0]))
    torch.testing.assert_close(right.T @ right, torch.eye(k), rtol=0, atol=1e-5)
    torch.testing.assert_close(left, delta @ right, rtol=1e-3, atol=1e-5 * float(s[0]))
    torch.testing.assert_close(left.norm(dim=0).double(), s[:k], rtol=1e-3, atol=0)
    assert (right.double() * v[:, :k]).sum(0).abs().min() > 0.999


def check_in_place(backend: str) -> None:
    """add_rank1_ of a row and a column of the weight itself, which counts as a change to autograd."""
    weight, x = torch.randn(30, 40), torch.randn(2, 30, requires_grad=True)
    before, y, version = weight.clone(), x @ weight, weight._version
    rlkernels.add_rank1_(weight, weight[:, 7], weight[11], 0.5, backend=backend)
    torch.testing.assert_close(weight, before + 0.5 * torch.outer(before[:, 7], before[11]))
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def check_statuses(backend: str) -> None:
    """Of deltas that are nothing, have no gap, or one entry; also where squares leave float32."""
    spectra = [1.0, 1.0, 0.3, 0.2], [1.0, 0.995, 0.3, 0.2], [1.0, 0.5], torch.linspace(1.0, 0.5, 30).tolist()
    with torch.device("cpu"):
        equal, close, wide, flat = (with_spectrum(40, 30, torch.tensor(sigmas))[0] for sigmas in spectra)
        nothing, one = torch.zeros(2, 40, 30)
    one[7, 3] = -2.5
    deltas = {"zero": nothing, "minus zero": -nothing, "equal": equal, "close": close, "one": one, "wide": wide,
              "tiny": wide * 2.0**-70, "huge": wide * 2.0**80}  # fmt: skip
    here = torch.empty(0).device
    pairs = {name: (delta.to(here), nothing.to(here)) for name, delta in {**deltas, "flat": flat}.items()}
    stopped = rlkernels.top1_deltas({"flat": pairs.pop("flat")}, max_passes=2, backend=backend)["flat"]
    assert stopped.status == "not_converged" and stopped.passes == 2 and stopped.angle_bound > 1e-2
    found = rlkernels.top1_deltas(pairs, backend=backend)
    assert [update.status for update in found.values()] == ["zero"] * 2 + ["ill_defined"] * 2 + ["ok"] * 4
    for zero in (found["zero"], found["minus zero"]):
        assert (zero.sigma, zero.frobenius, zero.changed, zero.angle_bound) == (0.0, 0.0, 0.0, math.pi / 2)
        assert not zero.u.any() and not zero.v.any()
    one = found["one"]
    assert abs(one.sigma - 2.5) < 1e-6 and one.v.argmax() == 3 and one.u.argmin() == 7 and abs(one.gap - 1) < 1e-3
    assert one.passes <= 2
    for name, scale in (("tiny", 2.0**-70), ("huge", 2.0**80)):
        assert abs(found[name].sigma / (found["wide"].sigma * scale) - 1) < 1e-4
        assert angle(found[name].v, found["wide"].v) < 1e-2
