"""Between the matrix products of a decoder layer. Only a CPU has kernels for these: on a GPU this is plain torch."""

from functools import partial

import torch

from bench.gpu.problem import GpuCase, Problem
from rlkernels import decoder
from rlkernels.decoder import reference

Device = torch.device
EPS = 1e-6


def norm(rows: int, width: int, dtype: torch.dtype, on: Device) -> Problem:
    residual, x, weight = (
        torch.randn(shape, device=on).to(dtype) for shape in ((rows, width), (rows, width), (width,))
    )
    return Problem(
        lambda backend: decoder.add_rms_norm(residual, x, weight, EPS, backend=backend),
        lambda: reference.add_rms_norm(residual.double(), x.double(), weight.double(), EPS),
        nbytes=4 * x.nbytes + weight.nbytes,
        dtype=dtype,
    )


def rotated(rows: int, heads: tuple[int, int, int], dtype: torch.dtype, on: Device) -> Problem:
    """heads: query heads, key heads, dimension; queries and keys are normalised too, as in Qwen3."""
    q_heads, kv_heads, dim = heads
    angle = torch.randn(4096, dim // 2, device=on).repeat(1, 2)
    shapes = ((rows, (q_heads + 2 * kv_heads) * dim), (dim,), (dim,))
    x, q_weight, k_weight = (torch.randn(shape, device=on).to(dtype) for shape in shapes)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    positions, counts = torch.randint(0, 4096, (rows,)).to(on), (q_heads, q_heads + kv_heads)

    def exact() -> torch.Tensor:
        x64, cos64, sin64, q64, k64 = (t.double() for t in (x, cos, sin, q_weight, k_weight))
        return reference.rope(x64, positions, cos64, sin64, *counts, q64, k64, EPS)

    return Problem(
        lambda backend: decoder.rope(x, positions, cos, sin, *counts, q_weight, k_weight, EPS, backend=backend),
        exact,
        nbytes=2 * x.nbytes + positions.nbytes + 2 * rows * dim * x.element_size(),
        dtype=dtype,
    )


def gated(rows: int, width: int, dtype: torch.dtype, on: Device) -> Problem:
    both = torch.randn(rows, 2 * width, device=on).to(dtype)
    return Problem(
        lambda backend: decoder.silu_mul(both, backend=backend),
        lambda: reference.silu_mul(both.double()),
        nbytes=3 * both.nbytes // 2,
        dtype=dtype,
    )


BF16, F32 = torch.bfloat16, torch.float32

CASES = [
    GpuCase("add_rms_norm", "37 x 1023 float32", partial(norm, 37, 1023, F32)),
    GpuCase("rope", "33 rows of 5, 2 and 2 heads of 24, float32", partial(rotated, 33, (5, 2, 24), F32)),
    GpuCase("silu_mul", "37 x 1023 float32", partial(gated, 37, 1023, F32)),
    GpuCase("add_rms_norm", "16384 x 4096", partial(norm, 16384, 4096, BF16), timed=True),
    GpuCase("rope", "16384 rows, Llama-3-8B heads", partial(rotated, 16384, (32, 8, 128), BF16), timed=True),
    GpuCase("silu_mul", "16384 x 14336", partial(gated, 16384, 14336, BF16), timed=True),
]
