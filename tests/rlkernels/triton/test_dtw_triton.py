import math

import pytest
import torch

import rlkernels


def series(n, steps, *features):
    """Whole numbers, for which all orders of additions agree; NaN beyond the lengths."""
    values, lengths = torch.randint(-3, 4, (n, steps, *features)).float(), torch.randint(0, steps + 1, (n,))
    values[torch.arange(steps, device=values.device) >= lengths[:, None]] = math.nan
    return values, lengths


@pytest.mark.parametrize(("rows", "columns", "features", "band"), [
    (1, 1, (), None), (5, 9, (), 0), (5, 9, (), None), (34, 6, (3,), 4), (34, 4, (2,), None)
])  # fmt: skip
def test_dtw(rows, columns, features, band):
    (x, x_lengths), (y, y_lengths) = series(2 if rows < 20 else 1, rows, *features), series(3, columns, *features)
    x_lengths[0], y_lengths[0], y_lengths[1] = rows, columns, 0
    x[0], y[0] = x[0].nan_to_num(1), y[0].nan_to_num(1)
    y[2, 0], y_lengths[2] = math.inf, columns
    settings = {"x_lengths": x_lengths, "y_lengths": y_lengths, "band": band}
    ours = rlkernels.dtw(x, y, **settings, backend="triton")
    torch.testing.assert_close(ours, rlkernels.dtw(x, y, **settings, backend="torch"), rtol=0, atol=0, equal_nan=True)
    if band is None:
        settings = {**settings, "mode": "subsequence"}
        del settings["band"]
        for got, expected in zip(*(rlkernels.dtw(x, y, **settings, backend=b) for b in ("triton", "torch"))):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_topk():
    x, y = torch.randint(0, 3, (2, 3)).float(), torch.randint(0, 3, (5, 4)).float()
    for got, expected in zip(*(rlkernels.dtw_topk(x, y, 3, backend=b) for b in ("triton", "torch"))):
        assert torch.equal(got, expected)
