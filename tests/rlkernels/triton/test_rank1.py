"""Rank-1 kernels in Triton against the reference and float64; ``SMALL`` cuts small matrices up as if they were big."""

import itertools
import math

import pytest
import rank1_cases as cases
import torch
import triton
import triton.language as tl
from rank1_cases import angle, exact, planted, with_spectrum

import rlkernels
from rlkernels.rank1 import grouped, reference, triton_vectors
from rlkernels.rank1.layout import Tiling
from rlkernels.rank1.triton_kernels import Module
from rlkernels.rank1.triton_vectors import Fact

# Rows of more than 8 columns are too long for one program: tiles of 8 rows and 32 columns, at most four slots
SMALL = Tiling(widest=8, slots=4, least=8, rows=8, columns=32, programs=8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def generated(make, *args, **options):
    """Inputs come from CPU generators."""
    with torch.device("cpu"):
        out = make(*args, **options)
    return tuple(t.to(torch.empty(0).device) for t in out)


def solve(pairs, starts=None, tiling=None, tol=1e-2, max_passes=12, seed=0):
    settings = {"tol": tol, "max_passes": max_passes, "min_passes": 1, "rank": 1, "seed": seed}
    found = grouped.leading_deltas(pairs, starts or [None] * len(pairs), tiling=tiling, **settings)
    return [one if isinstance(one, ValueError) else one.update for one in found]


def check(got, weight, base, tol=1e-2, **options):
    """Against the reference in passes, status and certificate, and against float64 in truth."""
    plain = reference.top1_delta(weight, base, tol=tol, **options)
    u, s, v = exact(weight, base)
    assert (got.status, got.changed) == (plain.status, plain.changed)
    assert abs(got.passes - plain.passes) <= 1
    assert math.isclose(got.sigma, s[0].item(), rel_tol=max(1e-4, tol**2))
    assert math.isclose(got.frobenius, plain.frobenius, rel_tol=1e-5)
    assert angle(got.v, v[:, 0]) <= got.angle_bound
    assert got.status != "ok" or (got.angle_bound <= tol and angle(got.u, u[:, 0]) <= 2 * tol)
    assert got.v[got.v.abs().argmax()] > 0 and got.u.dtype == got.v.dtype == torch.float32
    assert got.u.shape == u[:, 0].shape and got.v.shape == v[:, 0].shape
    if got.passes == plain.passes:
        assert abs(got.gap - plain.gap) < 1e-4 and abs(got.residual - plain.residual) < 1e-4


@pytest.mark.parametrize("tiling", [Tiling(), SMALL], ids=["registers", "long"])
def test_several_directions_from_the_same_reads(tiling):
    delta, _ = generated(with_spectrum, 17, 36, 3.0 ** -torch.arange(9))
    pairs = [generated(planted, 2, 3, 3e-3, share=0.6), (delta, torch.zeros_like(delta)), (delta, delta)]
    settings = {"tol": 1e-2, "max_passes": 4, "min_passes": 4, "rank": 6, "seed": 0}
    *found, nothing = grouped.leading_deltas(pairs, [None] * len(pairs), tiling=tiling, **settings)
    for one, pair in zip(found, pairs):
        cases.check_directions(one, *pair, 6)
    assert nothing.update.status == "zero" and nothing.left.shape == (17, 1) and not nothing.right.any()


@pytest.mark.parametrize("tiling", [Tiling(), SMALL], ids=["registers", "long"])
def test_modules_of_different_shapes_in_one_call(tiling):
    shapes = [(1, 1), (1, 19), (19, 1), (2, 3), (17, 36), (9, 16)]
    pairs = [generated(planted, m, n, 3e-3, seed=i, share=0.9) for i, (m, n) in enumerate(shapes)]
    pairs.append((pairs[4][1], pairs[4][1]))
    got = solve(pairs, tiling=tiling, seed=5)
    for update, pair in zip(got[:-1], pairs[:-1]):
        check(update, *pair, seed=5)
    assert got[-1].status == "zero" and not got[-1].v.any() and got[-1].angle_bound == math.pi / 2


@pytest.mark.parametrize(("tiling", "step"), [(Tiling(), 2), (SMALL, 5)], ids=["registers", "long"])
def test_any_mix_of_dtypes_in_one_call(tiling, step):
    mixes = list(itertools.product(DTYPES, DTYPES))[::step]
    wide = [generated(planted, 9, 32, 1e-2, seed=i, dtype=torch.float32, share=0.99) for i in range(len(mixes))]
    pairs = [(w.to(types[0]), b.to(types[1])) for types, (w, b) in zip(mixes, wide)]
    for update, pair in zip(solve(pairs, tiling=tiling, tol=0.1), pairs):
        check(update, *pair, tol=0.1)


def test_views_and_unaligned_rows():
    weight, base = generated(planted, 12, 35, 1e-2, share=0.95)
    (plain,) = solve([(weight, base)])
    both = torch.cat([weight, base], 1)
    for pair in ((both[:, :35], both[:, 35:]), (weight.T.contiguous().T, base)):
        got = rlkernels.top1_delta(*pair, backend="triton")
        assert angle(got.v, plain.v) < 1e-5 and got.passes == plain.passes


def test_warm_starts_good_and_misleading():
    delta, v = generated(with_spectrum, 20, 15, torch.cat([torch.ones(1), torch.linspace(0.5, 0.2, 14)]))
    pair = (delta, torch.zeros_like(delta))
    starts = [None, v[:, 0].float(), v[:, 1].float()]
    cold, warm, misled = solve([pair] * 3, starts)
    assert warm.passes < cold.passes
    for update in (cold, warm, misled):
        assert update.status == "ok" and angle(update.v, v[:, 0]) <= update.angle_bound <= 1e-2
    check(misled, *pair, start=starts[2])


def test_statuses_and_errors():
    cases.check_statuses("triton")
    fine, bad = torch.randn(2, 40, 30)
    bad[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"'b': weight must be finite, got nan at \[3, 4\]"):
        rlkernels.top1_deltas({"a": (fine, fine), "b": (bad, fine)}, backend="triton")


def test_same_seed_same_bits_in_any_company():
    pair, company = generated(planted, 12, 20, 1e-3, share=0.9), generated(planted, 40, 7, 1e-3, share=0.5)
    runs = ([pair], 3), ([company, pair, pair], 3), ([pair], -1)
    one, two, other = (solve(pairs, seed=seed, tiling=SMALL)[-1] for pairs, seed in runs)
    assert torch.equal(one.v, two.v) and torch.equal(one.u, two.u) and one.angle_bound == two.angle_bound
    assert not torch.equal(one.v, other.v) and angle(one.v, other.v) <= one.angle_bound + other.angle_bound


def test_more_passes_than_the_step_holds_are_left_to_the_reference(monkeypatch):
    monkeypatch.setattr(grouped, "MOST_PASSES", 1)
    pair, easy = generated(planted, 12, 20, 1e-3), generated(planted, 1, 3, 1e-3)
    found, wanted = solve([pair, easy], max_passes=3)[0], reference.top1_delta(*pair, max_passes=3)
    assert torch.equal(found.v, wanted.v) and found.passes == wanted.passes == 3


WHOLE = {  # shapes at which the tiles of a GPU are whole, and in part
    "rows": [(66, 4096), (70, 2053), (5, 1021)],  # 64 rows of 4,096 columns, aligned; 1,024 columns are the fewest
    "long": [(214, 5003), (18, 5008)],  # tiles of 16 rows and 256 columns; aligned
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("rows", torch.bfloat16), ("rows", torch.float32), pytest.param("long", torch.float32, marks=pytest.mark.slow)],
    ids=str,
)
def test_reads_at_the_tiles_of_a_gpu(name, dtype):
    pairs = [generated(planted, m, n, 3e-3, seed=m, dtype=dtype) for m, n in WHOLE[name]]
    settings = {"tol": 1e-2, "max_passes": 1, "min_passes": 1, "rank": 1, "seed": 2**62 + 5}
    solver = grouped.Solver(pairs, [None] * len(pairs), **settings, tiling=Tiling())
    solver.start()
    solver.read(0, statistics=True)
    solver.step(reference.BLOCK)
    assert solver.layout.order == list(range(len(pairs)))
    for pair, at, facts in zip(pairs, solver.layout.table.tolist(), solver.facts.tolist()):
        (m, n), column, row = pair[0].shape, at[Module.Q], at[Module.Y]
        block = solver.q[:4, column : column + n]
        y, z = solver.y[:4, row : row + m], solver.z[:4, column : column + n]
        torch.testing.assert_close(block.double() @ block.double().T, torch.eye(4).double(), rtol=0, atol=1e-6)
        start, basis = reference.random_block(n, 4, 2**62 + 5, block.device), block.double().T
        torch.testing.assert_close(basis @ (basis.T @ start), start, rtol=0, atol=1e-6)
        delta = pair[0].double() - pair[1].double()
        exact = delta @ basis, delta.T @ (delta @ basis)
        for mine, plain, gold in zip((y, z), reference.delta_read(*pair, block.T), exact):
            error, allowed = ((t.double() - gold).abs().max() for t in (mine.T, plain))
            assert error <= 2 * allowed + 1e-6 * gold.abs().max(), f"error {error:.3g}, of plain {allowed:.3g}"
        assert math.isclose(facts[Fact.SQUARE], delta.square().sum(), rel_tol=1e-5)
        assert facts[Fact.CHANGED] == delta.count_nonzero()


@triton.jit
def _small_kernel(gram, least, columns, matrices, norms):
    row, column, both = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :], tl.arange(0, 2)
    t = triton_vectors._cholesky(tl.load(gram + row * 4 + column), tl.load(least + tl.arange(0, 4)))
    tl.store(columns + row * 4 + column, t)
    m = tl.load(matrices + both[:, None, None] * 16 + row[None, :, :] * 4 + column[None, :, :])
    tl.store(norms + both, triton_vectors._spectral_norm(m))


@triton.jit
def _diagonalise_kernel(gram, ritz, values, k, stride, KP: tl.constexpr):
    tl.store(values + tl.arange(0, KP), triton_vectors._diagonalise(gram, ritz, k, stride, KP))


def test_small_matrices_like_the_reference():
    g = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        block, rest = torch.randn(9, 4, generator=g).double(), torch.randn(7, 4, generator=g).double()
    t, norms = torch.empty(4, 4).double(), torch.empty(2).double()
    block, rest = block.to(t), rest.to(t)
    block[:, 2] = block[:, 0] - 2 * block[:, 1]
    matrices = torch.stack([rest.T @ rest, torch.zeros(4, 4).double()])
    _small_kernel[(1,)](block.T @ block, 1e-5 * block.norm(dim=0), t, matrices, norms)
    kept = (block @ t)[:, [0, 1, 3]]
    # of Cholesky QR of 9 x 4 entries (Yamamoto et al. 2015, theorem 3.1)
    bound = 8 * (9 * 4 + 4 * 5) * 2**-53 * float(torch.linalg.cond(block[:, [0, 1, 3]])) ** 2
    torch.testing.assert_close(kept.T @ kept, torch.eye(3).to(kept), rtol=0, atol=bound)
    assert not t[:, 2].any()
    exact_norm = torch.linalg.matrix_norm(matrices[0], 2)
    assert exact_norm <= norms[0] <= 1.19 * exact_norm and norms[1] == 0


@pytest.mark.parametrize("k", [4, 12, 20])
def test_eigenvalues_like_the_library(k):
    """Of a matrix with a zero row, equal eigenvalues and a small one, inside a larger one.

    Rotations end once they see no entry of more than ``limit``; those among equal eigenvalues mix what is left. So a
    column of the residual is as long as what is left of it, and eigenvalues are off by its norm (Weyl). Each turn
    rounds by at most 4 units of the largest eigenvalue (Higham 2002, lemma 19.7).
    """
    g, padded = torch.Generator().manual_seed(k), max(16, triton.next_power_of_2(k))
    with torch.device("cpu"):
        q = torch.linalg.qr(torch.randn(k - 1, k - 1, generator=g).double()).Q
        matrix = torch.zeros(k, k).double()
        matrix[1:, 1:] = q @ torch.diag(torch.tensor([5.0, 5.0, *([1e-9] * (k - 3))]).double()) @ q.T
    gram, vectors, values = torch.full((k, k + 3), 7.0).double(), torch.zeros(k, k + 3).double(), torch.ones(padded)
    gram[:, :k], vectors[:, :k], values = matrix.to(gram), torch.eye(k), values.double()
    _diagonalise_kernel[(1,)](gram, vectors, values, k, k + 3, KP=padded)
    found, v, matrix = values[:k], vectors[:, :k], matrix.to(gram)
    limit = triton_vectors.SMALL.value * matrix.trace().item()
    rounding = 4 * triton_vectors.SWEEPS.value * (k - 1) * 2**-53  # relative
    left = gram[:, :k] - torch.diag(found)
    assert left.norm() <= k * limit
    torch.testing.assert_close(v.T @ v, torch.eye(k).double(), rtol=0, atol=2 * rounding)
    assert ((matrix @ v - v * found).norm(dim=0) <= left.norm(dim=0) + 5 * rounding).all()
    atol = float(left.norm()) + 5 * rounding
    torch.testing.assert_close(found.sort().values, torch.linalg.eigvalsh(matrix), rtol=0, atol=atol)
    assert not values[k:].any() and (gram[:, k:] == 7).all()


@pytest.mark.parametrize("shape", [(1, 1), (5, 1023), (33, 70), (6, 2053)])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)])
def test_delta_matvec(shape, dtypes):
    weight, base = generated(planted, *shape, 1e-2, dtype=torch.float32)
    cases.check_matvec("triton", weight.to(dtypes[0]), base.to(dtypes[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_add_rank1(dtype, stochastic):
    storage = torch.randn(11, 145).to(dtype)
    before = storage.clone()
    equal = 0.95 if dtype == torch.float32 else 0.99
    cases.check_add_rank1("triton", dtype, stochastic, storage[2:, 3:140], equal)
    assert torch.equal(storage[:, 140:], before[:, 140:]) and torch.equal(storage[:, :3], before[:, :3])


def test_add_rank1_takes_parts_of_the_weight_and_counts_as_a_change():
    cases.check_in_place("triton")
