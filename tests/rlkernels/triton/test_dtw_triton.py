import math

import pytest
import torch
from support import assert_equal, draw_series

import rlkernels


@pytest.mark.parametrize(("rows", "columns", "features", "band"), [
    (1, 1, None, None), (5, 9, None, 0), (5, 9, None, None), (34, 6, 3, 4), (34, 4, 2, None)
])  # fmt: skip
def test_dtw(rows, columns, features, band):
    sizes = (2 if rows < 20 else 1, rows), (3, columns)
    (x, x_lengths), (y, y_lengths) = (draw_series(n, steps, features, whole_numbers=True) for n, steps in sizes)
    x_lengths[0] = rows
    y_lengths[0] = columns
    y_lengths[1] = 0
    x[0] = x[0].nan_to_num(1)
    y[0] = y[0].nan_to_num(1)
    y[2, 0] = math.inf
    y_lengths[2] = columns
    for options in ({"band": band}, {"mode": "subsequence"}):
        options |= {"x_lengths": x_lengths, "y_lengths": y_lengths}
        result, expected = (rlkernels.dtw(x, y, **options, backend=b) for b in ("triton", "torch"))
        assert_equal(result, expected, equal_nan=True)


def test_topk():
    x = torch.randint(0, 3, (2, 3)).float()
    y = torch.randint(0, 3, (5, 4)).float()
    assert_equal(*(rlkernels.dtw_topk(x, y, 3, backend=b) for b in ("triton", "torch")))
