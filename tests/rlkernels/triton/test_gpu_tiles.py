"""The code that runs on a GPU, through the interpreter: its tile sizes, and bfloat16 where it has bfloat16.

Elsewhere the interpreter gets small tiles and float32, because its own bfloat16 is cut off and its products take the
bits for integers. Here both are mended: conversions round to nearest even and products multiply the values in float32,
which is what tensor cores do. So the rules by which a GPU is judged are tried out on the rounding that it will have.
Those of rank 1 are in test_rank1.py: they take bfloat16 as its bits, and programs of panels wait for each other, so on
a GPU that file runs last.
"""

from functools import partial

import numpy as np
import pytest
import torch
from accuracy import assert_as_plain, with_gradients
from paged_problems import check_attention, paged, shared_prefix
from support import lacks

import rlkernels
from rlkernels.logprobs import reference as logprobs
from rlkernels.prefix_cache import reference
from rlkernels.similarity import reference as similarity

triton_kernels = pytest.importorskip("rlkernels.prefix_cache.triton_kernels", reason="this machine lacks triton")
triton_grouped = pytest.importorskip("rlkernels.prefix_cache.triton_grouped", reason="this machine lacks triton")
BF16 = torch.bfloat16


def rounded(data):
    """float32 -> the bits of bfloat16, as torch rounds."""
    return torch.from_numpy(np.ascontiguousarray(data, np.float32)).to(BF16).view(torch.int16).numpy().view(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    if torch.cuda.is_available():
        return  # it is one
    import triton.language as tl
    from triton.runtime import interpreter

    from rlkernels.logprobs import triton_kernels as logprob_kernels

    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self, src, dst_type):
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(rounded(src.data), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(widened(src.data), tl.float32)
        assert tl.bfloat16 not in pair, pair
        return cast(self, src, dst_type)

    def create_dot(self, a, b, d, *options):
        sides = [
            interpreter.TensorHandle(widened(t.data), tl.float32) if t.dtype.scalar == tl.bfloat16 else t
            for t in (a, b)
        ]
        return dot(self, *sides, d, *options)

    for name in ("cast_impl", "create_fp_ext", "create_fp_trunc"):
        monkeypatch.setattr(builder, name, cast_impl)
    monkeypatch.setattr(builder, "create_dot", create_dot)
    for module in (triton_kernels, triton_grouped, logprob_kernels):
        monkeypatch.setattr(module, "triton_interpreted", lambda: False)
    monkeypatch.setattr(triton_kernels, "processors", lambda _: 132)  # so few programs as here are split along the keys


assert_close = partial(assert_as_plain, floor=0, relative=2e-6)


@pytest.mark.parametrize(("lens", "queries", "heads", "dim", "tile"), [
    ([130, 65], [1, 1], (4, 1), 128, (16, 64)),
    ([150], [70], (2, 1), 64, (128, 64)),
], ids=["decode", "prefill"])  # fmt: skip
def test_paged_attention(lens, queries, heads, dim, tile):
    problem = paged(lens, queries, heads=heads[0], kv_heads=heads[1], dim=dim, block_size=16, dtype=BF16)
    launch = triton_kernels._Launch(problem.query, problem.key_cache, problem.block_tables)
    assert (launch.block_m, launch.block_n, launch.upcast) == (*tile, False)
    check_attention("paged_attention", problem.args(), problem.scale, "triton")


SHARED = {  # tokens of each prefix, keys and queries of its sequences; heads, dim; tiles and splits of both
    "decode": ([(600, [70, *range(1, 8)], [1] * 8), (70, [33, 16, 2], [1] * 3)], (8, 2), 128, (32, 2), (16, 1)),
    "drafts": ([(530, [300, 40], [40, 33]), (0, [20], [3])], (4, 1), 64, (128, 2), (128, 1)),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_prefix_attention(name):
    """A prefix in two splits, so that three parts in float32 are merged into bfloat16."""
    groups, heads, dim, *cut = SHARED[name]
    shared, _, scale = shared_prefix(groups, BF16, *heads, dim)
    shared = [*shared]
    for tables, lens in ((3, 4), (6, 7)):  # as wide as they must be
        shared[tables] = shared[tables][:, : -(-int(shared[lens].max()) // 16)]
    launches = [triton_kernels._Launch(shared[0], shared[1], shared[i]) for i in (3, 6)]
    assert [(launch.block_m, launch.splits, launch.block_n) for launch in launches] == [(*c, 64) for c in cut]
    check_attention("shared_prefix_attention", shared, scale, "triton")


@pytest.mark.parametrize(("dim", "dtype"), [(128, BF16), (80, BF16), (128, torch.float32)], ids=str)
def test_merge_attention(dim, dtype):
    """Blocks of 8 rows, the third in part."""
    a, b = torch.randn(2, 7, 3, dim).to(dtype)
    lse_a, lse_b = torch.randn(2, 7, 3) * 3
    lse_a[:2], lse_b[1:3] = -torch.inf, -torch.inf  # row 1: neither side saw a key
    a[:2], b[1:3] = torch.nan, torch.nan
    ours = rlkernels.merge_attention(a, lse_a, b, lse_b, backend="triton")
    plain = reference.merge_attention(a, lse_a, b, lse_b)
    assert_close(ours, plain, reference.merge_attention(*(t.double() for t in (a, lse_a, b, lse_b))))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_write_kv(dtype):
    """Blocks of 16 rows, the third in part, rounded on their way; nothing is written for slots outside the cache."""
    storage = torch.full((2, 5, 16, 3, 128), torch.nan, dtype=BF16)
    caches = storage[:, 1:4]
    key, value = torch.randn(2, 13, 3, 128).to(dtype)
    slots = torch.randperm(48)[:13]
    slots[4], slots[7] = -1, 48
    kept = (slots >= 0) & (slots < 48)
    expected = storage.clone()
    reference.write_kv(key[kept], value[kept], *expected[:, 1:4], slots[kept])
    triton_kernels.write_kv(key, value, *caches, slots)  # the public function refuses such slots on a CPU
    torch.testing.assert_close(storage, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dim", "short"), [(64, 4096), (128, 4096), (64, 1)])
def test_grouped_attention(monkeypatch, dim, short):
    """Tiles of 64 x 64, and 32 x 64 for the gradients of the keys, where those of the first are cut into pieces."""
    monkeypatch.setattr(triton_grouped, "SHORT", short)
    layout = rlkernels.GroupedLayout([70], [66, 3], [0, 2])
    shapes = [(layout.num_tokens, heads, dim) for heads in (2, 1, 1, 2)]
    *tensors, grad = [torch.randn(shape).to(BF16) for shape in shapes]

    scale = dim**-0.5
    attend = partial(rlkernels.grouped_attention, layout=layout, scale=scale, backend="triton")
    ours = with_gradients(attend, tensors, grad)
    plain = with_gradients(lambda *t: reference.grouped_attention(*t, layout, scale), tensors, grad)
    exact = with_gradients(
        lambda *t: reference.grouped_attention(*t, layout, scale), [t.double() for t in tensors], grad
    )
    # the gradients start from the rounded output, where plain torch keeps its weights
    assert_as_plain(ours, plain, exact, floor=0, relative=torch.finfo(BF16).eps)


def test_token_logprobs():
    """Blocks of 4,096, the second in part."""
    logits, ids = (torch.randn(2, 5003) * 3).to(BF16), torch.tensor([4999, 7])

    score, grads = partial(rlkernels.token_logprobs, ids=ids, return_entropy=True), torch.ones(2, 2)
    ours = with_gradients(partial(score, backend="triton"), [logits], *grads)
    plain, exact = (
        with_gradients(lambda x: logprobs.token_logprobs(x, ids), [x], *grads) for x in (logits, logits.double())
    )
    assert_close(ours, plain, exact)


SAMPLED = [  # temperature, top_p, top_k, uniform
    (1.0, 1.0, 0, 0.4),
    (1.5, 0.99, 0, 0.97),  # cut among negative logits
    (1.3, 0.8, 5000, 0.6),
    (1.0, 1.0, 40, 1 - 2**-24),
    (0.0, 1.0, 0, 0.5),
]


@pytest.mark.parametrize("filtered", [True, False], ids=["filtered", "not filtered"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [9000, pytest.param(33333, marks=pytest.mark.slow)])
def test_sample_tokens(vocab, dtype, filtered):
    """Blocks of 4,096, the last in part; bfloat16 has many equal logits, at every cut."""
    logits = (torch.randn(len(SAMPLED), vocab) * 3).to(dtype)
    logits[:, ::7] = -torch.inf
    first = vocab // 4096 * 4096 - 1657
    logits[4, [vocab - 334, first]] = 20.0  # the first of equals, in the last block but one
    temperatures, top_ps, top_ks, uniforms = map(torch.tensor, zip(*SAMPLED))
    settings = {"temperature": temperatures} | ({"top_p": top_ps, "top_k": top_ks} if filtered else {})
    ours, wanted = (rlkernels.sample_tokens(logits, uniforms, backend=b, **settings) for b in ("triton", "torch"))
    assert torch.equal(ours[0], wanted[0]) and ours[0][4] == first
    torch.testing.assert_close(ours[1], wanted[1], atol=2e-7, rtol=2e-7)


@pytest.mark.parametrize("how", [{}, {"band": 9}, {"mode": "subsequence"}], ids=["full", "band", "subsequence"])
def test_dtw(how):
    """A strip of 128 rows and one of 22, along more columns than a strip has rows."""
    x, y, length = torch.randn(1, 150, 2), torch.randn(1, 140, 2), torch.tensor([131])
    ours, plain = (rlkernels.dtw(x, y, y_lengths=length, **how, backend=b) for b in ("triton", "torch"))
    exact = similarity.dtw(x.double(), y.double(), y_lengths=length, **how)
    if "mode" in how:
        (ours, *places), (plain, *wanted), (exact, *_) = ours, plain, exact
        assert places == wanted  # of a single pair
    assert_close([ours], [plain], [exact])


def test_conversions_are_those_of_torch():
    if torch.cuda.is_available():
        lacks("the interpreter: kernels are compiled here")
    x = torch.cat(
        [torch.randn(1000), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1 + 2**-8, 1 + 3 * 2**-8])]
    )
    back = torch.from_numpy(widened(rounded(x.numpy())).copy())
    torch.testing.assert_close(back, x.to(BF16).float(), rtol=0, atol=0, equal_nan=True)
