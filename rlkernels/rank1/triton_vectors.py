"""Everything of the solver but its reads, in Triton and float64: one program per module.

Threads exchange through memory what the next step of all needs, with a barrier between.
"""

from enum import IntEnum

import triton
import triton.language as tl

from rlkernels.rank1.reference import DROP, EPS
from rlkernels.rank1.triton_kernels import GIVEN, ITEMS, OUT, STATS, Q, Y, _load_module, _vectors
from rlkernels.rank1.update import GAP_FLOOR, LEAST_SQUARE, MOST_SQUARE


class Fact(IntEnum):
    """Columns of the table of facts; the first three are given."""

    FLOOR = 0  # of the random start's part, see ``reference.hidden_floor``
    SINE_LIMIT = 1  # of the angle, for convergence
    FLAT_LIMIT = 2  # of the residual, to give up on a leading pair without a gap
    SQUARE = 3  # squared Frobenius norm
    CHANGED = 4  # entries
    GAP = 5
    RESIDUAL = 6
    SINE = 7  # bound of the angle's, without rounding; 1: nothing is known
    PASSES = 8
    THETA = 9  # R leading Ritz values


(
    FLOOR, SINE_LIMIT, FLAT_LIMIT, SQUARE, CHANGED, GAP, RESIDUAL, SINE, PASSES, THETA,
) = (tl.constexpr(int(column)) for column in Fact)  # fmt: skip
_DROP, _EPS, _GAP_FLOOR = tl.constexpr(DROP), tl.constexpr(EPS), tl.constexpr(GAP_FLOOR)
_LEAST_SQUARE, _MOST_SQUARE = tl.constexpr(LEAST_SQUARE), tl.constexpr(MOST_SQUARE)
SWEEPS = tl.constexpr(16)  # most of them; five to eight are usual
NEGLIGIBLE = tl.constexpr(
    1e-12
)  # times the trace: off-diagonal entries whose squares, after their rotations, are rounding


@triton.jit
def _state(state, module, capacity, rank):
    """Return where the module's small matrices are: room for products of vectors [K, 4], the Gram matrix of Y [K, K] in
    the basis of the Ritz vectors so far, these as columns [K, K], and the leading ones in order [K, R]."""
    products = state + module.to(tl.int64) * capacity * (2 * capacity + rank + 4)
    gram = products + capacity * 4
    ritz = gram + capacity * capacity
    return products, gram, ritz, ritz + capacity * capacity


@triton.jit
def _tile(x, stride, i, length):
    """Load four vectors as float64: [4, places]."""
    at = x + tl.arange(0, 4)[:, None] * stride + i[None, :]
    return tl.load(at, mask=(i < length)[None, :], other=0.0).to(tl.float64)


@triton.jit
def _store_dots(x, x_stride, w, w_stride, length, out, k, BLOCK: tl.constexpr):
    """Set out [k, 4] to x_a . w_b, for all threads."""
    place = tl.arange(0, 4)
    for a in range(0, k, 4):
        total = tl.zeros([4, 4, BLOCK], tl.float64)
        for start in range(0, length, BLOCK):
            i = start + tl.arange(0, BLOCK)
            left, right = _tile(x + a * x_stride, x_stride, i, length), _tile(w, w_stride, i, length)
            total += left[:, None, :] * right[None, :, :]
        tl.store(out + (a + place)[:, None] * 4 + place[None, :], tl.sum(total, 2))
    tl.debug_barrier()


@triton.jit
def _combined(x, x_stride, i, length, coefficients, stride, columns, k):
    """Return sum_a x_a coefficients[a, columns] at the places i: [columns, places]."""
    total = tl.zeros([columns.shape[0], i.shape[0]], tl.float64)
    for a in range(0, k, 4):
        row = a + tl.arange(0, 4)
        c = tl.load(coefficients + row[:, None] * stride + columns[None, :])
        total += tl.sum(_tile(x + a * x_stride, x_stride, i, length)[:, None, :] * c[:, :, None], 0)
    return total


@triton.jit
def _residual(q, z, stride, length, coefficients, coefficient_stride, theta, k, BLOCK: tl.constexpr):
    """Return |Z c / theta - Q c|, element by element: nothing cancels."""
    square = tl.zeros([BLOCK], tl.float64)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float64)
        for a in range(0, k, 4):
            c = tl.load(coefficients + (a + tl.arange(0, 4)) * coefficient_stride)
            image, vector = _tile(z + a * stride, stride, i, length), _tile(q + a * stride, stride, i, length)
            total += tl.sum((image / theta - vector) * c[:, None], 0)
        square += total * total
    return tl.sqrt(tl.sum(square))


@triton.jit
def _cholesky(gram, least):
    """Return T [4, 4] such that R T has orthonormal columns, for gram = R^T R; zero where a column is no longer than
    ``least`` [4] once its part in the columns before is gone. Gram-Schmidt on coordinates."""
    row, column = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :]
    t = tl.zeros([4, 4], tl.float64)
    for b in range(4):
        dots = tl.sum(t * tl.sum(tl.where(column == b, gram, 0.0), 1)[:, None], 0)
        rest = (row == b).to(tl.float64) - tl.sum(t * dots[None, :], 1)[:, None]  # [4, 1]
        square = tl.sum(tl.sum(gram * rest, 0)[None, :] * tl.where(column == row, rest, 0.0))
        length = tl.sqrt(tl.maximum(square, 0.0))
        kept = length > tl.sum(tl.where(tl.arange(0, 4) == b, least, 0.0))
        t = tl.where(column == b, tl.where(kept, rest / tl.where(kept, length, 1.0), 0.0), t)
    return t


@triton.jit
def _extend(work, stride, q, gram, least, length, BLOCK: tl.constexpr):
    """Set q to the orthonormal columns of work, whose Gram matrix lies in gram (Cholesky QR, twice); return their
    number."""
    row, column = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :]
    t = (row == column).to(tl.float64)
    for _ in range(2):
        t = tl.sum(t[:, :, None] * _cholesky(tl.load(gram + row * 4 + column), least)[None, :, :], 1)
        least = least * 0
        total = tl.zeros([4, 4, BLOCK], tl.float64)
        for start in range(0, length, BLOCK):
            i = start + tl.arange(0, BLOCK)
            mixed = tl.sum(_tile(work, stride, i, length)[:, None, :] * t[:, :, None], 0)
            total += mixed[:, None, :] * mixed[None, :, :]
            at = q + tl.arange(0, 4)[:, None] * stride + i[None, :]
            tl.store(at, mixed.to(tl.float32), mask=(i < length)[None, :])
        tl.debug_barrier()
        tl.store(gram + row * 4 + column, tl.sum(total, 2))
        tl.debug_barrier()
    return tl.sum(((row == column) & (t > 0)).to(tl.int32))


@triton.jit
def _project(work, q, stride, products, k, length, BLOCK: tl.constexpr):
    """Remove from four vectors what lies in q (Gram-Schmidt, twice)."""
    for _ in range(2):
        _store_dots(q, stride, work, stride, length, products, k, BLOCK)
        for start in range(0, length, BLOCK):
            i = start + tl.arange(0, BLOCK)
            rest = _tile(work, stride, i, length) - _combined(q, stride, i, length, products, 4, tl.arange(0, 4), k)
            tl.store(work + tl.arange(0, 4)[:, None] * stride + i[None, :], rest, mask=(i < length)[None, :])
        tl.debug_barrier()


@triton.jit
def _diagonalise(gram, ritz, k, stride, KP: tl.constexpr):
    """Rotate gram [k, k] until it is diagonal, and the columns of ritz alike; return the diagonal [KP]. Jacobi's
    method, in turns of a tournament of the k (even) columns."""
    i, j = tl.arange(0, KP)[:, None], tl.arange(0, KP)[None, :]
    column = tl.arange(0, KP)
    mask = (i < k) & (j < k)
    value = tl.load(gram + column * (stride + 1), mask=column < k, other=0.0)
    limit = NEGLIGIBLE * tl.sum(value)
    largest = 2 * limit
    sweep = 0
    while (sweep < SWEEPS) & (largest > limit):
        seen = tl.zeros([KP], tl.float64)
        for turn in range(k - 1):
            other = (2 * turn - column + 2 * k - 2) % (k - 1)
            other = tl.where(column == turn, k - 1, tl.where(column == k - 1, turn, other))
            upper = tl.minimum(column, other) * stride + tl.maximum(column, other)  # a pair looks at the same entry
            entry = tl.load(gram + upper, mask=column < k, other=0.0)
            value = tl.load(gram + column * (stride + 1), mask=column < k, other=0.0)
            difference = tl.load(gram + other * (stride + 1), mask=column < k, other=0.0) - value
            seen = tl.maximum(seen, tl.abs(entry))
            below = tl.abs(difference) + tl.sqrt(difference * difference + 4 * entry * entry)
            tangent = 2 * entry / tl.where(below > 0, below, 1.0)
            tangent = tl.where((difference > 0) | ((difference == 0) & (column < other)), -tangent, tangent)
            c = 1 / tl.sqrt(1 + tangent * tangent)
            s = tangent * c
            partner, partners = other[:, None] + j * 0, other[None, :] + i * 0
            rows = c[:, None] * tl.load(gram + i * stride + j, mask=mask, other=0.0)
            rows += s[:, None] * tl.load(gram + partner * stride + j, mask=mask, other=0.0)
            others = c[:, None] * tl.load(gram + i * stride + partners, mask=mask, other=0.0)
            others += s[:, None] * tl.load(gram + partner * stride + partners, mask=mask, other=0.0)
            vectors = c[None, :] * tl.load(ritz + i * stride + j, mask=mask, other=0.0)
            vectors += s[None, :] * tl.load(ritz + i * stride + partners, mask=mask, other=0.0)
            tl.debug_barrier()  # all threads have loaded before any stores
            tl.store(gram + i * stride + j, c[None, :] * rows + s[None, :] * others, mask=mask)
            tl.store(ritz + i * stride + j, vectors, mask=mask)
            tl.debug_barrier()
        largest = tl.max(seen, 0)
        sweep += 1
    return tl.maximum(tl.load(gram + column * (stride + 1), mask=column < k, other=0.0), 0.0)


@triton.jit
def _add_to_gram(gram, ritz, products, k, stride, KP: tl.constexpr):
    """Give gram and ritz four more rows and columns; products [k, 4]: of all columns of Y with the newest."""
    old, i, new = k - 4, tl.arange(0, KP), tl.arange(0, 4)
    entry = tl.load(products + i[:, None] * 4 + new[None, :], mask=((i >= old) & (i < k))[:, None], other=0.0)
    for a in range(old):
        turned = tl.load(ritz + a * stride + i, mask=i < old, other=0.0)
        entry += turned[:, None] * tl.load(products + a * 4 + new)[None, :]
    tl.store(gram + i[:, None] * stride + (old + new)[None, :], entry, mask=(i < k)[:, None])
    tl.store(gram + (old + new)[None, :] * stride + i[:, None], entry, mask=(i < old)[:, None])
    tl.store(ritz + (old + new) * (stride + 1), tl.full([4], 1.0, tl.float64))
    tl.debug_barrier()


@triton.jit
def _sort(values, ritz, leading, theta, k, stride, rank, KP: tl.constexpr):
    """Store the leading Ritz values and vectors in descending order; return the first two values."""
    i, j = tl.arange(0, KP)[:, None], tl.arange(0, KP)[None, :]
    before = (values[:, None] > values[None, :]) | ((values[:, None] == values[None, :]) & (i < j))
    place = tl.sum(before.to(tl.int32), 0)
    kept = (tl.arange(0, KP) < k) & (place < rank)
    tl.store(theta + place, values, mask=kept)
    mask = (i < k) & kept[None, :]
    tl.store(leading + i * rank + place[None, :], tl.load(ritz + i * stride + j, mask=mask, other=0.0), mask=mask)
    tl.debug_barrier()
    return tl.sum(tl.where(place == 0, values, 0.0)), tl.sum(tl.where(place == 1, values, 0.0))


@triton.jit
def _spectral_norm(m):
    """Bound the largest eigenvalue of positive semidefinite [places, 4, 4] from above, by at most 4^(1/8) times it."""
    diagonal = (tl.arange(0, 4)[:, None] == tl.arange(0, 4)[None, :])[None, :, :]
    trace = tl.sum(tl.sum(tl.where(diagonal, m, 0.0), 2), 1)
    power = m / tl.where(trace > 0, trace, 1.0)[:, None, None]
    for _ in range(3):
        power = tl.sum(power[:, :, :, None] * power[:, None, :, :], 2)
    return tl.sqrt(tl.sqrt(tl.sqrt(tl.sum(tl.sum(tl.where(diagonal, power, 0.0), 2), 1)))) * trace


@triton.jit
def _bound_sine(gram, ritz, rest, top, second, residual, floor, given, n, k, stride):
    """Bound the sine of the angle as ``reference.angle_bound``, without rounding; 1: nothing is known."""
    place, row = tl.arange(0, 64), tl.arange(0, 4)
    step = tl.maximum(49 - place, 0)  # fiftieths of the way, from the first eigenvalue down, then that itself
    x = tl.where(step > 0, second + (top - second) * step.to(tl.float64) / 50, top)
    itself = tl.where(step == 0, top, -1.0)
    random = ((row >= given) & (row < n)).to(tl.float64)  # of the start's columns
    response = tl.zeros([64, 4, 4], tl.float64)
    for a in range(k):
        theta = tl.maximum(tl.load(gram + a * (stride + 1)), 0.0)
        weight = 1 / (x - theta)
        weight = tl.where(theta == itself, 0.0, weight)
        start = tl.load(ritz + row * stride + a) * random
        last = tl.load(ritz + (k - 4 + row) * stride + a)
        response += weight[:, None, None] * (start[:, None] * last[None, :])[None, :, :]
    rest = tl.load(rest + row[:, None] * 4 + row[None, :])
    through = tl.sum(response[:, :, :, None] * rest[None, None, :, :], 2)
    reach = tl.sqrt(_spectral_norm(tl.sum(through[:, :, None, :] * response[:, None, :, :], 3)))
    free = (reach < floor) & (step > 0)
    begin = tl.min(tl.where(free, place, 64), 0)
    end = tl.min(tl.where((place > begin) & (free == 0), place, 64), 0)  # of the first stretch without an eigenvalue
    bound = second + (top - second) * (50 - end).to(tl.float64) / 50
    hidden = tl.sum(tl.where(place == 49, reach, 0.0), 0)
    known = (begin < 64) & (top > second) & (hidden < floor / 2)
    sine = (residual + 4 * _EPS) / tl.where(known, 1 - bound / tl.where(known, top, 1.0), 1.0)
    return tl.where(known, tl.minimum(sine, 1.0), 1.0)


@triton.jit
def _add_statistics(module_row, stats, facts, BLOCK: tl.constexpr):
    """Add up the partial statistics; return the squared norm."""
    stats += 2 * tl.load(module_row + STATS)
    count = tl.load(module_row + ITEMS)
    square = tl.zeros([BLOCK], tl.float64)
    changed = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        square += tl.load(stats + 2 * i, mask=i < count, other=0.0)
        changed += tl.load(stats + 2 * i + 1, mask=i < count, other=0.0)
    total = tl.sum(square)
    tl.store(facts + SQUARE, total)
    tl.store(facts + CHANGED, tl.sum(changed))
    return total


@triton.jit(do_not_specialize=["capacity", "rank"])
def _start_kernel(modules, q, work, state, all_columns, capacity, rank, seed, BLOCK: tl.constexpr):
    """Set the first block: the start, if given (in work), then random columns as in ``reference.random_block``."""
    module_row, _, n = _load_module(modules, tl.program_id(0), False)
    given = tl.load(module_row + GIVEN)
    q, work = _vectors(q, module_row, Q), _vectors(work, module_row, Q)
    stride = all_columns.to(tl.int64)
    c = tl.arange(0, 4)[:, None]
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)[None, :]
        keyed, at = c - given + i * 0, i + c * 0
        word, _1, _2, _3 = tl.philox(
            seed, keyed.to(tl.uint32), (keyed * 0).to(tl.uint32), at.to(tl.uint32), (at >> 32).to(tl.uint32)
        )
        value = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07 - 0.5
        value = tl.where(c < n, value, 0.0).to(tl.float64)
        tl.store(work + c * stride + i, value, mask=(i < n) & (c >= given))
    tl.debug_barrier()
    products, _, _, _ = _state(state, tl.program_id(0), capacity, rank)
    _store_dots(work, stride, work, stride, n, products, 4, BLOCK)
    _extend(work, stride, q, products, tl.zeros([4], tl.float64), n, BLOCK)


@triton.jit(do_not_specialize=["k", "capacity", "rank", "least"])
def _step_kernel(modules, facts, active, q, z, y, work, stats, state, all_rows, all_columns, k, capacity, rank, least,
                 BLOCK: tl.constexpr, KP: tl.constexpr):  # fmt: skip
    """Advance a module by the newest four columns of Y and Z: Ritz pairs of all k, facts about the first, four new
    columns of q while there is room (capacity). A module is done when it has converged, after ``least`` passes or
    more, or when there is no new column."""
    module = tl.program_id(0).to(tl.int64)
    if tl.load(active + module) == 0:
        return
    module_row, m, n = _load_module(modules, module, False)
    facts += module * (THETA + rank)
    usual = k > 0
    if k == 4:
        square = _add_statistics(module_row, stats, facts, BLOCK)
        usual = (square >= _LEAST_SQUARE) & (square <= _MOST_SQUARE)
    if usual == 0:
        tl.store(active + module, usual)
        return
    q, z = _vectors(q, module_row, Q), _vectors(z, module_row, Q)
    work, y = _vectors(work, module_row, Q), _vectors(y, module_row, Y)
    stride, rows = all_columns.to(tl.int64), all_rows.to(tl.int64)
    products, gram, ritz, leading = _state(state, module, capacity, rank)

    _store_dots(y, rows, y + (k - 4) * rows, rows, m, products, k, BLOCK)
    _add_to_gram(gram, ritz, products, k, capacity, KP)
    values = _diagonalise(gram, ritz, k, capacity, KP)
    top, second = _sort(values, ritz, leading, facts + THETA, k, capacity, rank, KP)
    found = top > 0  # not so when the start lies in the null space, as for one non-zero entry
    safe = tl.where(found, top, 1.0)
    residual = _residual(q, z, stride, n, leading, rank, safe, k, BLOCK)
    residual = tl.where(found, residual, float("inf"))
    gap = tl.where(found, 1 - tl.sqrt(second / safe), 0.0)

    _store_dots(work, stride, work, stride, n, products, 4, BLOCK)
    lengths = tl.sqrt(tl.load(products + tl.arange(0, 4) * 5))
    tl.debug_barrier()
    _project(work, q, stride, products, k, n, BLOCK)
    _store_dots(work, stride, work, stride, n, products, 4, BLOCK)
    sine = _bound_sine(gram, ritz, products, top, second, residual, tl.load(facts + FLOOR), tl.load(module_row + GIVEN),
                       n, k, capacity)  # fmt: skip
    tl.store(facts + GAP, gap)
    tl.store(facts + RESIDUAL, residual)
    tl.store(facts + SINE, sine)
    tl.store(facts + PASSES, (k // 4).to(tl.float64))
    flat = found & (gap < _GAP_FLOOR) & (residual <= tl.load(facts + FLAT_LIMIT))
    done = (k >= 4 * least) & (flat | (sine <= tl.load(facts + SINE_LIMIT)))
    if (k < capacity) & (done == 0):
        done = _extend(work, stride, q + k * stride, products, _DROP * lengths, n, BLOCK) == 0
    tl.debug_barrier()
    tl.store(active + module, done == 0)


@triton.jit(do_not_specialize=["capacity", "rank"])
def _finish_kernel(modules, facts, q, y, state, out, all_rows, all_columns, capacity, rank, BLOCK: tl.constexpr):
    """Set out to v [R, n], u * sigma [R, m] and the first u [m]; the largest entry of v is positive. Program (module,
    direction)."""
    module, direction = tl.program_id(0).to(tl.int64), tl.program_id(1)
    module_row, m, n = _load_module(modules, module, False)
    facts += module * (THETA + rank)
    q, y, out = _vectors(q, module_row, Q), _vectors(y, module_row, Y), out + tl.load(module_row + OUT)
    stride, rows = all_columns.to(tl.int64), all_rows.to(tl.int64)
    _, _, _, leading = _state(state, module, capacity, rank)
    leading += direction
    k = tl.load(facts + PASSES).to(tl.int32) * 4
    first = tl.arange(0, 1)
    largest = tl.zeros([1, BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        v = _combined(q, stride, start + tl.arange(0, BLOCK), n, leading, rank, first, k)
        largest = tl.where(tl.abs(v) > tl.abs(largest), v, largest)
    most = tl.max(largest)
    sign = tl.where(most >= -tl.min(largest), 1.0, -1.0)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = _combined(q, stride, i, n, leading, rank, first, k) * sign
        tl.store(out + direction * n + i[None, :], v.to(tl.float32), mask=(i < n)[None, :])
    left = out + rank * n
    sigma = tl.sqrt(tl.load(facts + THETA))
    sigma = tl.where(sigma > 0, sigma, 1.0)
    for start in range(0, m, BLOCK):
        i = start + tl.arange(0, BLOCK)
        u = _combined(y, rows, i, m, leading, rank, first, k) * sign
        tl.store(left + direction * m + i[None, :], u.to(tl.float32), mask=(i < m)[None, :])
        tl.store(left + rank * m + i[None, :], (u / sigma).to(tl.float32), mask=(i < m)[None, :] & (direction == 0))
