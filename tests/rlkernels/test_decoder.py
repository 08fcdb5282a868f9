"""The fused operations of a decoder layer, and their gradients, against plain torch."""

from functools import partial

import pytest
import torch
from accuracy import assert_as_plain
from support import assert_equal

from rlkernels import decoder
from rlkernels.decoder import reference

DTYPES = (torch.float32, torch.bfloat16)


def check(name, tensors, dtype=torch.float32, **settings):
    """Check the outputs of op ``name`` and the gradients of ``tensors``; tensors and settings are arguments by name."""

    def run(module, compute_dtype, **options):
        def converted(t):  # what float64 gets is rounded to the dtype too
            return t.detach().to(dtype).to(compute_dtype, copy=True)

        leaves = {key: t if t is None else converted(t).requires_grad_() for key, t in tensors.items()}
        arguments = {
            k: converted(v) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in settings.items()
        }
        result = getattr(module, name)(**leaves, **arguments, **options)
        outputs = list(result) if isinstance(result, tuple) else [result]
        generator = torch.Generator().manual_seed(1)
        sum((out * converted(torch.randn(out.shape, generator=generator))).sum() for out in outputs).backward()
        return [out.detach() for out in outputs], [leaf.grad for leaf in leaves.values() if leaf is not None]

    runs = run(decoder, dtype, backend="cpu"), run(reference, dtype), run(reference, torch.float64)
    unit = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    for results, tolerance in zip(zip(*runs), (1e-7, 4e-7)):  # gradients are sums of larger terms
        assert_as_plain(*results, floor=0, relative=tolerance * unit)


def rope_arguments(rows, q_heads, k_heads, dim, norm):
    """Return x and the weights of norms (or None), tables and settings."""
    angle = torch.randn(50, dim // 2).repeat(1, 2)
    weights = dict.fromkeys(("q_weight", "k_weight"))
    if norm:
        weights = {name: torch.randn(dim) for name in weights}
    settings = {"positions": torch.randint(0, 50, (rows,)), "cos": angle.cos(), "sin": angle.sin(),
                "q_heads": q_heads, "heads": q_heads + k_heads, "eps": 1e-6}  # fmt: skip
    return {"x": torch.randn(rows, (q_heads + 2 * k_heads) * dim), **weights}, settings


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (5, 192), (257, 33), (1023, 64)])
@pytest.mark.parametrize("with_x", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(cpu_isa, shape, with_x, dtype):
    residual = torch.randn(shape) * 3
    x = torch.randn(shape) if with_x else None
    weight = torch.randn(shape[1])
    check("add_rms_norm", {"residual": residual, "x": x, "weight": weight}, dtype, eps=1e-6)
    residual, x, weight = (None if t is None else t.to(dtype) for t in (residual, x, weight))
    total, _ = decoder.add_rms_norm(residual, x, weight, 1e-6, backend="cpu")
    assert torch.equal(total, residual + x if with_x else residual)


def test_gradient_of_one_output_alone():
    residual, x, weight = (torch.randn(5, 20, requires_grad=True) for _ in range(3))
    for place in range(2):
        outs = [f(residual, x, weight[0], 1e-6)[place].square().sum()
                for f in (decoder.add_rms_norm, reference.add_rms_norm)]  # fmt: skip
        grads = [torch.autograd.grad(out, (residual, x, weight), allow_unused=True) for out in outs]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("q_heads", "k_heads", "dim"), [(1, 1, 2), (4, 2, 16), (6, 2, 32), (3, 3, 48), (2, 1, 128)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 37, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(cpu_isa, q_heads, k_heads, dim, norm, rows, dtype):
    tensors, settings = rope_arguments(rows, q_heads, k_heads, dim, norm)
    values = slice((q_heads + k_heads) * dim, None)
    x = tensors["x"].to(dtype)
    out = decoder.rope(**tensors | {"x": x}, **settings, backend="cpu")  # weights and tables in float32
    assert out.dtype == dtype and torch.equal(out[:, values], x[:, values])
    exact = reference.rope(**tensors | {"x": x.float()}, **settings)
    torch.testing.assert_close(out.float(), exact, rtol=0.02, atol=0.1)
    check("rope", tensors, dtype, **settings)


@pytest.mark.parametrize("shape", [(0, 4), (1, 2), (3, 14), (5, 1024), (257, 66), (1023, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(cpu_isa, shape, dtype):
    x = torch.randn(shape) * 20
    if x.numel() > 100:
        x[0, :4] = torch.tensor([-200.0, -87.5, -103.0, 90.0])
    check("silu_mul", {"gate_up": x}, dtype)


def test_silu_mul_of_the_largest_numbers(cpu_isa):
    gate = torch.tensor([-3e38, -1e20, -1e3, 3e38]).repeat_interleave(17)
    x = torch.cat([gate, torch.ones(68)])[None].requires_grad_()
    out = decoder.silu_mul(x, backend="cpu")
    assert torch.equal(out, gate.relu()[None])
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.cat([(gate > 0).float(), gate.relu()])[None])


def test_gradients_do_not_depend_on_threads(set_threads):
    tensors, settings = rope_arguments(999, 4, 2, 16, norm=True)
    residual = torch.randn(2000, 48, requires_grad=True)
    weight = torch.randn(48, requires_grad=True)
    leaves = [t.requires_grad_() for t in tensors.values()]
    grads = []
    for count in (1, 3):
        set_threads(count)
        out = decoder.rope(**tensors, **settings).pow(3).sum()
        normed = decoder.add_rms_norm(residual, None, weight, 1e-6)[1].pow(3).sum()
        grads.append([*torch.autograd.grad(out, leaves), *torch.autograd.grad(normed, (residual, weight))])
    assert_equal(*grads)


def test_no_gradient_is_recorded_without_need():
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        assert not decoder.silu_mul(x).requires_grad
    assert decoder.silu_mul(x).requires_grad and not decoder.silu_mul(x.detach()).requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays(dtype):
    bad = torch.full((2, 32), torch.nan, dtype=dtype)
    assert decoder.silu_mul(bad).isnan().all()
    assert decoder.add_rms_norm(bad, None, torch.ones(32, dtype=dtype), 1e-6)[1].isnan().all()


def test_other_dtypes_take_the_reference():
    x = torch.randn(3, 8, dtype=torch.float16)
    assert torch.equal(decoder.silu_mul(x), reference.silu_mul(x))
    with pytest.raises(ValueError, match="float32 or bfloat16, got torch.float16"):
        decoder.silu_mul(x, backend="cpu")


@pytest.mark.parametrize(("first", "second", "name"), [(*DTYPES, "Float"), (*reversed(DTYPES), "BFloat16")])
def test_a_norm_of_two_dtypes_is_of_the_larger(first, second, name):
    x = torch.randn(3, 8).to(first)
    weight = torch.randn(8).to(second)
    total, out = decoder.add_rms_norm(x, x, weight, 1e-6)
    assert total.dtype == first and out.dtype == torch.float32
    second_input = torch.randn(3, 8).to(second)  # float32 residuals of a model in bfloat16, say
    total, _ = decoder.add_rms_norm(x, second_input, weight.to(first), 1e-6)
    assert torch.equal(total, x + second_input) and total.dtype == torch.float32
    with pytest.raises(RuntimeError, match=f"weight must be a contiguous {name}"):
        decoder.add_rms_norm(x, x, weight, 1e-6, backend="cpu")


def test_bfloat16_is_rounded_once():
    """The gate in float32 and rounded, where plain torch rounds silu(gate) before the product."""
    x = torch.randn(50, 64).bfloat16()
    gate, up = x.float().chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    num_wrong, num_plain_wrong = ((f(x) != exact.bfloat16()).sum() for f in (decoder.silu_mul, reference.silu_mul))
    assert num_wrong <= 2 and num_plain_wrong > 100  # two: numbers next to the middle between two of bfloat16


def test_bad_input():
    with pytest.raises(ValueError, match="weight must have 8 numbers, got 4"):
        decoder.add_rms_norm(torch.randn(3, 8), None, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="even width, got 7"):
        decoder.silu_mul(torch.randn(2, 7))
    with pytest.raises(RuntimeError, match="contiguous"):
        decoder.silu_mul(torch.randn(8, 4).T)


def test_plain_torch_spreads_nothing_over_rows():
    x, table, positions = torch.randn(3, 8), torch.randn(5, 4), torch.tensor([0, 4, 1])
    norm, rope, gate = (partial(op, backend="torch") for op in (decoder.add_rms_norm, decoder.rope, decoder.silu_mul))
    for call, message in (
        (lambda: norm(x, x[:1], torch.ones(8), 1e-6), r"x must have shape \[3, 8\], got \[1, 8\]"),
        (lambda: norm(x, None, torch.ones(1), 1e-6), r"weight must have shape \[8\], got \[1\]"),
        (lambda: rope(x, positions[:1], table, table, 1, 2), r"positions must have shape \[3\], got \[1\]"),
        (lambda: rope(x, positions, table, table[:, :1], 1, 2), r"sin must have shape \[5, 4\], got \[5, 1\]"),
        (lambda: rope(x, positions, table, table, 1, 2, torch.ones(4), torch.ones(1)), "k_weight must have shape"),
        (lambda: rope(x, positions, table, table, 1, 3), r"3 heads \(1 of queries\) of 4 numbers do not fit"),
        (lambda: rope(x, positions, table, table, 2, 1), r"1 heads \(2 of queries\) of 4 numbers do not fit"),
        (lambda: gate(torch.randn(2, 7)), "even width, got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_bad_input_of_rope(backend):
    x = torch.randn(3, 8)
    table = torch.randn(5, 4)
    positions = torch.tensor([0, 4, 1])
    rope = partial(decoder.rope, backend=backend)
    for name in ("q_weight", "k_weight"):
        with pytest.raises(ValueError, match=f"must be given together, got {name} alone"):
            rope(x, positions, table, table, 1, 2, **{name: torch.ones(4)})
    for bad in (-1, 5):
        with pytest.raises(ValueError, match=f"positions must be between 0 and 4, got {bad}"):
            rope(x, torch.tensor([0, bad, 1]), table, table, 1, 2)


def test_compiled_rope_names_shapes_that_do_not_fit():
    x = torch.randn(3, 8)
    positions = torch.tensor([0, 4, 1])
    for heads in (3, 2**62):  # 2**62 * 4 is 0 in 64 bits
        with pytest.raises(ValueError, match=f"{heads} heads of 4 numbers do not fit into rows of 8"):
            decoder.rope(x, positions, torch.randn(5, 4), torch.randn(5, 4), 1, heads)
    with pytest.raises(ValueError, match="even"):
        decoder.rope(x, positions, torch.ones(5, 0), torch.ones(5, 0), 1, 2)
