"""Leading singular triplet of a weight delta, against torch and scikit-learn."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

import rlkernels
from bench import Case, copy_bandwidth, optional, read_bandwidth
from bench._case import Provider
from rlkernels.rank1 import reference


def planted(m: int, n: int, rms: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Make bfloat16 (weight, base): noise with 0.193 of its norm in one direction; rms 1e-5 changes 12 % of entries."""
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(m, n, generator=generator) * 0.02).bfloat16()
    u = torch.randn(m, generator=generator)
    v = torch.randn(n, generator=generator)
    noise = torch.randn(m, n, generator=generator)
    delta = 0.193 * torch.outer(u / u.norm(), v / v.norm()) + math.sqrt(1 - 0.193**2) * noise / noise.norm()
    return (base.float() + rms * math.sqrt(m * n) * delta).bfloat16(), base


def lowrank(delta: torch.Tensor) -> torch.Tensor:
    return torch.svd_lowrank(delta, q=6, niter=2)[2][:, 0]


def cholesky_qr(deltas: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Iterate subspaces of [B, m, n] with Cholesky QR, the fast batched form in torch; two reads a step."""
    q = torch.randn(deltas.shape[0], deltas.shape[2], 4)
    for _ in range(steps):
        z = deltas.mT @ (deltas @ q)
        z = z / z.norm(dim=1, keepdim=True)
        factor = torch.linalg.cholesky(z.mT @ z + 1e-6 * torch.eye(4))
        q = torch.linalg.solve_triangular(factor, z.mT, upper=False).mT
    y = deltas @ q
    return (q @ torch.linalg.eigh(y.mT @ y).eigenvectors[:, :, -1:])[..., 0]


def true_direction(weight: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return the direction to 1e-5 by our certificate, which tests compare with a float64 decomposition."""
    return rlkernels.top1_delta(weight, base, tol=1e-5, max_passes=40).v


def angle(v: torch.Tensor, expected_v: torch.Tensor) -> str:
    a, b = v.double().flatten(), expected_v.double().flatten()
    return f"angle {math.atan2((a - b * (a @ b)).norm().item(), abs((a @ b).item())):.1e}"


def solve_case(n: int, rms: float) -> Case:
    weight, base = planted(n, n, rms)
    delta = weight.float() - base.float()
    warm = true_direction(weight, base)
    nbytes = weight.nbytes + base.nbytes

    def sklearn(module: Any) -> Provider:
        return lambda: torch.from_numpy(module.randomized_svd(delta.numpy(), 1, random_state=0)[2][0])

    return Case(
        op="top1_delta",
        shape=f"{n} x {n}, {(weight == base).float().mean():.0%} unchanged",
        dtype="bfloat16",
        providers={
            "rlkernels": lambda: rlkernels.top1_delta(weight, base).v,
            "rlkernels, warm start": lambda: rlkernels.top1_delta(weight, base, start=warm).v,
            "torch.svd_lowrank(6, 2) of the delta made in float32": lambda: lowrank(weight.float() - base.float()),
            "torch.svd_lowrank(6, 2), delta given": lambda: lowrank(delta),
            "torch, Cholesky QR, delta given": lambda: cholesky_qr(delta[None])[0],
            "sklearn randomized_svd, delta given": optional("sklearn.utils.extmath", sklearn, "scikit-learn"),
        },
        reference=lambda: true_direction(weight, base),
        compare=angle,
        limit=("one read of both matrices", nbytes / read_bandwidth(nbytes)),
    )


def use_cases(n: int) -> Iterator[Case]:
    """Make the cases of what is done with a direction: products with a delta, and updates by it."""
    weight, base = planted(n, n, 1e-5)
    v = torch.randn(n)
    nbytes = weight.nbytes + base.nbytes
    yield Case(
        op="delta_matvec",
        shape=f"{n} x {n}",
        dtype="bfloat16",
        providers={
            "rlkernels": lambda: rlkernels.delta_matvec(weight, base, v),
            "torch reference": lambda: reference.delta_matvec(weight, base, v),
        },
        limit=("read bandwidth", nbytes / read_bandwidth(nbytes)),
    )
    for stochastic in (False, True):
        options: dict[str, Any] = {"u": v, "v": v, "scale": 1e-5, "stochastic_rounding": stochastic, "seed": 0}
        providers: dict[str, Provider] = {
            "rlkernels": (weight.clone, functools.partial(rlkernels.add_rank1_, **options)),
            "torch reference": (weight.clone, functools.partial(reference.add_rank1_, **options)),
        }
        if not stochastic:
            outer = functools.partial(torch.Tensor.addcmul_, tensor1=v[:, None], tensor2=v, value=1e-5)
            providers["torch addcmul_"] = weight.clone, outer
        yield Case(
            op="add_rank1_",
            shape=f"{n} x {n}, {'stochastic' if stochastic else 'nearest'} rounding",
            dtype="bfloat16",
            providers=providers,
            limit=("read and write", 2 * weight.nbytes / copy_bandwidth(weight.nbytes)),
        )


def cases(quick: bool) -> Iterator[Case]:
    for n, rms in [(512, 1e-5)] if quick else [(2048, 1e-5), (4096, 1e-5), (8192, 1e-5), (2048, 3e-6)]:
        yield solve_case(n, rms)
    for n in [512] if quick else [4096, 8192]:
        yield from use_cases(n)
    count = 20 if quick else 200
    pairs = {str(i): planted(256, 256, 1e-4, seed=i) for i in range(count)}
    deltas = torch.stack([w.float() - b.float() for w, b in pairs.values()])
    yield Case(
        op="top1_deltas",
        shape=f"{count} modules of 256 x 256",
        dtype="bfloat16",
        providers={
            "rlkernels": lambda: torch.stack([update.v for update in rlkernels.top1_deltas(pairs).values()]),
            "rlkernels, Python loop": lambda: torch.stack([rlkernels.top1_delta(w, b).v for w, b in pairs.values()]),
            "torch.svd_lowrank(6, 2), Python loop, deltas given": lambda: torch.stack([lowrank(d) for d in deltas]),
            "torch, batched Cholesky QR, deltas given": lambda: cholesky_qr(deltas),
        },
        reference=None,
    )
