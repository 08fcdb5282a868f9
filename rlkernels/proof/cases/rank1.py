"""Cases of the leading singular triplet of weight deltas, and of its use."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import rlkernels
from rlkernels.proof.problem import Case, Problem, Verdict
from rlkernels.proof.workload import Workload

Device = torch.device
BF16, F32 = torch.bfloat16, torch.float32
TOL = 1e-2
EXACT_SVD = 2**22  # entries of a matrix up to which a float64 SVD is the judge


def _pair(m: int, n: int, dtype: torch.dtype, on: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a base and a weight that differs by a dominant direction and noise, in the storage dtype."""
    base = (torch.randn(m, n, device=on) * 0.02).to(dtype)
    u, v = torch.randn(m, device=on), torch.randn(n, device=on)
    delta = torch.outer(u, v) * 1e-3 + torch.randn(m, n, device=on) * 3e-4
    return (base.float() + delta).to(dtype), base


def _worst(*errors: float) -> Verdict:
    return (max(errors) if all(error == error for error in errors) else float("inf")), 2 * TOL


def top1(m: int, n: int, dtype: torch.dtype, on: Device) -> Problem:
    """Make a problem judged by the angle to the true direction and the error of sigma."""
    weight, base = _pair(m, n, dtype, on)

    def call(backend: str) -> list[Any]:
        update = rlkernels.top1_delta(weight, base, tol=TOL, backend=backend)
        return [update.u, torch.tensor(update.sigma, dtype=torch.float64), update.v]

    def judge(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> Verdict:
        u, s, v = (t.double() for t in plain)
        if m * n <= EXACT_SVD:
            left, sigma, right = torch.linalg.svd(weight.double() - base.double(), full_matrices=False)
            u, s, v = left[:, 0], sigma[0], right[0]
        vectors = ((ours[0].double(), u), (ours[2].double(), v))
        angles = [(mine - true * (mine @ true)).norm().item() for mine, true in vectors]
        lengths = [abs(mine.norm().item() - 1) for mine, _ in vectors]
        return _worst(*angles, *(1e3 * length for length in lengths), 10 * abs(ours[1].item() / s.item() - 1))

    return Problem(call, judge=judge, nbytes=2 * weight.nbytes, dtype=dtype)


def top1_many(shapes: list[tuple[int, int]], dtype: torch.dtype, on: Device) -> Problem:
    """Make a problem of many modules in one call, judged by plain torch."""
    pairs = {f"{i}": _pair(m, n, dtype, on) for i, (m, n) in enumerate(shapes)}

    def call(backend: str) -> list[Any]:
        updates = rlkernels.top1_deltas(pairs, tol=TOL, backend=backend)
        return [torch.cat([t.flatten() for u in updates.values() for t in (u.u, u.v)]),
                torch.tensor([u.sigma for u in updates.values()], dtype=torch.float64)]  # fmt: skip

    def judge(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> Verdict:
        return _worst((ours[0] - plain[0]).abs().max().item(), (ours[1] / plain[1] - 1).abs().max().item())

    return Problem(call, judge=judge, nbytes=4 * sum(w.nbytes + b.nbytes for w, b in pairs.values()), dtype=dtype)


def matvec(m: int, n: int, dtype: torch.dtype, on: Device) -> Problem:
    weight, base = _pair(m, n, dtype, on)
    v = torch.randn(n, device=on)
    return Problem(
        lambda backend: rlkernels.delta_matvec(weight, base, v, backend=backend),
        lambda: (weight.double() - base.double()) @ v.double(),
        nbytes=weight.nbytes + base.nbytes,
    )


def add(m: int, n: int, dtype: torch.dtype, stochastic: bool, on: Device) -> Problem:
    start = (torch.randn(m, n, device=on) * 0.02).to(dtype)
    weight, u, v = start.clone(), torch.randn(m, device=on), torch.randn(n, device=on)
    options: dict[str, Any] = {"stochastic_rounding": stochastic, "seed": 11}

    def judge(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> Verdict:
        """Judge the share of numbers that differ: despite keyed random bits, a last bit may change one."""
        a, b = ours[0].double(), plain[0].double()
        near = (a - b).abs() <= torch.finfo(dtype).eps * b.abs() + 1e-30
        return ((a != b).double().mean().item() if bool(near.all()) else float("inf")), 0.01

    return Problem(
        lambda backend: rlkernels.add_rank1_(weight, u, v, 1e-3, **options, backend=backend),
        exact=None if stochastic else lambda: start.double() + 1e-3 * torch.outer(u.double(), v.double()),
        judge=judge if stochastic else None,
        reset=lambda: weight.copy_(start),
        nbytes=2 * weight.nbytes,
        dtype=dtype,
    )


SMALL = [
    Case("top1_delta", "257 x 1023", partial(top1, 257, 1023, BF16)),
    Case("top1_delta", "63 x 31 float32", partial(top1, 63, 31, F32)),
    Case("top1_delta", "40 x 5003", partial(top1, 40, 5003, BF16)),
    Case("top1_deltas", "three odd shapes", partial(top1_many, [(65, 33), (1, 19), (127, 257)], BF16)),
    Case("top1_deltas", "wide and narrow float16", partial(top1_many, [(64, 4112), (48, 64)], torch.float16)),
    Case("delta_matvec", "257 x 1023", partial(matvec, 257, 1023, BF16)),
    Case("delta_matvec", "1 x 1 float32", partial(matvec, 1, 1, F32)),
    Case("add_rank1_", "257 x 1023", partial(add, 257, 1023, BF16, False)),
    Case("add_rank1_", "127 x 33, stochastic rounding", partial(add, 127, 33, BF16, True)),
]


def timed(work: Workload) -> Iterator[Case]:
    """Yield cases: a matrix of the feed-forward layer, and the seven modules of a layer."""
    wide, narrow, dtype = 4 * work.hidden, work.hidden, work.torch_dtype
    kv = work.kv_heads * work.head_dim
    layer = [(narrow, narrow), (kv, narrow), (kv, narrow), (narrow, narrow), (wide, narrow), (wide, narrow),
             (narrow, wide)]  # fmt: skip
    matrix = f"{wide} x {narrow}"
    yield Case("top1_delta", matrix, partial(top1, wide, narrow, dtype), timed=True)
    yield Case("top1_deltas", f"a layer of width {narrow}", partial(top1_many, layer, dtype), timed=True)
    yield Case("delta_matvec", matrix, partial(matvec, wide, narrow, dtype), timed=True)
    yield Case("add_rank1_", matrix, partial(add, wide, narrow, dtype, False), timed=True)
    yield Case("add_rank1_/large", "14336 x 4096", partial(add, 14336, 4096, dtype, False), timed=True)
