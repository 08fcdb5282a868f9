"""soft_dtw: value and gradient against the reference and against finite differences."""

import math

import pytest
import torch

import rlkernels
from rlkernels.similarity import reference


@pytest.mark.parametrize("band", [None, 0, 2])
@pytest.mark.parametrize("features", [None, 3])
def test_gradcheck(band, features):
    shape = [features] if features else []
    x = torch.randn(4, 6, *shape, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 5, *shape, dtype=torch.float64, requires_grad=True)
    lengths = {"x_lengths": torch.tensor([6, 1, 4, 3]), "y_lengths": torch.tensor([5, 5, 1, 3])}
    assert torch.autograd.gradcheck(lambda a, b: rlkernels.soft_dtw(a, b, gamma=0.7, band=band, **lengths), (x, y))


@pytest.mark.parametrize("gamma", [1e-12, 1e-2, 1.0, 50.0])
def test_value_and_gradient_equal_the_reference(gamma):
    x, y = torch.randn(6, 23, 2).double(), torch.randn(6, 31, 2).double()
    x_lengths, y_lengths = torch.tensor([23, 0, 5, 0, 9, 23]), torch.tensor([31, 4, 0, 0, 12, 7])
    x[0, 22, 0] = math.nan
    x[4, 9:] = math.nan  # beyond the length
    settings = {"gamma": gamma, "x_lengths": x_lengths, "y_lengths": y_lengths, "band": 6}
    results = []
    for function in (rlkernels.soft_dtw, reference.soft_dtw):
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        value = function(*leaves, **settings)
        results.append([value.detach(), *torch.autograd.grad(value[[1, 3, 4, 5]].sum(), leaves)])
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, equal_nan=True)
    value, grad_x, grad_y = results[0]
    assert value[0].isnan() and value[1] == value[2] == math.inf and value[3] == 0
    assert not grad_x[[0, 1, 2, 3]].any() and not grad_x[4, 9:].any() and not grad_y[4, 12:].any()
    assert grad_x[4].any() and grad_y[5, :7].any()


def test_float32_and_low_precision():
    x, y = torch.randn(3, 40, 2), torch.randn(3, 33, 2)
    exact = reference.soft_dtw(x.double(), y.double(), gamma=0.1)
    ours, plain = rlkernels.soft_dtw(x, y, gamma=0.1), reference.soft_dtw(x, y, gamma=0.1)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
    low = x.bfloat16().requires_grad_()
    value = rlkernels.soft_dtw(low, y.bfloat16())
    value.sum().backward()
    assert value.dtype == torch.float32 and low.grad.dtype == torch.bfloat16 and low.grad.isfinite().all()


@pytest.mark.parametrize("gamma", [1e-50, 1e300, math.inf])
def test_smoothing_that_float32_does_not_hold(gamma):
    x = torch.ones(1, 3)
    with pytest.raises(ValueError, match="gamma must be a number that torch.float32 holds, got"):
        rlkernels.soft_dtw(x, x, gamma=gamma)
    if gamma < math.inf:
        assert rlkernels.soft_dtw(x.double(), x.double(), gamma=gamma).isfinite().all()


@pytest.mark.parametrize(("batch", "rows", "columns"), [(0, 3, 4), (2, 0, 0), (2, 3, 0)])
def test_empty(batch, rows, columns):
    x = torch.ones(batch, rows, requires_grad=True)
    value = rlkernels.soft_dtw(x, torch.ones(batch, columns))
    value.sum().backward()
    assert value.tolist() == [0.0 if rows == columns else math.inf] * batch and not x.grad.any()
