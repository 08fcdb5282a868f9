"""The fused operations of a decoder layer against plain torch."""

import pytest
import torch

from rlkernels import decoder
from rlkernels.decoder import reference


def close(ours: torch.Tensor, plain: torch.Tensor, gold: torch.Tensor) -> None:
    """At most twice the error of plain float32 torch, both against float64."""
    error, allowed = ((x.double() - gold).abs().max().item() if x.numel() else 0.0 for x in (ours, plain))
    scale = gold.abs().max().item() if gold.numel() else 0.0
    assert error <= 2 * allowed + 1e-7 * scale


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (5, 192), (257, 33), (1023, 64)])
@pytest.mark.parametrize("with_x", [False, True])
def test_add_rms_norm(cpu_isa, shape, with_x):
    residual, x, weight = torch.randn(shape) * 3, torch.randn(shape) if with_x else None, torch.randn(shape[1])
    copies = [residual.clone(), residual.clone(), residual.double()]
    ours = decoder.add_rms_norm_(copies[0], x, weight, 1e-6, backend="cpu")
    plain = reference.add_rms_norm_(copies[1], x, weight, 1e-6)
    gold = reference.add_rms_norm_(copies[2], x.double() if with_x else None, weight.double(), 1e-6)
    assert torch.equal(copies[0], copies[1])
    close(ours, plain, gold)


@pytest.mark.parametrize(("q_heads", "k_heads", "dim"), [(1, 1, 2), (4, 2, 16), (6, 2, 32), (3, 3, 48), (2, 1, 128)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_rope(cpu_isa, q_heads, k_heads, dim, norm, rows):
    heads = q_heads + k_heads
    x = torch.randn(rows, (heads + k_heads) * dim)
    positions = torch.randint(0, 50, (rows,))
    angle = torch.randn(50, dim // 2).repeat(1, 2)
    tables = angle.cos(), angle.sin()
    weights = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    ours, plain, gold = x.clone(), x.clone(), x.double()
    decoder.rope_(ours, positions, *tables, q_heads, heads, *weights, 1e-6, backend="cpu")
    reference.rope_(plain, positions, *tables, q_heads, heads, *weights, 1e-6)
    exact = [w.double() if norm else None for w in weights]
    reference.rope_(gold, positions, *(t.double() for t in tables), q_heads, heads, *exact, 1e-6)
    assert torch.equal(ours[:, heads * dim :], x[:, heads * dim :])
    close(ours, plain, gold)


@pytest.mark.parametrize("shape", [(0, 4), (1, 2), (3, 14), (5, 1024), (257, 66), (1023, 128)])
def test_silu_mul(cpu_isa, shape):
    x = torch.randn(shape) * 20
    if x.numel() > 100:
        x[0, :4] = torch.tensor([-200.0, -87.5, -103.0, 90.0])
    close(decoder.silu_mul(x, backend="cpu"), reference.silu_mul(x), reference.silu_mul(x.double()))


def test_nan_stays():
    bad = torch.full((2, 32), torch.nan)
    assert decoder.silu_mul(bad).isnan().all()
    assert decoder.add_rms_norm_(bad.clone(), None, torch.ones(32), 1e-6).isnan().all()


def test_other_dtypes_take_the_reference():
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(decoder.silu_mul(x), reference.silu_mul(x))
    with pytest.raises(ValueError, match="float32, got torch.bfloat16"):
        decoder.silu_mul(x, backend="cpu")


def test_bad_input():
    x, table = torch.randn(3, 8), torch.randn(5, 4)
    with pytest.raises(ValueError, match="positions must be between 0 and 4, got 5"):
        decoder.rope_(x, torch.tensor([0, 5, 1]), table, table, 1, 2)
    with pytest.raises(ValueError, match="3 heads of 4 numbers do not fit into rows of 8"):
        decoder.rope_(x, torch.tensor([0, 1, 1]), table, table, 1, 3)
    with pytest.raises(ValueError, match="weight must have 8 numbers, got 4"):
        decoder.add_rms_norm_(x, None, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="even width, got 7"):
        decoder.silu_mul(torch.randn(2, 7))
    with pytest.raises(RuntimeError, match="contiguous"):
        decoder.silu_mul(torch.randn(8, 4).T)
