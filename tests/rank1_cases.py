"""Deltas with a known answer, shared by the rank-1 tests."""

import math
from functools import partial

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
