"""Kernels for the test of triton_aot: one that compiles, one that does not."""

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, (value * factor).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def broken_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))
