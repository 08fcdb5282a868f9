"""Deltas with a known answer, shared by the rank-1 tests."""

import math

import torch


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
