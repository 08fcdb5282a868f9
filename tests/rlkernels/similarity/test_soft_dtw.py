"""soft_dtw: value and gradient against autograd in float64, the reference, and finite differences."""

import math
from functools import partial

import pytest
import torch
from accuracy import with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkernels
from rlkernels.similarity import reference


def by_autograd(x, y, gamma, dtype, *, shifted=False):
    """Return value and gradients of one pair [L, D], [K, D] by autograd through every cell, without our code.

    ``shifted`` subtracts the smallest of three predecessors before the division by gamma; float64 needs it too if costs
    are far above gamma.
    """
    x, y = (t.to(dtype, copy=True).requires_grad_() for t in (x, y))
    rows = len(x)
    columns = len(y)
    infinite_cost = 1e30 if dtype == torch.float32 else 1e300
    before_previous, previous = (torch.full((rows + 1,), infinite_cost, dtype=dtype) for _ in range(2))
    before_previous[0] = 0
    for d in range(rows + columns - 1):
        lo, hi = max(0, d - columns + 1), min(d + 1, rows)
        cost = (x[lo:hi] - y[d - hi + 1 : d - lo + 1].flip(0)).square().sum(-1)
        predecessors = torch.stack([previous[lo:hi], previous[lo + 1 : hi + 1], before_previous[lo:hi]])
        smallest = predecessors.detach().amin(0) if shifted else 0
        current = cost + smallest - gamma * torch.logsumexp((smallest - predecessors) / gamma, dim=0)
        before_previous, previous = previous, torch.nn.functional.pad(current, (lo + 1, rows - hi), value=infinite_cost)
    previous[rows].backward()
    return [t.double() for t in (previous[rows].detach(), x.grad, y.grad)]


def by_rlkernels(x, y, gamma):
    results = with_gradients(partial(rlkernels.soft_dtw, gamma=gamma), (x[None], y[None]), torch.ones(1))
    return [t[0].double() for t in results]


def check_error(x, y, gamma):
    """Check value and gradients: at most twice the error of plain float32, and near float32's rounding."""
    exact = by_autograd(x, y, gamma, torch.float64, shifted=True)
    plain = by_autograd(x, y, gamma, torch.float32)
    stiffness = float((x.double().abs().max() + y.double().abs().max()) ** 2 * x.shape[1]) / gamma
    for result, plain_result, expected in zip(by_rlkernels(x, y, gamma), plain, exact):
        if float(expected.abs().max()) > torch.finfo(torch.float32).max:
            assert torch.isinf(result).any()  # as the docstring says of a cost beyond the dtype
            continue
        norm = float(expected.norm()) + 1e-30
        error, allowed = (float((t - expected).norm()) / norm for t in (result, plain_result))
        if not math.isnan(allowed):  # costs that plain float32 cannot hold
            assert error <= 2 * allowed + 1e-6
        if stiffness < 1e8:  # beyond it two paths may differ by less than float64's rounding
            assert error <= 1e-6


@pytest.mark.parametrize(("rows", "columns", "features", "scale", "gamma"), [
    (200, 180, 80, 1, 0.1),
    (200, 180, 80, 1, 0.01),
    (300, 300, 1, 100, 0.1),
    (400, 8, 4, 1, 1e-3),
    (8, 400, 1, 0.1, 10.0),
    pytest.param(1000, 1000, 2, 1, 1e-3, marks=pytest.mark.slow),
])  # fmt: skip
def test_error_is_at_most_twice_that_of_plain_autograd(rows, columns, features, scale, gamma):
    check_error(torch.randn(rows, features) * scale, torch.randn(columns, features) * scale, gamma)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 80), st.floats(-3, 18), st.floats(-3, 1),
    st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_error_for_any_shape_scale_and_gamma(rows, columns, features, scale, gamma, whole_numbers, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, features, generator=generator) * 10**scale for n in (rows, columns))
    if whole_numbers and scale < 3:  # paths of exactly equal cost
        x = x.round()
        y = y.round()
    check_error(x, y, 10**gamma)


@pytest.mark.parametrize("gamma", [1e-30, 1e-3, 1.0, 10.0])
@pytest.mark.parametrize("far", [1e10, 1e15, 1.2e18])
def test_costs_up_to_the_largest_float(far, gamma):
    """Two cells on every way, of which the one over the corner is cheapest: cost, and gradients, of its two cells."""
    x = torch.tensor([[0.0], [far]])
    y = torch.tensor([[far / 2], [far / 2]])
    value, grad_x, grad_y = by_rlkernels(x, y, gamma)
    assert math.isclose(value, 2 * (far / 2) ** 2, rel_tol=1e-6)
    torch.testing.assert_close(grad_x.flatten(), torch.tensor([-far, far]).double())
    torch.testing.assert_close(grad_y.flatten(), torch.tensor([far, -far]).double())
    nearer = by_rlkernels(x[:1], y[:1], gamma)
    assert math.isclose(nearer[0], (far / 2) ** 2, rel_tol=1e-6)


def test_a_cost_beyond_the_dtype_is_infinite():
    x = torch.tensor([[3e38]])
    assert rlkernels.soft_dtw(x, -x) == math.inf and rlkernels.soft_dtw(x.double(), -x.double()) < math.inf
    assert rlkernels.soft_dtw(x.double() * 1e200, -x.double()) == math.inf


@pytest.mark.parametrize("gamma", [1e-12, 1e-2, 1.0, 50.0])
@pytest.mark.parametrize(("band", "features"), [(None, 2), (0, 1), (2, None), (6, 2)])
def test_value_and_gradient_equal_the_reference(gamma, band, features):
    x, y = (torch.randn(6, steps, features or 1).double() for steps in (23, 31))
    x_lengths = torch.tensor([23, 0, 5, 0, 9, 23])
    y_lengths = torch.tensor([31, 4, 0, 0, 12, 7])
    x[0, 22, 0] = math.nan
    x[4, 9:] = math.nan  # beyond the length
    if features is None:
        x = x[..., 0]
        y = y[..., 0]
    settings = {"gamma": gamma, "x_lengths": x_lengths, "y_lengths": y_lengths, "band": band}
    functions = (rlkernels.soft_dtw, reference.soft_dtw)
    output_grads = torch.tensor([0, 1, 0, 1, 1, 1])
    results, expected = (with_gradients(partial(f, **settings), (x, y), output_grads) for f in functions)
    torch.testing.assert_close(results, expected, equal_nan=True)
    value, grad_x, grad_y = results
    assert value[0].isnan() and value[1] == value[2] == math.inf and value[3] == 0
    assert not grad_x[[0, 1, 2, 3]].any() and not grad_x[4, 9:].any() and not grad_y[4, 12:].any()
    assert grad_x[4].any() and grad_y[5, :7].any()


def test_low_precision():
    x = torch.randn(3, 40, 2)
    y = torch.randn(3, 33, 2)
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
