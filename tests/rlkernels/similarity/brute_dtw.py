"""Dynamic time warping cell by cell in Python floats: what the tests of conventions compare with."""

import math


def table(x, y, band=None):
    """Cumulative cost of every cell of one pair of lists of numbers or lists."""

    def square(a, b):
        return sum((p - q) ** 2 for p, q in zip(a, b)) if isinstance(a, list) else (a - b) ** 2

    radius = math.inf if band is None else max(band, abs(len(x) - len(y)))
    cells = {}
    for i in range(len(x)):
        for j in range(len(y)):
            if abs(i - j) > radius:
                continue
            before = [cells.get((i - 1, j), math.inf), cells.get((i, j - 1), math.inf)]
            before.append(cells.get((i - 1, j - 1), 0.0 if i == j == 0 else math.inf))
            cells[i, j] = square(x[i], y[j]) + min(before)
    return cells


def dtw(x, y, band=None):
    """Cost of one pair of non-empty lists."""
    return table(x, y, band)[len(x) - 1, len(y) - 1]


def subsequence(x, y):
    """(cost, start, end) over all stretches of y: lowest cost, then lowest end, then highest start."""
    stretches = [(dtw(x, y[s : e + 1]), e, -s) for s in range(len(y)) for e in range(s, len(y))]
    cost, end, start = min(stretches)
    return cost, -start, end
