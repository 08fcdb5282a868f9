"""Cases of the leading singular triplet of weight deltas, and of its use."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import rlkernels
from rlkernels.proof.problem import Case, ErrorBound, Problem
from rlkernels.proof.workload import Workload

Device = torch.device
BF16 = torch.bfloat16
F32 = torch.float32
TOL = 1e-2
MAX_SVD_ENTRIES = 2**22  # of a matrix whose triplet is compared with that of a float64 SVD


def _pair(m: int, n: int, dtype: torch.dtype, on: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and its base, which differ by a dominant direction and noise, in the storage dtype."""
    base = (torch.randn(m, n, device=on) * 0.02).to(dtype)
    u = torch.randn(m, device=on)
    v = torch.randn(n, device=on)
    delta = torch.outer(u, v) * 1e-3 + torch.randn(m, n, device=on) * 3e-4
    return (base.float() + delta).to(dtype), base


def _worst(*errors: float) -> ErrorBound:
    """Return the largest error and its bound; NaN counts as infinite."""
    return max(math.inf if math.isnan(error) else error for error in errors), 2 * TOL


def top1(m: int, n: int, dtype: torch.dtype, on: Device) -> Problem:
    """Make a problem whose errors are the angles to the true directions, their lengths, and sigma."""
    weight, base = _pair(m, n, dtype, on)

    def call(backend: str) -> list[Any]:
        update = rlkernels.top1_delta(weight, base, tol=TOL, backend=backend)
        return [update.u, torch.tensor(update.sigma, dtype=torch.float64, device="cpu"), update.v]

    def judge(result: list[torch.Tensor], plain: list[torch.Tensor]) -> ErrorBound:
        u, sigma, v = (tensor.double() for tensor in plain)
        if m * n <= MAX_SVD_ENTRIES:
            us, sigmas, vs = torch.linalg.svd(weight.double() - base.double(), full_matrices=False)
            u = us[:, 0]
            sigma = sigmas[0]
            v = vs[0]
        errors = [10 * abs(result[1].item() / sigma.item() - 1)]
        for vector, exact in ((result[0].double(), u), (result[2].double(), v)):
            sine = (vector - exact * (vector @ exact)).norm().item()
            errors += [sine, 1e3 * abs(vector.norm().item() - 1)]
        return _worst(*errors)

    given = {"pairs": [(weight, base)]}
    return Problem(call, judge=judge, nbytes=2 * weight.nbytes, dtype=dtype, inputs=given)


def top1_many(shapes: list[tuple[int, int]], dtype: torch.dtype, on: Device) -> Problem:
    """Make a problem of many modules in one call, compared with plain torch."""
    pairs = {f"{i}": _pair(m, n, dtype, on) for i, (m, n) in enumerate(shapes)}

    def call(backend: str) -> list[Any]:
        updates = rlkernels.top1_deltas(pairs, tol=TOL, backend=backend).values()
        vectors = torch.cat([vector.flatten() for update in updates for vector in (update.u, update.v)])
        return [vectors, torch.tensor([update.sigma for update in updates], dtype=torch.float64, device="cpu")]

    def judge(result: list[torch.Tensor], plain: list[torch.Tensor]) -> ErrorBound:
        return _worst((result[0] - plain[0]).abs().max().item(), (result[1] / plain[1] - 1).abs().max().item())

    nbytes = 4 * sum(w.nbytes + b.nbytes for w, b in pairs.values())
    return Problem(call, judge=judge, nbytes=nbytes, dtype=dtype, inputs={"pairs": [*pairs.values()]})


def matvec(m: int, n: int, dtype: torch.dtype, on: Device) -> Problem:
    weight, base = _pair(m, n, dtype, on)
    v = torch.randn(n, device=on)
    return Problem(
        lambda backend: rlkernels.delta_matvec(weight, base, v, backend=backend),
        lambda: (weight.double() - base.double()) @ v.double(),
        nbytes=weight.nbytes + base.nbytes,
        inputs={"tensors": (weight, base, v)},
    )


def add(m: int, n: int, dtype: torch.dtype, stochastic: bool, on: Device) -> Problem:
    start = (torch.randn(m, n, device=on) * 0.02).to(dtype)
    weight = start.clone()
    u = torch.randn(m, device=on)
    v = torch.randn(n, device=on)
    scale = 1e-3
    options: dict[str, Any] = {"stochastic_rounding": stochastic, "seed": 11}

    def judge(result: list[torch.Tensor], plain: list[torch.Tensor]) -> ErrorBound:
        """Return the share of numbers that differ: despite keyed random bits, a last bit may change one."""
        value = result[0].double()
        expected = plain[0].double()
        is_neighbour = (value - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-30
        share = (value != expected).double().mean().item()
        return (share if bool(is_neighbour.all()) else math.inf), 0.01

    return Problem(
        lambda backend: rlkernels.add_rank1_(weight, u, v, scale, **options, backend=backend),
        exact=None if stochastic else lambda: start.double() + scale * torch.outer(u.double(), v.double()),
        judge=judge if stochastic else None,
        reset=lambda: weight.copy_(start),
        nbytes=2 * weight.nbytes,
        dtype=dtype,
        inputs={"weight": weight, "u": u, "v": v, "scale": scale},
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
    wide = 4 * work.hidden
    narrow = work.hidden
    dtype = work.torch_dtype
    kv = work.kv_heads * work.head_dim
    layer = [(narrow, narrow), (kv, narrow), (kv, narrow), (narrow, narrow), (wide, narrow), (wide, narrow),
             (narrow, wide)]  # fmt: skip
    matrix = f"{wide} x {narrow}"
    yield Case("top1_delta", matrix, partial(top1, wide, narrow, dtype), timed=True)
    yield Case("top1_deltas", f"a layer of width {narrow}", partial(top1_many, layer, dtype), timed=True)
    yield Case("delta_matvec", matrix, partial(matvec, wide, narrow, dtype), timed=True)
    yield Case("add_rank1_", matrix, partial(add, wide, narrow, dtype, False), timed=True)
    yield Case("add_rank1_/large", "14336 x 4096", partial(add, 14336, 4096, dtype, False), timed=True)
