"""Log-probabilities from logits; from hidden states block by block, against the reference that holds all logits."""

import math

import hypothesis
import pytest
import torch
from accuracy import check_blocks, check_linear_logprobs, check_logprobs, draw_logits, with_gradients
from hypothesis import strategies as st
from support import Launches

import rlkernels
from rlkernels import linear_token_logprobs
from rlkernels.logprobs import linear, reference


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", [torch.inf, 1e39])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_tokens_are_ruled_out_at_any_high_temperature(backend, temperature, dtype):
    logits = torch.tensor([1.0, -torch.inf, 3.0, -5.0], dtype=dtype)
    ids = torch.tensor([0, 1, 3])
    expected = torch.tensor([-math.log(3), -torch.inf, -math.log(3)])
    hidden = torch.zeros(3, 2, dtype=dtype)
    options = {"temperature": temperature, "return_entropy": True, "backend": backend}
    for logprobs, entropy in (
        rlkernels.token_logprobs(logits.expand(3, 4), ids, **options),
        rlkernels.linear_token_logprobs(hidden, torch.zeros(4, 2, dtype=dtype), ids, bias=logits, **options),
    ):
        torch.testing.assert_close(logprobs.float(), expected)
        torch.testing.assert_close(entropy.float(), torch.full((3,), math.log(3)))


def test_a_temperature_that_is_learnt_is_refused():
    temperature = torch.tensor(0.7, requires_grad=True)
    with pytest.raises(ValueError, match=r"temperature gets no gradient, but requires one: pass .* temperature\.item"):
        rlkernels.token_logprobs(torch.randn(2, 3), torch.tensor([0, 1]), temperature=temperature)
    with torch.no_grad():
        rlkernels.token_logprobs(torch.randn(2, 3), torch.tensor([0, 1]), temperature=temperature)


def over_temperature(logits, ids, temperature):
    """Return log-probability, entropy and the gradient of their sum in float64, without our code.

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
@hypothesis.example(1.7627291765737082e-11, 28.0, 1, torch.float32, "torch", False, 0)  # the quotient overflows
def test_any_temperature(temperature, scale, vocab, dtype, backend, tied, seed):
    """Check temperatures below float32, where the largest logits share everything, and logits of any size."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(6, vocab, generator=generator) * 10**scale).to(dtype)
    if tied:
        logits[:, vocab // 2] = logits.amax(1)
    ids = torch.randint(vocab, (6,), generator=generator)
    exact = over_temperature(logits, ids, temperature)
    backend = "torch" if dtype == torch.float64 else backend
    for from_states in (False, True):
        # logits from one-hot hidden states are exact
        leaf = (logits.T if from_states else logits).clone().requires_grad_()
        one_hot = torch.eye(6, dtype=dtype)
        options = {"temperature": temperature, "return_entropy": True, "backend": backend}
        if from_states:
            logprobs, entropy = rlkernels.linear_token_logprobs(one_hot, leaf, ids, **options)
        else:
            logprobs, entropy = rlkernels.token_logprobs(leaf, ids, **options)
        grad = torch.autograd.grad(logprobs.sum(), leaf)[0]
        result_dtype = logprobs.dtype
        torch.testing.assert_close(logprobs.detach(), exact[0].to(result_dtype), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropy.detach(), exact[1].to(result_dtype), rtol=1e-4, atol=1e-4)
        assert not grad.isnan().any()
        expected = exact[2].clamp(-(2.0**100), 2.0**100).to(dtype)
        clamped_grad = (grad.T if from_states else grad).clamp(-(2.0**100), 2.0**100)
        tolerance = (0.02 if dtype == torch.bfloat16 else 1e-3) * float(expected.abs().max())
        torch.testing.assert_close(clamped_grad, expected, rtol=0, atol=tolerance)


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
    logits, ids = draw_logits(5, vocab, scale, dtype)
    for temperature in (1.0, 0.7):
        check_logprobs("cpu", logits, ids, temperature, floor=1e-6 * (1 + scale))


def test_rows_without_a_distribution_are_nan_and_spoil_no_other(cpu_isa):
    logits = torch.randn(5, 5000)
    logits[1] = -torch.inf
    logits[2, 4900] = torch.nan
    logits[3, 17] = torch.inf
    logits.requires_grad_()
    logprobs, entropy = rlkernels.token_logprobs(logits, torch.zeros(5).long(), return_entropy=True)
    (logprobs + entropy).sum().backward()
    bad = torch.tensor([False, True, True, True, False])
    assert torch.equal(logprobs.isnan(), bad) and torch.equal(entropy.isnan(), bad)
    assert torch.equal(logits.grad.isnan().any(1), bad) and torch.equal(logits.grad.isnan().all(1), bad)


def test_views_shapes_and_empty_batches():
    wide = torch.randn(3, 4, 60, requires_grad=True)
    ids = torch.randint(30, (4, 3)).T
    view = wide[..., ::2]
    logprobs, entropy = rlkernels.token_logprobs(view, ids, return_entropy=True)
    torch.testing.assert_close((logprobs, entropy), reference.token_logprobs(view, ids))
    assert logprobs.shape == (3, 4)
    (grad,) = torch.autograd.grad(logprobs.sum(), wide)
    (expected_grad,) = torch.autograd.grad(reference.token_logprobs(view, ids)[0].sum(), wide)
    torch.testing.assert_close(grad, expected_grad)
    empty = torch.zeros(0, 7, requires_grad=True)
    rlkernels.token_logprobs(empty, torch.zeros(0).long()).sum().backward()
    assert empty.grad.shape == (0, 7)
    half = torch.randn(4, 9).half()
    torch.testing.assert_close(
        rlkernels.token_logprobs(half, torch.zeros(4).long()), reference.token_logprobs(half, torch.zeros(4).long())[0]
    )


def test_gradient_of_the_gradient_raises_where_there_is_none():
    logits = torch.randn(3, 9, requires_grad=True)
    ids = torch.tensor([1, 0, 8])

    def gradient(x, **options):
        (grad,) = torch.autograd.grad(rlkernels.token_logprobs(x, ids, **options).exp().sum(), x, create_graph=True)
        return grad

    grad = gradient(logits)
    torch.testing.assert_close(grad, gradient(logits, backend="torch"))
    with pytest.raises(RuntimeError, match="the gradient of token_logprobs has no gradient; backend='torch' has one"):
        grad.square().sum().backward()
    (second,) = torch.autograd.grad(gradient(logits, backend="torch").square().sum(), logits)
    exact = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(gradient(exact).square().sum(), exact)
    torch.testing.assert_close(second.double(), expected, atol=1e-6, rtol=1e-5)


def test_gradient_holds_no_copy_of_the_logits_in_float32():
    logits = torch.randn(8, 1000, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rlkernels.token_logprobs(logits, torch.zeros(8).long(), return_entropy=True)
    assert sum(t.nbytes for t in saved if t.data_ptr() != logits.data_ptr()) < 1000


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_plain_torch_makes_only_the_passes_that_were_asked_for(temperature):
    logits = torch.randn(3, 50)
    ids = torch.tensor([0, 49, 7])
    with Launches() as launches:
        logprobs = rlkernels.token_logprobs(logits, ids, temperature=temperature, backend="torch")
    passes = [name for name, shape in launches.results if shape.numel() == logits.numel()]
    assert passes == (["_log_softmax"] if temperature == 1 else ["div", "_log_softmax"])
    assert torch.equal(logprobs, reference.token_logprobs(logits, ids, temperature)[0])


BACKENDS = ["cpu", "torch"]


def problem(rows, vocab, width=24, dtype=torch.float32, scale=1.0, bias=True):
    """Return hidden, weight, bias or None, ids; the bias rules out a third of the vocabulary."""
    gen = torch.Generator().manual_seed(rows + vocab)
    hidden, weight = (torch.randn(n, width, generator=gen).mul(scale**0.5).to(dtype) for n in (rows, vocab))
    offset = torch.randn(vocab, generator=gen).to(dtype)
    offset[1::3] = -torch.inf
    ids = torch.randint((vocab + 2) // 3, (rows,), generator=gen) * 3
    return hidden, weight, offset if bias else None, ids


def outputs(run, hidden, weight, bias):
    """Return log-probability, entropy and all gradients of a sum with weights of both signs."""
    tensors = [x for x in (hidden, weight, bias) if x is not None]
    factor = torch.linspace(-1, 2, len(hidden))
    return with_gradients(lambda h, w, b=None: run(h, w, b), tensors, factor, factor.flip(0))


def ours(ids, **options):
    return lambda h, w, b: linear_token_logprobs(h, w, ids, bias=b, return_entropy=True, **options)


def plain(ids, temperature):
    return lambda h, w, b: reference.linear_token_logprobs(h, w, ids, temperature, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "vocab", "chunk"),
    [(1, 1, 1), (3, 2, 1), (5, 17, 5), (37, 1023, 100), (37, 2053, 2052), (23, 2053, 9999), (700, 1023, None)],
)
@pytest.mark.parametrize("scale", [0.1, 4.0])
def test_error_is_that_of_plain_torch(backend, dtype, rows, vocab, chunk, scale):
    hidden, weight, bias, ids = problem(rows, vocab, dtype=dtype, scale=scale)
    for temperature, offset in ((1.0, bias), (0.7, None)):
        check_linear_logprobs(backend, (hidden, weight, offset), ids, temperature, chunk, relative=2e-6)


def test_error_in_bfloat16_does_not_grow_with_the_number_of_blocks(monkeypatch):
    """A sum of blocks that are rounded before they are added would lose with 64 of them."""
    monkeypatch.setattr(linear, "MIN_GRADIENT_ROWS", 8)
    monkeypatch.setattr(linear, "CPU_BLOCK_LOGITS", 1)
    hidden, weight, bias, ids = problem(50, 1024, 64, torch.bfloat16, 0.5)
    exact = outputs(plain(ids, 1.0), *(x.double() for x in (hidden, weight, bias)))
    plain_results = outputs(plain(ids, 1.0), hidden, weight, bias)
    for result, plain_result, expected in zip(
        outputs(ours(ids, chunk=16), hidden, weight, bias), plain_results, exact, strict=True
    ):
        assert (result.double() - expected).norm() <= 1.2 * (
            plain_result.double() - expected
        ).norm() + 1e-5 * expected.norm()


@pytest.mark.parametrize("chunk", [1, 4, 11])
def test_gradients(chunk):
    hidden, weight, bias = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (11, 4), (11,))
    )
    ids = torch.randint(11, (2, 3))
    assert torch.autograd.gradcheck(ours(ids, temperature=0.8, chunk=chunk), (hidden, weight, bias))
    only = lambda h, w: linear_token_logprobs(h, w, ids, chunk=chunk)  # noqa: E731
    assert torch.autograd.gradcheck(only, (hidden, weight))
    entropy = lambda h, w: linear_token_logprobs(h, w, ids, chunk=chunk, return_entropy=True)[1]  # noqa: E731
    assert torch.autograd.gradcheck(entropy, (hidden, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_part_gets_no_gradient_and_changes_none(backend):
    hidden, weight, bias, ids = problem(6, 50)
    expected_grads = outputs(ours(ids, chunk=7, backend=backend), hidden, weight, bias)[2:]
    for trained in range(3):
        leaves = [x.clone().requires_grad_(i == trained) for i, x in enumerate((hidden, weight, bias))]
        logprobs, entropy = ours(ids, chunk=7, backend=backend)(*leaves)
        factor = torch.linspace(-1, 2, 6)
        ((logprobs * factor).sum() + (entropy * factor.flip(0)).sum()).backward()
        assert [x.grad is not None for x in leaves] == [i == trained for i in range(3)]
        torch.testing.assert_close(leaves[trained].grad, expected_grads[trained])


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_that_are_ruled_out_and_nan(backend):
    check_blocks(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_is_summed_up_without_waiting_for_it(backend):
    logits = torch.randn(4, 9)
    logits[1] = -torch.inf
    logits[2, 0] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 5] = torch.nan
    with Launches() as launches:
        top, log_sum, entropy = linear._summary(logits, torch.zeros(4).long(), 0, 0.7, True, backend)
    assert not launches.waits
    assert (top[1], log_sum[1], entropy[1]) == (-torch.inf, -torch.inf, 0)
    assert log_sum.isfinite().tolist() == [True, False, True, False] and log_sum[3].isnan() and entropy[3].isnan()


def test_equals_token_logprobs_of_the_logits_for_any_shape_of_input():
    hidden, weight, bias, ids = problem(24, 70)
    view = torch.stack([hidden, hidden], -1)[..., 0].view(2, 3, 4, 24).transpose(0, 1)
    ids = ids.view(2, 3, 4).transpose(0, 1)
    expected = rlkernels.token_logprobs(view @ weight.T + bias, ids, temperature=1.3, return_entropy=True)
    result = linear_token_logprobs(view, weight, ids, bias=bias, temperature=1.3, return_entropy=True, chunk=20)
    torch.testing.assert_close(result, expected)
    every_second = torch.stack([ids, ids], -1)[..., 0]  # one stride, which reshape(-1) keeps
    options = {"bias": bias, "temperature": 1.3, "return_entropy": True}
    assert torch.equal(linear_token_logprobs(view, weight, every_second, chunk=20, **options)[0], result[0])
    scalar = linear_token_logprobs(hidden[0], weight, ids.reshape(-1)[0])
    assert scalar.shape == ()
    half = linear_token_logprobs(hidden.half(), weight.half(), ids.transpose(0, 1).reshape(-1))
    assert half.dtype == torch.float32 and half.isfinite().all()
    empty = torch.zeros(0, 24, requires_grad=True)
    linear_token_logprobs(empty, weight, torch.zeros(0).long()).sum().backward()
    assert empty.grad.shape == (0, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_named_backend_runs(dtype, monkeypatch):
    """Also in float16, which no kernel took before."""
    backends = set()

    def is_text(argument):
        return isinstance(argument, str)

    for name in ("_summary", "_logit_gradient"):
        function = getattr(linear, name)
        monkeypatch.setattr(linear, name, lambda *args, f=function: backends.update(filter(is_text, args)) or f(*args))
    hidden, weight, bias, ids = problem(5, 17, dtype=dtype)
    outputs(ours(ids, backend="cpu"), hidden, weight, bias)
    assert backends == {"cpu"}


@pytest.mark.parametrize("call", [
    lambda x: rlkernels.token_logprobs(x, torch.tensor([0, 2]), backend="cpu"),
    lambda x: linear_token_logprobs(x, x, torch.tensor([0, 1]), backend="cpu"),
])  # fmt: skip
def test_a_named_backend_that_lacks_a_dtype_says_so(call):
    with pytest.raises(ValueError, match=r"backend='cpu' runs \w+ on 16 and 32 bit floats, got torch.float64"):
        call(torch.randn(2, 3).double())


def test_no_pass_has_more_logits_at_a_time_than_a_block(monkeypatch):
    """Without a chunk; the forward pass has no more than ROWS_PER_PASS tokens at a time, the backward pass all 32."""
    monkeypatch.setattr(linear, "ROWS_PER_PASS", 8)
    monkeypatch.setattr(linear, "CPU_BLOCK_LOGITS", 128)
    monkeypatch.setattr(linear, "MIN_BLOCK_COLUMNS", 2)
    blocks = linear._blocks
    sizes = []

    def recorded(hidden, weight, bias, chunk):
        sizes.append(len(hidden) * chunk)
        return blocks(hidden, weight, bias, chunk)

    monkeypatch.setattr(linear, "_blocks", recorded)
    hidden, weight, bias, ids = problem(32, 53)
    outputs(ours(ids), hidden, weight, bias)
    assert sizes == [8 * 16] * 4 + [32 * 4]


def test_more_tokens_than_are_summed_up_at_one_time(monkeypatch):
    monkeypatch.setattr(linear, "ROWS_PER_PASS", 8)
    hidden, weight, bias, ids = problem(29, 53)
    check_linear_logprobs("auto", (hidden, weight, bias), ids, 1.0, 10)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_no_memory_is_asked_for_that_all_logits_would_need(dtype, monkeypatch):
    """torch allocates, forward and backward, a block, its gradient, the results, and memory for products."""
    monkeypatch.setattr(linear, "CPU_BLOCK_LOGITS", 1)
    monkeypatch.setattr(linear, "MIN_GRADIENT_ROWS", 4)
    rows = 800
    vocab = 20_000
    width = 64
    chunk = 256
    hidden, weight, _, ids = problem(rows, vocab, width, dtype, bias=False)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logprobs, entropy = linear_token_logprobs(*leaves, ids, return_entropy=True, chunk=chunk)
        torch.autograd.grad((logprobs + entropy).sum(), leaves)
    events = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert len(events) > 100
    allocated = 0
    highest = 0
    for nbytes in events:
        allocated += nbytes
        highest = max(highest, allocated)
    blocks = 2 * max(rows * chunk, 4 * vocab) * dtype.itemsize  # logits and their gradient
    further_bytes = vocab * width * dtype.itemsize + 40 * rows * (
        vocab // chunk
    )  # gradient of the weight; sums of each block
    further_bytes += 1_000_000 if dtype == torch.bfloat16 else 0  # where oneDNN packs a part of the weight, for AMX
    assert (
        rows * chunk * dtype.itemsize
        < max(events)
        < highest
        <= blocks + further_bytes
        < rows * vocab * dtype.itemsize / 4
    )


@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(with_bias):
    hidden, weight, bias, ids = problem(4, 33)
    arguments = (hidden, weight, bias if with_bias else None, ids, 0.8, True, 9, "torch")
    torch.library.opcheck(torch.ops.rlkernels.linear_token_logprobs.default, arguments)
    vectors = torch.randn(4), torch.randn(4)
    _, entropies, stats = linear.score_op(*arguments)
    torch.library.opcheck(
        torch.ops.rlkernels.linear_token_logprobs_backward.default,
        (*arguments[:4], stats, entropies, *vectors, 0.8, 9, "torch",
         [True, False, with_bias]),
    )  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"hidden": torch.zeros(2, 3).long()}, TypeError, "hidden must be floating point, got torch.int64"),
    ({"hidden": torch.tensor(1.0)}, ValueError, r"hidden must have shape \[\.\.\., H\], got \[\]"),
    ({"weight": torch.zeros(7, 4)}, ValueError, r"weight must have shape \[any, 3\], got \[7, 4\]"),
    ({"weight": torch.zeros(0, 3)}, ValueError, r"weight must have shape \[V, H\] with V >= 1, got \[0, 3\]"),
    ({"weight": torch.zeros(7, 3).double()}, TypeError, "weight must have dtype torch.float32, got torch.float64"),
    ({"bias": torch.zeros(6)}, ValueError, r"bias must have shape \[7\], got \[6\]"),
    ({"ids": torch.tensor([0, 7])}, ValueError, "ids must be between 0 and 6, got 7"),
    ({"ids": torch.tensor([0.0, 1.0])}, TypeError, "ids must have dtype torch.int64, got torch.float32"),
    ({"ids": torch.tensor([0])}, ValueError, r"ids must have shape \[2\], got \[1\]"),
    ({"temperature": 0}, ValueError, "temperature must be > 0, got 0"),
    ({"chunk": 0}, ValueError, "chunk must be >= 1, got 0"),
    ({"backend": "cuda"}, ValueError, "cannot run linear_token_logprobs here"),
])  # fmt: skip
def test_bad_arguments_of_hidden_states(changes, error, message):
    arguments = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(7, 3), "ids": torch.tensor([0, 6])} | changes
    with pytest.raises(error, match=message):
        linear_token_logprobs(**arguments)


@pytest.mark.parametrize(
    ("gigabytes", "logits"),
    [(None, 1 << 22), (4, 1 << 22), (24, 1 << 24), (48, 1 << 25), (80, 1 << 26), (192, 1 << 26)],
)
def test_blocks_suit_the_device(gigabytes, logits):
    memory = None if gigabytes is None else int(gigabytes * 0.99 * 2**30)
    assert linear.block_columns(64, memory) == logits // 64
    assert linear.block_columns(1 << 16, memory) == max(logits >> 16, linear.MIN_BLOCK_COLUMNS)
