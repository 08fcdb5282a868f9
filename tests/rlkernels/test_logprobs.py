import hypothesis
import pytest
import torch
from accuracy import check_logprobs
from hypothesis import strategies as st
from support import Launches

import rlkernels
from rlkernels.logprobs import reference


def test_tokens_ruled_out():
    logits = torch.randn(3, 8)
    logits[:, 4:] = -torch.inf
    logits.requires_grad_()
    logprobs, entropy = rlkernels.token_logprobs(logits, torch.tensor([0, 1, 2]), return_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    expected = reference.token_logprobs(logits[:, :4].detach(), torch.tensor([0, 1, 2]))
    torch.testing.assert_close((logprobs, entropy), expected)
    assert logits.grad.isfinite().all() and (logits.grad[:, 4:] == 0).all()
    assert rlkernels.token_logprobs(logits, torch.tensor([0, 7, 0]))[1] == -torch.inf


def over_temperature(logits, ids, temperature):
    """Log-probability, entropy and the gradient of their sum in float64, without our code.

    The largest logit is subtracted first, so that nothing overflows but what is -inf.
    """
    leaf = logits.double().requires_grad_()
    log_p = torch.log_softmax((leaf - leaf.detach().amax(-1, keepdim=True)) / temperature, dim=-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    chosen = log_p.gather(-1, ids[..., None])[..., 0]
    return chosen.detach(), entropy.detach(), torch.autograd.grad(chosen.sum(), leaf)[0]


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    st.floats(1e-307, 1e30) | st.floats(-306, 30).map(lambda power: 10.0**power),
    st.floats(-30, 30),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from(["cpu", "torch"]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_any_temperature(temperature, scale, vocab, dtype, backend, tied, seed):
    """Also below what float32 holds, where the largest logits share everything; logits of any size."""
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(6, vocab, generator=gen) * 10**scale).to(dtype)
    if tied:
        logits[:, vocab // 2] = logits.amax(1)
    ids = torch.randint(vocab, (6,), generator=gen)
    exact = over_temperature(logits, ids, temperature)
    for linear in (False, True):
        # logits from one-hot hidden states are exact
        leaf, one_hot = (logits.T if linear else logits).clone().requires_grad_(), torch.eye(6, dtype=dtype)
        options = {"temperature": temperature, "return_entropy": True, "backend": backend}
        if linear:
            logprobs, entropy = rlkernels.linear_token_logprobs(one_hot, leaf, ids, **options)
        else:
            logprobs, entropy = rlkernels.token_logprobs(leaf, ids, **options)
        grad = torch.autograd.grad(logprobs.sum(), leaf)[0]
        wide = logprobs.dtype
        torch.testing.assert_close(logprobs.detach(), exact[0].to(wide), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropy.detach(), exact[1].to(wide), rtol=1e-4, atol=1e-4)
        assert not grad.isnan().any()
        expected = exact[2].clamp(-(2.0**100), 2.0**100).to(dtype)
        found = (grad.T if linear else grad).clamp(-(2.0**100), 2.0**100)
        tolerance = (0.02 if dtype == torch.bfloat16 else 1e-3) * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("logits", "ids", "temperature", "error", "message"), [
    (torch.zeros(2, 3), torch.tensor([0, 3]), 1.0, ValueError, "ids must be between 0 and 2, got 3"),
    (torch.zeros(2, 3), torch.tensor([-1, 0]), 1.0, ValueError, "ids must be between 0 and 2, got -1"),
    (torch.zeros(2, 3), torch.zeros(3).long(), 1.0, ValueError, r"ids must have shape \[2\], got \[3\]"),
    (torch.zeros(2, 3), torch.zeros(2), 1.0, TypeError, "ids must have dtype torch.int64"),
    (torch.zeros(2, 3).long(), torch.zeros(2).long(), 1.0, TypeError, "logits must be floating point"),
    (torch.zeros(2, 0), torch.zeros(2).long(), 1.0, ValueError, r"logits must have shape \[..., V\]"),
    (torch.zeros(2, 3), torch.zeros(2).long(), 0.0, ValueError, "temperature must be > 0, got 0.0"),
])  # fmt: skip
def test_bad_arguments(logits, ids, temperature, error, message):
    with pytest.raises(error, match=message):
        rlkernels.token_logprobs(logits, ids, temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 2, 17, 1023, 2053, 40_009])
@pytest.mark.parametrize("scale", [0.01, 3.0, 20.0])
def test_native_error_is_that_of_plain_torch(cpu_isa, vocab, dtype, scale):
    logits, ids = (torch.randn(5, vocab) * scale + 5).to(dtype), torch.randint(vocab, (5,))
    logits[1, ::3] = -torch.inf
    logits[1, -1], ids[1] = 0, vocab - 1
    for temperature in (1.0, 0.7):
        check_logprobs("cpu", logits, ids, temperature, floor=1e-6 * (1 + scale))


def test_rows_without_a_distribution_are_nan_and_spoil_no_other(cpu_isa):
    logits = torch.randn(5, 5000)
    logits[1], logits[2, 4900], logits[3, 17] = -torch.inf, torch.nan, torch.inf
    logits.requires_grad_()
    logprobs, entropy = rlkernels.token_logprobs(logits, torch.zeros(5).long(), return_entropy=True)
    (logprobs + entropy).sum().backward()
    bad = torch.tensor([False, True, True, True, False])
    assert torch.equal(logprobs.isnan(), bad) and torch.equal(entropy.isnan(), bad)
    assert torch.equal(logits.grad.isnan().any(1), bad) and torch.equal(logits.grad.isnan().all(1), bad)


def test_views_shapes_and_empty_batches():
    wide, ids = torch.randn(3, 4, 60, requires_grad=True), torch.randint(30, (4, 3)).T
    view = wide[..., ::2]
    ours, entropy = rlkernels.token_logprobs(view, ids, return_entropy=True)
    torch.testing.assert_close((ours, entropy), reference.token_logprobs(view, ids))
    assert ours.shape == (3, 4)
    (grad,) = torch.autograd.grad(ours.sum(), wide)
    (wanted,) = torch.autograd.grad(reference.token_logprobs(view, ids)[0].sum(), wide)
    torch.testing.assert_close(grad, wanted)
    empty = torch.zeros(0, 7, requires_grad=True)
    rlkernels.token_logprobs(empty, torch.zeros(0).long()).sum().backward()
    assert empty.grad.shape == (0, 7)
    half = torch.randn(4, 9).half()
    torch.testing.assert_close(
        rlkernels.token_logprobs(half, torch.zeros(4).long()), reference.token_logprobs(half, torch.zeros(4).long())[0]
    )


def test_gradient_of_the_gradient_raises_where_there_is_none():
    logits, ids = torch.randn(3, 9, requires_grad=True), torch.tensor([1, 0, 8])

    def gradient(x, **options):
        (grad,) = torch.autograd.grad(rlkernels.token_logprobs(x, ids, **options).exp().sum(), x, create_graph=True)
        return grad

    grad = gradient(logits)
    torch.testing.assert_close(grad, gradient(logits, backend="torch"))
    with pytest.raises(RuntimeError, match="its gradient has no gradient; backend='torch' has one"):
        grad.square().sum().backward()
    (second,) = torch.autograd.grad(gradient(logits, backend="torch").square().sum(), logits)
    exact = logits.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(gradient(exact).square().sum(), exact)
    torch.testing.assert_close(second.double(), wanted, atol=1e-6, rtol=1e-5)


def test_gradient_holds_no_copy_of_the_logits_in_float32():
    logits = torch.randn(8, 1000, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rlkernels.token_logprobs(logits, torch.zeros(8).long(), return_entropy=True)
    assert sum(t.nbytes for t in saved if t.data_ptr() != logits.data_ptr()) < 1000


def test_an_id_outside_the_vocabulary_is_nan_where_ids_are_not_looked_at():
    """As on a GPU, where -100 of padding would else end the process; gradients of the others are as ever."""
    logits = torch.randn(4, 5, requires_grad=True)
    ids = torch.tensor([1, -100, 5, 4])
    found, _ = reference.token_logprobs(logits, ids)
    assert found.isnan().tolist() == [False, True, True, False]
    expected = logits.detach().log_softmax(-1)
    assert torch.equal(found[[0, 3]], expected[[0, 3], [1, 4]])
    found[[0, 3]].sum().backward()
    assert logits.grad.isfinite().all() and not logits.grad[1:3].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_plain_torch_makes_only_the_passes_that_were_asked_for(temperature):
    logits, ids = torch.randn(3, 50), torch.tensor([0, 49, 7])
    with Launches() as launches:
        found = rlkernels.token_logprobs(logits, ids, temperature=temperature, backend="torch")
    passes = [name for name, shape in launches.results if shape.numel() == logits.numel()]
    assert passes == (["_log_softmax"] if temperature == 1 else ["div", "_log_softmax"])
    assert torch.equal(found, reference.token_logprobs(logits, ids, temperature)[0])
