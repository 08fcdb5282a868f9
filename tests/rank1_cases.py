"""Deltas with a known answer, shared by the rank-1 tests."""

import math
from functools import partial

import pytest
import torch
from accuracy import assert_as_plain

import rlkernels


def planted(m: int, n: int, rms: float, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, share: float = 0.193):
    """Return weight and base: a trained layer plus noise in which one direction holds ``share`` of the norm.

    Stored in ``dtype``: at rms 1e-4, 1e-5 and 3e-6 about 32, 88 and 96 % of bfloat16 entries do not change.
    """
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(m, n, generator=generator) * 0.02).to(dtype)
    u = torch.randn(m, generator=generator)
    v = torch.randn(n, generator=generator)
    noise = torch.randn(m, n, generator=generator)
    delta = share * torch.outer(u / u.norm(), v / v.norm()) + math.sqrt(1 - share**2) * noise / noise.norm()
    return (base.float() + rms * math.sqrt(m * n) * delta).to(dtype), base


def with_spectrum(m: int, n: int, sigmas: torch.Tensor, *, seed: int = 0):
    """Return a float32 delta [m, n] with these singular values, and its right singular vectors [n, r] in float64."""
    generator = torch.Generator().manual_seed(seed)
    rank = len(sigmas)
    u = torch.linalg.qr(torch.randn(m, rank, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(n, rank, generator=generator, dtype=torch.float64)).Q
    return ((u * sigmas.to(u)) @ v.T).float(), v


def exact(weight: torch.Tensor, base: torch.Tensor):
    """Return the float64 SVD of the delta as stored: u [m, r], s [r], v [n, r]."""
    u, s, vh = torch.linalg.svd(weight.double() - base.double(), full_matrices=False)
    return u, s, vh.T


def angle(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the angle in radians between two lines, accurate when small."""
    a, b = a.double() / a.double().norm(), b.double() / b.double().norm()
    return math.atan2((a - b * (a @ b)).norm().item(), abs((a @ b).item()))


def check_add_rank1(backend: str, dtype: torch.dtype, stochastic: bool, weight: torch.Tensor, min_equal: float) -> None:
    """Add rank 1 to a weight [m, n >= 4], in a row beyond float16's range; ``min_equal``: least share of equal bits."""
    m, n = weight.shape
    weight[0, :4] = torch.tensor([math.nan, math.inf, 1e-7, 0.0])
    u = torch.randn(m) * 1e-2
    v = torch.randn(n)
    u[1] = 1e6 if dtype == torch.float16 else 1e3
    add = partial(rlkernels.add_rank1_, stochastic_rounding=stochastic)
    magnitude = weight.abs().nan_to_num().double()
    plain = add(weight.clone(), u, v, 0.5, backend="torch", seed=-(2**60)).double()
    result = add(weight, u, v, 0.5, backend=backend, seed=2**64 - 2**60).double()  # the same 64 bits
    equal = (result == plain) | (result.isnan() & plain.isnan())
    assert equal.double().mean() >= min_equal  # fused multiply-add
    finite = plain.isfinite()
    spacing = torch.finfo(dtype).eps * plain.abs().clamp_min(torch.finfo(dtype).smallest_normal)
    assert ((result - plain).abs()[finite] <= (3e-7 * magnitude + spacing)[finite]).all()
    assert torch.equal(result.isfinite(), finite)


def check_matvec(backend: str, weight: torch.Tensor, base: torch.Tensor) -> None:
    """Check that the product of a delta with a vector is at most twice as far from float64 as plain torch's."""
    v = torch.randn(weight.shape[1])
    delta = weight.double() - base.double()
    result = rlkernels.delta_matvec(weight, base, v, backend=backend)
    plain = rlkernels.delta_matvec(weight, base, v, backend="torch")
    max_product = delta.norm(dim=1).max() * v.norm()
    assert_as_plain([result], [plain], [delta @ v.double()], floor=3e-7 * float(max_product))


def check_directions(directions, weight: torch.Tensor, base: torch.Tensor, rank: int) -> None:
    """Check the result of solve_deltas: the directions are those of the SVD, and the update is the first."""
    update, left, right = directions
    _, s, v = exact(weight, base)
    delta = weight.float() - base.float()
    k = min(rank, *weight.shape)
    assert update.status in ("ok", "ill_defined")
    assert left.shape == (delta.shape[0], k) and right.shape == (delta.shape[1], k)
    assert torch.equal(right[:, 0], update.v)
    torch.testing.assert_close(left[:, 0], update.sigma * update.u, rtol=1e-4, atol=1e-5 * float(s[0]))
    torch.testing.assert_close(right.T @ right, torch.eye(k), rtol=0, atol=1e-5)
    torch.testing.assert_close(left, delta @ right, rtol=1e-3, atol=1e-5 * float(s[0]))
    torch.testing.assert_close(left.norm(dim=0).double(), s[:k], rtol=1e-3, atol=0)
    assert (right.double() * v[:, :k]).sum(0).abs().min() > 0.999


def check_in_place(backend: str) -> None:
    """Add a row and a column of the weight to itself in place; autograd sees the change."""
    weight, x = torch.randn(30, 40), torch.randn(2, 30, requires_grad=True)
    old_weight, version = weight.clone(), weight._version
    y = x @ weight
    rlkernels.add_rank1_(weight, weight[:, 7], weight[11], 0.5, backend=backend)
    torch.testing.assert_close(weight, old_weight + 0.5 * torch.outer(old_weight[:, 7], old_weight[11]))
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def check_statuses(backend: str) -> None:
    """Check the status of deltas that are zero, have no gap, or one entry; also where squares leave float32."""
    spectra = [1.0, 1.0, 0.3, 0.2], [1.0, 0.995, 0.3, 0.2], [1.0, 0.5], torch.linspace(1.0, 0.5, 30).tolist()
    with torch.device("cpu"):
        equal, close, wide, flat = (with_spectrum(40, 30, torch.tensor(sigmas))[0] for sigmas in spectra)
        zeros, one_entry = torch.zeros(2, 40, 30)
    one_entry[7, 3] = -2.5
    deltas = {"zero": zeros, "minus zero": -zeros, "equal": equal, "close": close, "one": one_entry, "wide": wide,
              "tiny": wide * 2.0**-70, "huge": wide * 2.0**80}  # fmt: skip
    device = torch.empty(0).device
    pairs = {name: (delta.to(device), zeros.to(device)) for name, delta in {**deltas, "flat": flat}.items()}
    stopped = rlkernels.top1_deltas({"flat": pairs.pop("flat")}, max_passes=2, backend=backend)["flat"]
    assert stopped.status == "not_converged" and stopped.passes == 2 and stopped.angle_bound > 1e-2
    updates = rlkernels.top1_deltas(pairs, backend=backend)
    assert [update.status for update in updates.values()] == ["zero"] * 2 + ["ill_defined"] * 2 + ["ok"] * 4
    for zero in (updates["zero"], updates["minus zero"]):
        assert (zero.sigma, zero.frobenius, zero.changed, zero.angle_bound) == (0.0, 0.0, 0.0, math.pi / 2)
        assert not zero.u.any() and not zero.v.any()
    update = updates["one"]
    assert abs(update.sigma - 2.5) < 1e-6 and update.v.argmax() == 3 and update.u.argmin() == 7
    assert abs(update.gap - 1) < 1e-3 and update.passes <= 2
    for name, scale in (("tiny", 2.0**-70), ("huge", 2.0**80)):
        assert abs(updates[name].sigma / (updates["wide"].sigma * scale) - 1) < 1e-4
        assert angle(updates[name].v, updates["wide"].v) < 1e-2


def check_extremes(backend: str, rms: float) -> None:
    """Check the number of steps, and the direction against float64, of a delta whose squares leave float32."""
    delta = rms * planted(20, 30, 1.0, dtype=torch.float32, share=0.99)[0]
    solve = partial(rlkernels.top1_delta, delta, torch.zeros_like(delta), backend=backend)
    assert solve(max_passes=1).passes == 1
    update = solve()
    assert update.status == "ok" and angle(update.v, exact(delta, torch.zeros_like(delta))[2][:, 0]) <= 1e-2


def check_any_view(backend: str, stochastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a kernel adds to a view without contiguous rows what it adds to a copy."""
    monkeypatch.setattr(rlkernels.rank1.reference, "add_rank1_", None)  # plain torch is not called
    storage = torch.randn(8, 6, 2).bfloat16()
    u = torch.randn(6)
    v = torch.randn(8)
    view = storage[..., 1].T
    add = partial(rlkernels.add_rank1_, u=u, v=v, scale=0.3, stochastic_rounding=stochastic, backend=backend)
    expected = add(view.contiguous())
    other = storage[..., 0].clone()
    version = storage._version
    assert add(view) is view and torch.equal(view, expected)
    assert torch.equal(storage[..., 0], other) and storage._version > version
