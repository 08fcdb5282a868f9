"""The solver's work on vectors in Triton: first block, dot products, combinations, residual; all sums in float64."""

import triton
import triton.language as tl

from rlkernels.rank1.triton_kernels import GIVEN, WIDTH, Q, _shape


@triton.jit
def _start_kernel(modules, places, starts, out, all_columns, seed, COLUMNS: tl.constexpr):
    """Fill the first block: the start, if given, then random columns as in ``reference.random_block``."""
    place = places + tl.program_id(0) * 2
    facts, _, n = _shape(modules, tl.load(place), False)
    i = tl.load(place + 1) + tl.arange(0, COLUMNS)
    given, offset = tl.load(facts + GIVEN), tl.load(facts + Q)
    low, high = i.to(tl.uint32), (i >> 32).to(tl.uint32)
    for c in tl.static_range(4):
        keyed = tl.full([COLUMNS], c, tl.int64) - given
        word, _, _, _ = tl.philox(seed, keyed.to(tl.uint32), (keyed * 0).to(tl.uint32), low, high)
        value = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07 - 0.5
        if c == 0:
            value = tl.where(given == 1, tl.load(starts + offset + i, mask=i < n, other=0.0), value)
        value = tl.where(c < n, value, 0.0)
        tl.store(out + c * all_columns + offset + i, value.to(tl.float64), mask=i < n)


@triton.jit
def _dots_kernel(
    modules, active, x, w, out, x_stride, w_stride, k, LENGTH: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    """Set out[module, a, b] = x_a . w_b over the module's stretch, in float64; program (module, a), four b."""
    module, a = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.load(active + module) == 0:
        return
    facts = modules + module * WIDTH
    length, offset = tl.load(facts + LENGTH), tl.load(facts + OFFSET)
    x += a * x_stride + offset
    w += offset
    s0 = tl.zeros([BLOCK], tl.float64)
    s1, s2, s3 = s0, s0, s0
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < length
        value = tl.load(x + i, mask=mask, other=0.0).to(tl.float64)
        s0 += value * tl.load(w + i, mask=mask, other=0.0).to(tl.float64)
        s1 += value * tl.load(w + w_stride + i, mask=mask, other=0.0).to(tl.float64)
        s2 += value * tl.load(w + 2 * w_stride + i, mask=mask, other=0.0).to(tl.float64)
        s3 += value * tl.load(w + 3 * w_stride + i, mask=mask, other=0.0).to(tl.float64)
    out += (module * k + a) * 4
    tl.store(out, tl.sum(s0))
    tl.store(out + 1, tl.sum(s1))
    tl.store(out + 2, tl.sum(s2))
    tl.store(out + 3, tl.sum(s3))


@triton.jit
def _combine_kernel(modules, places, active, x, coefficients, w, out, x_stride, w_stride, k, ADD: tl.constexpr,
                    WANTED: tl.constexpr, OFFSET: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Set out_b = sum_a x_a coefficients[module, a, b] (+ w_b), in float64. places [P, 2]: module, first entry."""
    place = places + tl.program_id(0) * 2
    module = tl.load(place)
    if tl.load(active + module) == 0:
        return
    facts = modules + module * WIDTH
    i = tl.load(place + 1) + tl.arange(0, BLOCK)
    mask = i < tl.load(facts + LENGTH)
    at = tl.load(facts + OFFSET) + i
    coefficients += module * k * WANTED
    for b in tl.static_range(WANTED):
        total = tl.zeros([BLOCK], tl.float64)
        column = x + at
        for a in range(k):
            value = tl.load(column, mask=mask, other=0.0).to(tl.float64)
            total += value * tl.load(coefficients + a * WANTED + b)
            column += x_stride
        if ADD:
            total += tl.load(w + b * w_stride + at, mask=mask, other=0.0).to(tl.float64)
        tl.store(out + b * w_stride + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _residual_kernel(modules, active, q, z, coordinates, theta, out, all_columns, k, BLOCK: tl.constexpr):
    """Set out[module] = |Z c / theta - Q c|^2, element by element: nothing cancels."""
    module = tl.program_id(0).to(tl.int64)
    if tl.load(active + module) == 0:
        return
    facts, _, n = _shape(modules, module, False)
    q += tl.load(facts + Q)
    z += tl.load(facts + Q)
    coordinates += module * k
    value = tl.load(theta + module)
    square = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        image = tl.zeros([BLOCK], tl.float64)
        vector = tl.zeros([BLOCK], tl.float64)
        z_column = z + i
        q_column = q + i
        for a in range(k):
            c = tl.load(coordinates + a)
            image += tl.load(z_column, mask=i < n, other=0.0).to(tl.float64) * c
            vector += tl.load(q_column, mask=i < n, other=0.0).to(tl.float64) * c
            z_column += all_columns
            q_column += all_columns
        difference = image / value - vector
        square += difference * difference
    tl.store(out + module, tl.sum(square))
