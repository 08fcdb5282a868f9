"""Every compiled kernel, executed: as its launcher starts it, on shapes that cross every boundary, against float64.

Blocks run in no order that a kernel could rely on. The other architecture is a slow test.
"""

import importlib.util
import math
import os
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_as_plain, check_linear_logprobs, check_logprobs
from paged_problems import check_attention, check_grouped, paged, shared_prefix
from rank1_cases import angle, exact, planted
from support import assert_equal, lacks, run_python

import rlkernels
from ptx.gpu import Gpu, Launch
from rlkernels.prefix_cache import GroupedLayout, TreeLayout
from rlkernels.rank1 import reference as rank1

BF16 = torch.bfloat16
# `pip install --no-deps --target FOLDER triton==3.6.0`; several folders are joined as in PATH
OTHERS = os.environ.get("RLKERNELS_OTHER_TRITON", "").split(os.pathsep)
RUNS = [(90, "shuffled"), pytest.param(80, "reversed", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def compiled():
    if importlib.util.find_spec("triton") is None:
        lacks("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        lacks("a process without TRITON_INTERPRET")


def attend(lens, queries, dim, group=4, dtype=BF16):
    """Paged attention of sequences with so many keys and new queries."""
    problem = paged(lens, queries, heads=2 * group, kv_heads=2, dim=dim, block_size=16, dtype=dtype)
    check_attention("paged_attention", problem.args(), problem.scale, "triton")


# a full group of queries to a prefix, a prefix of one key, of nobody, of one member, no prefix
GROUPS = [(70, [3, 17, 1], [3, 4, 1]), (1, [9] * 8, [1] * 8), (16, [], []), (40, [5], [5]), (0, [20, 3], [9, 3])]


def attend_shared(dim, groups=GROUPS, group=4):
    shared, _, scale = shared_prefix(groups, BF16, 2 * group, 2, dim)
    check_attention("shared_prefix_attention", shared, scale, "triton", floor=2e-3)


def train(dim, short=4096, layout=None, backend="triton", dtype=BF16):
    """Attention on a trie and its gradients; ``short``: queries times heads beyond which a tile of keys is cut."""
    from rlkernels.prefix_cache import triton_tree

    layout = layout or GroupedLayout([70, 0], [33, 65, 3], [0, 2, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_tree, "MAX_UNCUT", short)
        patch.setattr(triton_tree, "CONCURRENT_PROGRAMS", 10**6)
        check_grouped(partial(rlkernels.tree_attention, backend=backend), layout, 8, 2, dim, dtype)
        assert len(triton_tree.key_tiles(layout, 64, 4, 2, backend == "triton/crossing")[1]) == (short < 4096)


def train_tree(dim, backend, dtype=BF16):
    """A node of one token, nodes that end within a tile, blocks that all of another tile sees."""
    tails = [-1, *range(100, 120)], [-1, 7, 7, 7], range(200, 240)
    sequences = [*([*range(70), *tail] for tail in tails), range(300, 330)]
    train(dim, layout=TreeLayout.from_sequences(sequences), backend=backend, dtype=dtype)


def write(dim=128, dtype=BF16, spare=0):
    """19 tokens into the slots of 4 pages; two slots lie outside and are left out. Rows lie ``spare`` numbers apart."""
    from rlkernels.prefix_cache import triton_kernels

    key, value = torch.randn(2, 19, 2, dim + spare).to(dtype)[..., :dim]
    caches = torch.full((2, 4, 16, 2, dim + spare), 7.0, dtype=BF16)[..., :dim]
    slots = torch.randperm(64)[:19]
    slots[3], slots[4] = -1, 64
    expected = caches.clone().flatten(1, 2)
    is_valid = (slots >= 0) & (slots < 64)
    expected[:, slots[is_valid]] = torch.stack([key, value])[:, is_valid].to(BF16)
    triton_kernels.write_kv(key, value, *caches, slots)
    assert torch.equal(caches.flatten(1, 2), expected)


def sample(filtered, vocab=12304, dtype=BF16):
    """The very tokens of the reference, in rows of several blocks: peaked, ruled out in part, of ties, flat, invalid.

    With filters rows 3 to 5 have too many candidates for a list: by ties, a top-k above the lanes, a flat top-p.
    """
    rows = torch.cat([torch.randn(2, vocab) * 6, torch.zeros(2, vocab), torch.randn(2, vocab)])
    rows[1, ::2], rows[2, ::199], rows[4] = -torch.inf, 9, (rows[4] * 2).round()
    rows = torch.cat([rows, torch.full((1, vocab), math.nan), rows[:1]]).to(dtype)
    draws = torch.rand(8)
    settings = {"temperature": torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0, 1.0, 1.0, 0.0])}
    if filtered:
        settings |= {"top_p": torch.tensor([0.9, 1.0, 0.7, 0.5, 1.0, 0.9, 1.0, 0.8])}
        settings |= {"top_k": torch.tensor([0, 50, 50, 40, 5000, 0, 0, 0])}
    actual, expected = (
        rlkernels.sample_tokens(rows, draws, **settings, validate=False, backend=b) for b in ("triton", "torch")
    )
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], atol=2e-7, rtol=2e-7, equal_nan=True)


def score(vocab=4112, dtype=BF16):
    """Log-probabilities, entropies and gradients of rows that end inside a block, one ruled out in part."""
    logits, ids = (torch.randn(3, vocab) * 3).to(dtype), torch.tensor([0, vocab - 1, 77 % vocab])
    logits[1, 1::2], logits[1, -1] = -torch.inf, 0.5
    check_logprobs("triton", logits, ids, 1.3, floor=1e-5)


def score_hidden(gpu):
    """Log-probabilities and gradients from hidden states by blocks of the vocabulary, the first two ruled out."""
    gpu.torch_fills = True  # a product writes the logits
    tensors = [torch.randn(shape) for shape in ((5, 16), (1000, 16), (1000,))]
    tensors[2][:800] = -torch.inf
    check_linear_logprobs("triton", tensors, torch.randint(800, 1000, (5,)), 0.7, 400, floor=1e-5)


def solve(gpu, shapes, dtypes=(BF16, BF16), passes=2):
    """The leading direction of every matrix, by passes over each, against the singular values in float64."""
    pairs = {
        str(shape): [m.to(dtype) for m, dtype in zip(planted(*shape, 1e-2, seed=i, share=0.999), dtypes)]
        for i, shape in enumerate(shapes)
    }
    for pair in pairs.values():
        for matrix in pair:  # only the first of them is an argument
            gpu.pointer(matrix)
    start = torch.randn(shapes[0][1])
    actual = rlkernels.top1_deltas(pairs, starts={str(shapes[0]): start}, max_passes=passes, tol=1e-9, backend="triton")
    for update, (weight, base) in zip(actual.values(), pairs.values()):
        u, s, v = exact(weight, base)
        assert math.isclose(update.sigma, s[0].item(), rel_tol=1e-5)
        assert angle(update.v, v[:, 0]) < 1e-2 and angle(update.u, u[:, 0]) < 1e-2
        norm, changed, _ = rank1.delta_stats(weight, base)
        assert math.isclose(update.frobenius, norm, rel_tol=1e-5) and math.isclose(update.changed, changed)


def update():
    """Sums that float32 holds exactly, rounded at random or not; a product with one vector."""
    for dtype in (BF16, torch.float16, torch.float32):
        weight = (torch.randint(-128, 128, (6, 1030)) / 64).to(dtype)
        u, v = torch.randint(-7, 8, (6,)) / 1024, torch.randint(-15, 16, (1030,)) / 64
        for stochastic in {torch.float16: [True], torch.float32: [False]}.get(dtype, [False, True]):
            options = {"stochastic_rounding": stochastic, "seed": 5}
            expected = rank1.add_rank1_(weight.clone(), u, v, 0.5, **options)
            assert torch.equal(rlkernels.add_rank1_(weight.clone(), u, v, 0.5, backend="triton", **options), expected)
        product = rlkernels.delta_matvec(weight, weight.flip(0).contiguous(), v, backend="triton")
        gold = (weight.double() - weight.flip(0).double()) @ v.double()
        plain = rank1.delta_matvec(weight, weight.flip(0), v)
        assert_as_plain([product], [plain], [gold], floor=0, relative=1e-7)


def warp(length=140, dims=1):
    """All pairs, two strips long and empty; whole numbers, for which all orders of additions agree."""
    x, y = torch.randint(0, 4, (3, length, dims)).float(), torch.randint(0, 4, (2, 9, dims)).float()
    lengths = {"x_lengths": torch.tensor([length, length - 40, 0]), "y_lengths": torch.tensor([9, 6])}
    ways: list[dict[str, Any]] = [{}, {"mode": "subsequence"}, {"band": 5}]
    actual, expected = ([rlkernels.dtw(x, y, **lengths, **way, backend=b) for way in ways] for b in ("triton", "torch"))
    assert_equal(actual, expected)


def tile(rows: int, warps: int, stages: int) -> dict[str, Any]:
    """Of an attention kernel."""
    return {"HEADS_PER_KV": 4, "BLOCK_M": rows, "UPCAST": False, "num_warps": warps, "num_stages": stages}


# kernels of attention on tries -> the rows of their tiles, and what only that variant is compiled with
TRAINING: dict[str, tuple[int, dict[str, None]]] = {
    **{f"grouped attention, {part}": (64, {"blocks": None}) for part in ("forward", "query")},
    **{f"tree attention, {part}": (64, {"ends": None}) for part in ("forward", "query")},
    "grouped attention, key": (32, {"ends": None}),  # also of deeper trees
    **{f"crossing tree attention, {part}": (64, {}) for part in ("forward", "query")},
    "crossing tree attention, key": (32, {}),
}
Kernel = tuple[str, dict[str, Any]]  # a function; constants and options that it is compiled with
LONGER = {"ALIGNED": True, "ROWS": 16, "COLUMNS": 256, "STAGES": 3, "num_warps": 8}
KERNELS: dict[str, Kernel] = {  # of several that a launch is of, the first
    **{f"paged attention, {name}, heads of {dim}": ("_attend_kernel", {"DIM": dim, "CAUSAL": True, **tile(*numbers)})
       for name, numbers in (("decode", (16, 4, 3)), ("prefill", (128, 8, 2))) for dim in (64, 128)},
    **{f"shared prefix of 8, heads of {dim}": ("_attend_kernel", {"DIM": dim, "CAUSAL": False, "BLOCK_N": 64,
                                                                  **tile(32, 4, 3)})
       for dim in (64, 128)},
    **{f"{name}, heads of {dim}": (f"_{name.split()[-1]}_kernel", {"DIM": dim, **tile(rows, 4, 2), **constants})
       for name, (rows, constants) in TRAINING.items() for dim in (64, 128)},
    **{f"{name}, heads of 128": ("_forward_kernel", {"DIM": 128, **tile(64, 4, 3), **constants})
       for name, (_, constants) in TRAINING.items() if name.endswith("forward")},
    **{f"sums of output x gradient, heads of {dim}": ("_delta_kernel", {"DIM": dim, "num_warps": 4})
       for dim in (64, 128)},
    "sums of pieces, heads of 64": ("_sum_kernel", {"PIECES": 8, "num_warps": 4}),
    **{f"{name}, heads of 128, not Hopper": (f"_{name.split()[-1]}_kernel",
                                             {"DIM": 128, **tile(rows, 8, 2), **constants})
       for name, (rows, constants) in TRAINING.items()},
    "merging parts, heads of 128": ("_merge_kernel", {"DIM": 128, "BLOCK_R": 8, "num_warps": 4}),
    "writing keys and values, heads of 128": ("_write_kernel", {"DIM": 128, "BLOCK_R": 16, "num_warps": 4}),
    "sampling, without": ("_sample_kernel", {"groups": None, "BLOCK": 4096, "num_warps": 8}),
    "sampling, with filters": ("_sample_kernel", {"BLOCK": 4096, "num_warps": 8}),
    **{f"token log-probabilities, {part}": (f"_{part}_kernel", {"ENTROPY": True, "BLOCK": 4096, "num_warps": 8})
       for part in ("forward", "backward")},
    "rank-1, rows of up to 4,096": ("_rows_kernel", {"REGISTER_COLUMNS": 4096, "STATISTICS": False, "ALIGNED": True,
                                                      "STAGES": 3, "num_warps": 16}),
    "rank-1, longer rows, times": ("_times_kernel", {"STATISTICS": False, **LONGER}),
    "rank-1, longer rows, transpose": ("_transpose_kernel", LONGER),
    "rank-1, step": ("_step_kernel", {"KP": 16, "BLOCK": 512, "num_warps": 8}),
    **{name: ("_dtw_kernel", {"ROWS": 128, "BAND": False, "SUBSEQUENCE": name != "dtw", "dims": 1, "num_warps": 1})
       for name in ("dtw", "dtw, subsequence")},
}  # fmt: skip


def training(dim: int, variant: str, key: str) -> list[str]:
    """The kernels of a variant, whose key kernel may be that of another."""
    names = [f"{variant}, forward", f"{variant}, query", f"{key}, key", "sums of output x gradient"]
    return [f"{name}, heads of {dim}" for name in names]


DECODE, MERGE = "paged attention, decode, heads of", "merging parts, heads of 128"
GROUPED, CROSSING = "grouped attention", "crossing tree attention"
CASES = {  # what runs, and which of KERNELS that is
    "decode 64": (lambda _: attend([530, 17, 1, 64], [1] * 4, 64), [f"{DECODE} 64"]),
    "decode 128": (lambda _: attend([530, 65], [1, 3], 128), [f"{DECODE} 128", MERGE]),
    "prefill 64": (lambda _: attend([150, 30, 5], [40, 30, 1], 64), ["paged attention, prefill, heads of 64"]),
    "prefill 128": (lambda _: attend([90, 33], [33, 33], 128), ["paged attention, prefill, heads of 128"]),
    "shared 64": (lambda _: attend_shared(64), [f"{DECODE} 64", "shared prefix of 8, heads of 64"]),
    "shared 128": (lambda _: attend_shared(128), [f"{DECODE} 128", MERGE, "shared prefix of 8, heads of 128"]),
    "grouped 64": (lambda _: train(64, short=64), [*training(64, GROUPED, GROUPED), "sums of pieces, heads of 64"]),
    "grouped 128": (lambda _: train(128), training(128, GROUPED, GROUPED)),
    **{f"tree {dim}": (lambda _, dim=dim: train_tree(dim, "triton"), training(dim, "tree attention", GROUPED))
       for dim in (64, 128)},
    **{f"crossing {dim}": (lambda _, dim=dim: train_tree(dim, "triton/crossing"), training(dim, CROSSING, CROSSING))
       for dim in (64, 128)},
    "writing": (lambda _: write(), ["writing keys and values, heads of 128"]),
    "sampling filtered": (lambda _: sample(True), ["sampling, with filters"]),
    "sampling": (lambda _: sample(False), ["sampling, without"]),
    "log-probabilities": (lambda _: score(), [f"token log-probabilities, {part}" for part in ("backward", "forward")]),
    "log-probabilities by blocks": (score_hidden, []),
    "rank-1 rows": (lambda gpu: solve(gpu, [(9, 4096), (5, 4080)]), ["rank-1, rows of up to 4,096", "rank-1, step"]),
    "rank-1 longer rows": (lambda gpu: solve(gpu, [(17, 4112)]),
                           [*(f"rank-1, longer rows, {part}" for part in ("times", "transpose")), "rank-1, step"]),
    "rank-1 update": (lambda _: update(), []),
    "dtw": (lambda _: warp(), ["dtw", "dtw, subsequence"]),
}  # fmt: skip


def launches_of(kernel: Kernel, launches: list[Launch]) -> list[Launch]:
    function, numbers = kernel
    return [one for one in launches if one.kernel.__name__ == function and numbers.items() <= one.constants.items()]


def named(launch: Launch) -> str | None:
    """The name in KERNELS of what was launched."""
    return next((name for name, kernel in KERNELS.items() if launches_of(kernel, [launch])), None)


def expected(case: str, arch: int) -> set[str]:
    """The names in KERNELS that a case launches."""
    names = CASES[case][1]
    others = [f"{name}, heads of 128" for name in TRAINING] if arch // 10 != 9 else []
    return {f"{name}, not Hopper" if name in others else name for name in names}


@pytest.mark.parametrize(("arch", "order"), RUNS)
@pytest.mark.parametrize("name", CASES)
def test_triton_kernels(name, arch, order):
    with Gpu(arch, order) as gpu:
        CASES[name][0](gpu)
    assert {named(launch) for launch in gpu.launches} - {None} == expected(name, arch)


def test_every_kernel_runs_here():
    assert {name for case in CASES for arch in (80, 90) for name in expected(case, arch)} == KERNELS.keys()


def by_another_triton(folder: str, *arguments: str) -> None:
    """Runs tests of a file by the triton in a folder."""
    if not folder:
        lacks("a second triton: pip install --no-deps --target FOLDER triton==3.6.0, RLKERNELS_OTHER_TRITON=FOLDER")
    paths = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    run_python("-m", "pytest", *arguments, PYTHONPATH=paths, RLKERNELS_OTHER_TRITON="")


@pytest.mark.slow
@pytest.mark.parametrize("folder", OTHERS)
def test_the_kernels_of_another_triton(folder):
    by_another_triton(folder, "-m", "not slow", "tests/ptx/test_kernels.py")
