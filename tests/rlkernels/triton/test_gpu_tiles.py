"""The code that runs on a GPU, through the interpreter: its tile sizes, and bfloat16 where it has bfloat16.

Elsewhere the interpreter gets small tiles and float32, because its own bfloat16 is cut off and its products take the
bits for integers. Here both are mended: conversions round to nearest even and products multiply the values in float32,
which is what tensor cores do. So the rules by which a GPU is judged are tried out on the rounding that it will have.
Those of rank 1 are in test_rank1.py: they take bfloat16 as its bits, and programs of panels wait for each other, so on
a GPU that file runs last.
"""

import numpy as np
import pytest
import torch
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


def assert_close(ours, plain, exact, floor=2e-6):
    for a, b, gold in zip(ours, plain, exact, strict=True):
        assert a.dtype == b.dtype and not a.isnan().any()
        seen = gold > -torch.inf
        assert torch.equal(a > -torch.inf, seen)
        gold = gold[seen]
        error, allowed = ((x[seen].double() - gold).abs().max() for x in (a, b))
        assert error <= 2 * allowed + floor * gold.abs().max(), f"error {error:.3g}, of plain torch {allowed:.3g}"


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def starts_of(counts):
    return ints([0, *counts]).cumsum(0, dtype=torch.int32)


def pages(lens, kv_heads, dim):
    """Key and value cache in blocks of 16, and the tables of sequences of these lengths; NaN beyond them."""
    counts = [-(-n // 16) for n in lens]
    caches = torch.full((2, sum(counts), 16, kv_heads, dim), torch.nan, dtype=BF16)
    tables = torch.full((len(lens), max(counts)), -1, dtype=torch.int32)
    for row, n, blocks in zip(tables, lens, torch.randperm(sum(counts)).int().split(counts)):
        row[: len(blocks)] = blocks
        at = torch.arange(n)
        caches[:, blocks[at // 16].long(), at % 16] = torch.randn(2, n, kv_heads, dim).to(BF16)
    return *caches, tables


@pytest.mark.parametrize(("lens", "queries", "heads", "dim", "tile"), [
    ([130, 65], [1, 1], (4, 1), 128, (16, 64)),
    ([150], [70], (2, 1), 64, (128, 64)),
], ids=["decode", "prefill"])  # fmt: skip
def test_paged_attention(lens, queries, heads, dim, tile):
    *caches, tables = pages(lens, heads[1], dim)
    query = torch.randn(sum(queries), heads[0], dim).to(BF16)
    rest = tables, ints(lens), starts_of(queries)
    scale, launch = dim**-0.5, triton_kernels._Launch(query, caches[0], tables)
    assert (launch.block_m, launch.block_n, launch.upcast) == (*tile, False)
    ours = rlkernels.paged_attention(query, *caches, *rest, scale=scale, return_lse=True, backend="triton")
    plain = reference.paged_attention(query, *caches, *rest, scale)
    exact = reference.paged_attention(query.double(), *(c.double() for c in caches), *rest, scale)
    assert_close(ours, plain, exact)


SHARED = {  # tokens of each prefix, keys and queries of its sequences; heads, dim; tiles and splits of both
    "decode": ([(600, [70, *range(1, 8)], [1] * 8), (70, [33, 16, 2], [1] * 3)], (8, 2), 128, (32, 2), (16, 1)),
    "drafts": ([(530, [300, 40], [40, 33]), (0, [20], [3])], (4, 1), 64, (128, 2), (128, 1)),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_prefix_attention(name):
    """A prefix in two splits, so that three parts in float32 are merged into bfloat16."""
    groups, heads, dim, *cut = SHARED[name]
    prefixes, sizes = [g[0] for g in groups], [len(g[1]) for g in groups]
    lens, counts = ([n for g in groups for n in g[i]] for i in (1, 2))
    *caches, tables = pages(prefixes + lens, heads[1], dim)
    query = torch.randn(sum(counts), heads[0], dim).to(BF16)
    group_tables, own_tables = tables[: len(prefixes)], tables[len(prefixes) :, : -(-max(lens) // 16)]
    launches = [triton_kernels._Launch(query, caches[0], t) for t in (group_tables, own_tables)]
    assert [(launch.block_m, launch.splits, launch.block_n) for launch in launches] == [(*c, 64) for c in cut]
    rest = group_tables, ints(prefixes), starts_of(sizes), own_tables, ints(lens), starts_of(counts)
    scale = dim**-0.5
    ours = rlkernels.shared_prefix_attention(query, *caches, *rest, scale=scale, return_lse=True, backend="triton")
    plain = reference.shared_prefix_attention(query, *caches, *rest, scale)
    exact = reference.shared_prefix_attention(query.double(), *(c.double() for c in caches), *rest, scale)
    assert_close(ours, plain, exact)


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

    def run(inputs, attend):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    scale = dim**-0.5
    ours = run(tensors, lambda *t: rlkernels.grouped_attention(*t, layout, scale=scale, backend="triton"))
    plain = run(tensors, lambda *t: reference.grouped_attention(*t, layout, scale))
    exact = run([t.double() for t in tensors], lambda *t: reference.grouped_attention(*t, layout, scale))
    # the gradients start from the rounded output, where plain torch keeps its weights
    assert_close(ours, plain, exact, floor=torch.finfo(BF16).eps)


def test_token_logprobs():
    """Blocks of 4,096, the second in part."""
    logits, ids = (torch.randn(2, 5003) * 3).to(BF16), torch.tensor([4999, 7])

    def run(x, function):
        leaf = x.detach().requires_grad_()
        out = function(leaf)
        return [*(t.detach() for t in out), *torch.autograd.grad(sum(t.sum() for t in out), [leaf])]

    ours = run(logits, lambda x: rlkernels.token_logprobs(x, ids, return_entropy=True, backend="triton"))
    plain = run(logits, lambda x: logprobs.token_logprobs(x, ids))
    assert_close(ours, plain, run(logits.double(), lambda x: logprobs.token_logprobs(x, ids)))


SAMPLED = [  # temperature, top_p, top_k, uniform
    (1.0, 1.0, 0, 0.4),
    (1.5, 0.99, 0, 0.97),  # cut among negative logits
    (1.3, 0.8, 5000, 0.6),
    (1.0, 1.0, 40, 1 - 2**-24),
    (0.0, 1.0, 0, 0.5),
]


@pytest.mark.parametrize("filtered", [True, False], ids=["filtered", "not filtered"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_sample_tokens(dtype, filtered):
    """Blocks of 4,096, the ninth in part; bfloat16 has many equal logits, at every cut."""
    logits = (torch.randn(len(SAMPLED), 33333) * 3).to(dtype)
    logits[:, ::7] = -torch.inf
    logits[4, [32999, 31111]] = 20.0  # the first of equals, in the last block but one
    temperatures, top_ps, top_ks, uniforms = map(torch.tensor, zip(*SAMPLED))
    settings = {"temperature": temperatures} | ({"top_p": top_ps, "top_k": top_ks} if filtered else {})
    ours, wanted = (rlkernels.sample_tokens(logits, uniforms, backend=b, **settings) for b in ("triton", "torch"))
    assert torch.equal(ours[0], wanted[0]) and ours[0][4] == 31111
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
