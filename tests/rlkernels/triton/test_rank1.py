"""Rank-1 kernels in Triton against the reference and float64; ``SMALL`` cuts small matrices up as if they were big."""

import itertools
import math

import pytest
import rank1_cases as cases
import torch
import triton
import triton.language as tl
from accuracy import assert_as_plain
from rank1_cases import angle, exact, planted, with_spectrum
from support import assert_equal

import rlkernels
from rlkernels.rank1 import grouped, reference, triton_vectors
from rlkernels.rank1.layout import Tiling
from rlkernels.rank1.triton_kernels import Module
from rlkernels.rank1.triton_vectors import Fact

# Rows of more than 8 columns are too long for one program: tiles of 8 rows and 32 columns, at most four slots
SMALL = Tiling(max_register_columns=8, slots=4, min_slot_rows=8, rows=8, columns=32, programs=8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def generated(make, *args, **options):
    """Make inputs with CPU generators, and move them to the default device."""
    with torch.device("cpu"):
        out = make(*args, **options)
    return tuple(t.to(torch.empty(0).device) for t in out)


def solve(pairs, starts=None, tiling=None, tol=1e-2, max_passes=12, seed=0):
    settings = {"tol": tol, "max_passes": max_passes, "min_passes": 1, "rank": 1, "seed": seed}
    deltas = grouped.solve(pairs, starts or [None] * len(pairs), tiling=tiling, **settings)
    return [delta.update for delta in deltas]


def check(update, weight, base, tol=1e-2, **options):
    """Compare an update with the reference in passes, status and certificate, and with float64 in its direction."""
    plain = reference.solve_delta(weight, base, tol=tol, **options).update
    u, s, v = exact(weight, base)
    assert (update.status, update.changed) == (plain.status, plain.changed)
    assert abs(update.passes - plain.passes) <= 1
    assert math.isclose(update.sigma, s[0].item(), rel_tol=max(1e-4, tol**2))
    assert math.isclose(update.frobenius, plain.frobenius, rel_tol=1e-5)
    assert angle(update.v, v[:, 0]) <= update.angle_bound
    assert update.status != "ok" or (update.angle_bound <= tol and angle(update.u, u[:, 0]) <= 2 * tol)
    assert update.v[update.v.abs().argmax()] > 0 and update.u.dtype == update.v.dtype == torch.float32
    assert update.u.shape == u[:, 0].shape and update.v.shape == v[:, 0].shape
    if update.passes == plain.passes:
        assert abs(update.gap - plain.gap) < 1e-4 and abs(update.residual - plain.residual) < 1e-4


@pytest.mark.parametrize("tiling", [Tiling(), SMALL], ids=["registers", "long"])
def test_several_directions_from_the_same_reads(tiling):
    delta, _ = generated(with_spectrum, 17, 36, 3.0 ** -torch.arange(9))
    pairs = [generated(planted, 2, 3, 3e-3, share=0.6), (delta, torch.zeros_like(delta)), (delta, delta)]
    settings = {"tol": 1e-2, "max_passes": 4, "min_passes": 4, "rank": 6, "seed": 0}
    *deltas, zero_delta = grouped.solve(pairs, [None] * len(pairs), tiling=tiling, **settings)
    for result, pair in zip(deltas, pairs):
        cases.check_directions(result, *pair, 6)
    assert zero_delta.update.status == "zero" and zero_delta.left.shape == (17, 1) and not zero_delta.right.any()


@pytest.mark.parametrize("tiling", [Tiling(), SMALL], ids=["registers", "long"])
def test_modules_of_different_shapes_in_one_call(tiling):
    shapes = [(1, 1), (1, 19), (19, 1), (2, 3), (17, 36), (9, 16)]
    pairs = [generated(planted, m, n, 3e-3, seed=i, share=0.9) for i, (m, n) in enumerate(shapes)]
    pairs.append((pairs[4][1], pairs[4][1]))
    updates = solve(pairs, tiling=tiling, seed=5)
    for update, pair in zip(updates[:-1], pairs[:-1]):
        check(update, *pair, seed=5)
    assert updates[-1].status == "zero" and not updates[-1].v.any() and updates[-1].angle_bound == math.pi / 2


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
    joined = torch.cat([weight, base], 1)
    for pair in ((joined[:, :35], joined[:, 35:]), (weight.T.contiguous().T, base)):
        update = rlkernels.top1_delta(*pair, backend="triton")
        assert angle(update.v, plain.v) < 1e-5 and update.passes == plain.passes


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
    pair = generated(planted, 12, 20, 1e-3, share=0.9)
    company = generated(planted, 40, 7, 1e-3, share=0.5)
    runs = ([pair], 3), ([company, pair, pair], 3), ([pair], -1)
    single, in_company, other_seed = (solve(pairs, seed=seed, tiling=SMALL)[-1] for pairs, seed in runs)
    assert_equal((in_company.u, in_company.v), (single.u, single.v))
    assert in_company.angle_bound == single.angle_bound
    assert (
        not torch.equal(single.v, other_seed.v)
        and angle(single.v, other_seed.v) <= single.angle_bound + other_seed.angle_bound
    )


def test_more_passes_than_the_step_holds_are_left_to_the_reference(monkeypatch):
    monkeypatch.setattr(grouped, "MOST_PASSES", 1)
    pair = generated(planted, 12, 20, 1e-3)
    easy = generated(planted, 1, 3, 1e-3)
    update = solve([pair, easy], max_passes=3)[0]
    expected = reference.solve_delta(*pair, max_passes=3).update
    assert torch.equal(update.v, expected.v) and update.passes == expected.passes == 3


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
    solver.step(reference.KRYLOV_COLUMNS)
    assert solver.layout.order == list(range(len(pairs)))
    for pair, position, facts in zip(pairs, solver.layout.table.tolist(), solver.facts.tolist()):
        (m, n) = pair[0].shape
        column = position[Module.Q]
        row = position[Module.Y]
        block = solver.q[:4, column : column + n]
        y = solver.y[:4, row : row + m]
        z = solver.z[:4, column : column + n]
        torch.testing.assert_close(block.double() @ block.double().T, torch.eye(4).double(), rtol=0, atol=1e-6)
        start = reference.random_block(n, 4, 2**62 + 5, block.device)
        basis = block.double().T
        torch.testing.assert_close(basis @ (basis.T @ start), start, rtol=0, atol=1e-6)
        delta = pair[0].double() - pair[1].double()
        exact = delta @ basis, delta.T @ (delta @ basis)
        assert_as_plain([y.T, z.T], reference.delta_read(*pair, block.T), exact, floor=0, relative=1e-6)
        assert math.isclose(facts[Fact.SQUARE], delta.square().sum(), rel_tol=1e-5)
        assert facts[Fact.CHANGED] == delta.count_nonzero()


@triton.jit
def _small_kernel(gram, least, columns, matrices, norms):
    row, column, index = tl.arange(0, 4)[:, None], tl.arange(0, 4)[None, :], tl.arange(0, 2)
    t = triton_vectors._cholesky(tl.load(gram + row * 4 + column), tl.load(least + tl.arange(0, 4)))
    tl.store(columns + row * 4 + column, t)
    m = tl.load(matrices + index[:, None, None] * 16 + row[None, :, :] * 4 + column[None, :, :])
    tl.store(norms + index, triton_vectors._spectral_norm(m))


@triton.jit
def _diagonalise_kernel(gram, ritz, values, k, stride, KP: tl.constexpr):
    tl.store(values + tl.arange(0, KP), triton_vectors._diagonalise(gram, ritz, k, stride, KP))


def test_small_matrices_like_the_reference():
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        block = torch.randn(9, 4, generator=generator).double()
        other_block = torch.randn(7, 4, generator=generator).double()
    t = torch.empty(4, 4).double()
    norms = torch.empty(2).double()
    block = block.to(t)
    other_block = other_block.to(t)
    block[:, 2] = block[:, 0] - 2 * block[:, 1]
    matrices = torch.stack([other_block.T @ other_block, torch.zeros(4, 4).double()])
    _small_kernel[(1,)](block.T @ block, 1e-5 * block.norm(dim=0), t, matrices, norms)
    orthonormal = (block @ t)[:, [0, 1, 3]]
    # of Cholesky QR of 9 x 4 entries (Yamamoto et al. 2015, theorem 3.1)
    bound = 8 * (9 * 4 + 4 * 5) * 2**-53 * float(torch.linalg.cond(block[:, [0, 1, 3]])) ** 2
    torch.testing.assert_close(orthonormal.T @ orthonormal, torch.eye(3).to(orthonormal), rtol=0, atol=bound)
    assert not t[:, 2].any()
    exact_norm = torch.linalg.matrix_norm(matrices[0], 2)
    assert exact_norm <= norms[0] <= 1.19 * exact_norm and norms[1] == 0


@pytest.mark.parametrize("k", [4, 12, 20])
def test_eigenvalues_like_the_library(k):
    """Check a matrix with a zero row, equal eigenvalues and a small one, inside a larger one.

    Rotations end once they see no entry of more than ``limit``; those among equal eigenvalues mix what is left. So a
    column of the residual is as long as what is left of it, and eigenvalues are off by its norm (Weyl). Each turn
    rounds by at most 4 units of the largest eigenvalue (Higham 2002, lemma 19.7).
    """
    generator = torch.Generator().manual_seed(k)
    padded = max(16, triton.next_power_of_2(k))
    with torch.device("cpu"):
        q = torch.linalg.qr(torch.randn(k - 1, k - 1, generator=generator).double()).Q
        matrix = torch.zeros(k, k).double()
        matrix[1:, 1:] = q @ torch.diag(torch.tensor([5.0, 5.0, *([1e-9] * (k - 3))]).double()) @ q.T
    gram = torch.full((k, k + 3), 7.0).double()
    vectors = torch.zeros(k, k + 3).double()
    values = torch.ones(padded)
    gram[:, :k] = matrix.to(gram)
    vectors[:, :k] = torch.eye(k)
    values = values.double()
    _diagonalise_kernel[(1,)](gram, vectors, values, k, k + 3, KP=padded)
    eigenvalues = values[:k]
    eigenvectors = vectors[:, :k]
    matrix = matrix.to(gram)
    limit = triton_vectors.NEGLIGIBLE.value * matrix.trace().item()
    rounding = 4 * triton_vectors.SWEEPS.value * (k - 1) * 2**-53  # relative
    off_diagonal = gram[:, :k] - torch.diag(eigenvalues)
    assert off_diagonal.norm() <= k * limit
    torch.testing.assert_close(eigenvectors.T @ eigenvectors, torch.eye(k).double(), rtol=0, atol=2 * rounding)
    assert (
        (matrix @ eigenvectors - eigenvectors * eigenvalues).norm(dim=0) <= off_diagonal.norm(dim=0) + 5 * rounding
    ).all()
    atol = float(off_diagonal.norm()) + 5 * rounding
    torch.testing.assert_close(eigenvalues.sort().values, torch.linalg.eigvalsh(matrix), rtol=0, atol=atol)
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
    original = storage.clone()
    equal = 0.95 if dtype == torch.float32 else 0.99
    cases.check_add_rank1("triton", dtype, stochastic, storage[2:, 3:140], equal)
    assert torch.equal(storage[:, 140:], original[:, 140:]) and torch.equal(storage[:, :3], original[:, :3])


def test_add_rank1_takes_parts_of_the_weight_and_counts_as_a_change():
    cases.check_in_place("triton")


@pytest.mark.parametrize("stochastic", [False, True])
def test_add_rank1_runs_the_named_kernel_on_any_view(stochastic, monkeypatch):
    cases.check_any_view("triton", stochastic, monkeypatch)


def test_extreme_values_take_no_further_step():
    cases.check_extremes("triton", 1e-20)
