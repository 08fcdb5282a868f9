"""``delta_matvec`` and ``add_rank1_`` in Triton, of one matrix at a time."""

import torch
import triton
import triton.language as tl

from rlkernels._fakes import FAKES
from rlkernels.backend import kernel_op, next_power_of_2
from rlkernels.rank1.triton_kernels import _float, _raw, stored


@triton.jit
def _matvec_kernel(weight, base, v, out, m, n, weight_stride, base_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        w = _raw(weight, weight_stride, row, m, column, n)
        delta = _float(w) - _float(_raw(base, base_stride, row, m, column, n))
        total += delta * tl.load(v + column, mask=column < n, other=0.0)[None, :]
    tl.store(out + row, tl.sum(total, 1), mask=row < m)


@triton.jit
def _bfloat16_bits(x):
    """Return the 16 bits of x rounded to the nearest bfloat16, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _round_at_random(x, random, BFLOAT16: tl.constexpr):
    """Return a neighbour of x in bfloat16 (its bits) or float16, as ``reference.stochastic_round``."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    if BFLOAT16:  # the bits that go are the fraction of the spacing; counted from zero for negative numbers
        up = tl.where(bits < 0, 0xFFFF - random, random)
        return tl.where(finite, (bits + up) >> 16, _bfloat16_bits(x).to(tl.int32)).to(tl.int16)
    else:
        exponent = (bits >> 23) & 0xFF
        exponent = tl.where(exponent < 113, 113, exponent)
        exponent = tl.where(finite, exponent, 113)
        unit = ((exponent - 10) << 23).to(tl.float32, bitcast=True)
        inverse = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
        rounded = tl.floor(x * inverse + (random >> 3).to(tl.float32) * 0.0001220703125) * unit
        return tl.where(finite, rounded, x).to(tl.float16)


@triton.jit
def _add_kernel(
    weight, u, v, m, n, stride, scale, seed, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < m)[:, None] & (column < n)[None, :]
    at = weight + row[:, None] * stride + column[None, :]
    left = tl.load(u + row, mask=row < m, other=0.0) * scale
    value = _float(tl.load(at, mask=mask, other=0))
    value += left[:, None] * tl.load(v + column, mask=column < n, other=0.0)[None, :]
    if STOCHASTIC:
        zero = tl.zeros([ROWS, BLOCK], tl.int64)
        pair = (column >> 1)[None, :] + zero
        of = row[:, None] + zero
        word, _, _, _ = tl.philox(
            seed, of.to(tl.uint32), (of >> 32).to(tl.uint32), pair.to(tl.uint32), (pair >> 32).to(tl.uint32)
        )
        random = ((word >> ((column & 1) * 16).to(tl.uint32)[None, :]) & 0xFFFF).to(tl.int32)
        out = _round_at_random(value, random, weight.dtype.element_ty == tl.int16)
    elif weight.dtype.element_ty == tl.int16:
        out = _bfloat16_bits(value)
    else:
        out = value.to(weight.dtype.element_ty)
    tl.store(at, out, mask=mask)


@kernel_op("rlkernels::delta_matvec_triton", FAKES["delta_matvec"])
def delta_matvec(weight: torch.Tensor, base: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute ``reference.delta_matvec``; rows must be contiguous."""
    m, n = weight.shape
    out = torch.empty(m, dtype=torch.float32, device=weight.device)
    block, rows = min(1024, next_power_of_2(n)), 4
    _matvec_kernel[(-(-m // rows),)](
        stored(weight), stored(base), v, out, m, n, weight.stride(0), base.stride(0),
        ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out


@kernel_op("rlkernels::add_rank1_triton_", mutates=("weight",))
def add_rank1_(
    weight: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scale: float, stochastic_rounding: bool, seed: int
) -> None:
    """Compute ``reference.add_rank1_``, for contiguous rows; the same random bits."""
    m, n = weight.shape
    if weight.numel():
        block, rows = min(1024, next_power_of_2(n)), 4
        rounded = stochastic_rounding and weight.dtype != torch.float32
        _add_kernel[(-(-m // rows), -(-n // block))](
            stored(weight), u, v, m, n, weight.stride(0), scale, seed, STOCHASTIC=rounded, ROWS=rows, BLOCK=block
        )
