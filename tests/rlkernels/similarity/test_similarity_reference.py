"""The conventions of the similarity ops, checked on the pure-torch reference against other formulations."""

import math

import pytest
import torch
from scipy import stats
from support import Launches, assert_equal

from rlkernels import Trajectories, dtw, dtw_topk, rhyme_similarity, rhyme_topk, soft_dtw, state_similarity
from rlkernels.similarity import reference

NAN = math.nan
INF = math.inf


def integers(*shape, high=5):
    """Return whole numbers: every order of additions gives the same sum, so ties are exact."""
    return torch.randint(0, high, shape).float()


def brute_dtw(x, y, band=None):
    """Return the cost of one pair of non-empty trajectories [L] or [L, D], cell by cell in Python floats."""
    squares = (x.view(len(x), 1, -1) - y.view(len(y), -1)).square().sum(-1).tolist()
    radius = math.inf if band is None else max(band, abs(len(x) - len(y)))
    cells = {}
    for i in range(len(x)):
        for j in range(len(y)):
            if abs(i - j) > radius:
                continue
            predecessors = [cells.get((i - 1, j), math.inf), cells.get((i, j - 1), math.inf)]
            predecessors.append(cells.get((i - 1, j - 1), 0.0 if i == j == 0 else math.inf))
            cells[i, j] = squares[i][j] + min(predecessors)
    return cells[len(x) - 1, len(y) - 1]


def brute_subsequence(x, y):
    """Return (cost, start, end) over all stretches of y: lowest cost, then lowest end, then highest start."""
    stretches = [(brute_dtw(x, y[s : e + 1]), e, -s) for s in range(len(y)) for e in range(s, len(y))]
    cost, end, start = min(stretches)
    return cost, -start, end


@pytest.mark.parametrize("band", [None, 0, 1, 3])
@pytest.mark.parametrize("features", [None, 3])
def test_dtw_equals_the_recurrence(band, features):
    x = integers(3, 6, *([features] if features else []))
    y = integers(4, 9, *([features] if features else []))
    x_lengths = torch.tensor([6, 1, 4])
    y_lengths = torch.tensor([9, 1, 5, 4])
    cost = dtw(x, y, x_lengths=x_lengths, y_lengths=y_lengths, band=band, backend="torch")
    expected = [[brute_dtw(a[:m], b[:n], band) for b, n in zip(y, y_lengths)] for a, m in zip(x, x_lengths)]
    assert cost.dtype == torch.float32 and cost.tolist() == expected


def test_subsequence_equals_trying_every_stretch():
    x = integers(8, 4, high=3)
    y = integers(8, 9, high=3)
    x_lengths = torch.tensor([4, 1, 2, 3, 4, 4, 1, 4])
    y_lengths = torch.tensor([9, 1, 2, 8, 9, 9, 5, 3])
    cost, start, end = dtw(x, y, x_lengths=x_lengths, y_lengths=y_lengths, mode="subsequence", backend="torch")
    assert start.dtype == end.dtype == torch.int64
    for i, m in enumerate(x_lengths):
        for j, n in enumerate(y_lengths):
            expected = brute_subsequence(x[i, :m], y[j, :n])
            assert (cost[i, j].item(), start[i, j].item(), end[i, j].item()) == expected, (i, j)


@pytest.mark.parametrize("mode", ["full", "subsequence"])
def test_empty_nan_and_infinity(mode):
    x = torch.tensor([[1.0, 2.0], [1.0, NAN], [1.0, INF], [NAN, NAN], [1.0, NAN]])
    lengths = torch.tensor([2, 2, 2, 0, 1])
    result = dtw(x, x, x_lengths=lengths, y_lengths=lengths, mode=mode, backend="torch")
    cost = result if mode == "full" else result[0]
    bad = torch.zeros(5, 5, dtype=torch.bool)
    bad[[1, 2]] = True
    bad[:, [1, 2]] = True
    assert torch.equal(cost.isnan(), bad)
    assert cost[3].tolist()[3] == 0 and cost[3, 0] == cost[0, 3] == cost[3, 4] == INF
    assert cost[0, 0] == 0 and cost[0, 4] == 1 and cost[4, 4] == 0
    if mode == "subsequence":
        nowhere = bad | (lengths == 0)[:, None] | (lengths == 0)
        assert torch.equal(result[1] == -1, nowhere) and torch.equal(result[2] == -1, nowhere)


@pytest.mark.parametrize(
    ("n", "m", "rows", "columns"), [(0, 3, 4, 4), (3, 0, 4, 4), (0, 0, 0, 0), (2, 2, 0, 0), (2, 2, 0, 3)]
)
def test_empty_shapes(n, m, rows, columns):
    cost = dtw(torch.ones(n, rows), torch.ones(m, columns), backend="torch")
    assert cost.tolist() == [[0.0 if rows == columns else INF] * m] * n
    assert all(t.shape == (n, m) for t in dtw(torch.ones(n, rows), torch.ones(m, columns), mode="subsequence"))
    assert [t.shape for t in dtw_topk(torch.ones(n, rows), torch.ones(m, columns), m)] == [(n, m)] * 2


def test_topk_ties_and_nan():
    x = torch.zeros(1, 1)
    y = torch.tensor([[2.0], [1.0], [NAN], [1.0], [0.0], [INF], [-1.0], [0.0]])
    cost, index = dtw_topk(x, y, 8, y_lengths=torch.tensor([1, 1, 1, 1, 1, 1, 1, 0]), backend="torch")
    assert index.tolist() == [[4, 1, 3, 6, 0, 7, 2, 5]]
    assert cost[0, :6].tolist() == [0, 1, 1, 1, 4, INF] and cost[0, 6:].isnan().all()


def test_sliced_wasserstein_equals_a_sum_over_directions():
    x = torch.randn(3, 17, 4)
    y = torch.randn(5, 17, 4) * 2 + 1
    similarity = state_similarity(x, y, scale=2.0, projections=50, seed=3)
    directions = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    directions /= directions.norm(dim=0)
    for i in range(3):
        for j in range(5):
            a, b = ((t.double() @ directions).sort(0).values for t in (x[i], y[j]))
            distance = (a - b).square().mean().sqrt()
            assert math.isclose(similarity[i, j].item(), math.exp(-distance / 2), rel_tol=1e-6)
    # in one dimension every direction is +-1, and scipy knows the answer up to the order
    a = torch.rand(1, 40, 1)
    b = torch.rand(1, 40, 1) + 2
    exact = stats.wasserstein_distance(a.flatten().numpy(), b.flatten().numpy())
    assert -math.log(state_similarity(a, b).item()) >= exact * (1 - 1e-6)


def test_hellinger_and_cosine():
    p = torch.tensor([[2.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [1, 1, 2], [0, 0, 0]])
    half = 1 - math.sqrt(1 - 2 * math.sqrt(0.5 * 0.25))
    expected = torch.tensor([[0.0, 1.0, half, 0.0], [0.0, 0.0, 0.0, 1.0]])
    torch.testing.assert_close(state_similarity(p, q, metric="hellinger"), expected)
    u = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    v = torch.tensor([[0.0, 2.0], [5.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    expected = torch.tensor([[0.5, 1.0, 0.0, 0.5], [0.5, 0.5, 0.5, 1.0]])
    torch.testing.assert_close(state_similarity(u, v, metric="cosine"), expected)


@pytest.mark.parametrize(
    ("metric", "shape"), [("sliced_wasserstein", (6, 9, 3)), ("hellinger", (6, 9)), ("cosine", (6, 9))]
)
def test_state_similarity_of_itself_is_one_and_nan_stays_in_its_row(metric, shape):
    x = torch.rand(shape) + 1000
    x[2] = NAN
    similarity = state_similarity(x, x, metric=metric)
    good = [0, 1, 3, 4, 5]
    torch.testing.assert_close(similarity[good][:, good].diagonal(), torch.ones(5), rtol=0, atol=1e-5)
    assert similarity[2].isnan().all() and similarity[:, 2].isnan().all() and similarity[good][:, good].isfinite().all()
    assert state_similarity(x[:0], x, metric=metric).shape == (0, 6)
    assert state_similarity(x, x[:0], metric=metric).shape == (6, 0)


@pytest.mark.parametrize("diverged", [1e8, 1e9, 1e20, 1e300])
def test_a_diverged_run_leaves_the_others_similarities_alone(diverged):
    """The Wasserstein distance of equal samples in one dimension is that of their values."""
    value = torch.tensor([0.0] * 10 + [0.5] * 9 + [diverged] * 2, dtype=torch.float64)
    states = value[:, None, None].expand(-1, 7, 1)
    expected = torch.exp(-(value[:, None] - value).abs() / 2).float()
    torch.testing.assert_close(state_similarity(states, states, scale=2.0), expected)
    runs = Trajectories(value.clamp(0, 1)[:, None].expand(-1, 5), states)
    score, index = rhyme_topk(runs, runs, k=10)
    assert index[0].tolist() == list(range(10)) and score[0].tolist() == [1.0] * 10
    assert index[10, :9].tolist() == list(range(10, 19)) and score[10, :9].tolist() == [1.0] * 9


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e-30, 1e20, 1e155, 1e300])
@pytest.mark.parametrize("unit", [1.0, 1e-9])
def test_directions_and_shares_do_not_depend_on_magnitude(size, unit):
    x = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64) * size
    y = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64) * unit
    cosine = [[(1 + 0.5**0.5) / 2, 1], [0.5, 0.5]]
    hellinger = [[1 - (1 - 0.5**0.5) ** 0.5, 1], [0, 0]]
    for metric, expected in (("cosine", cosine), ("hellinger", hellinger)):
        torch.testing.assert_close(state_similarity(x, y, metric=metric), torch.tensor(expected, dtype=torch.float32))


def test_infinite_samples_are_similar_to_nothing():
    x = torch.ones(3, 4, 2)
    x[1, 0, 0] = INF
    x[2, 1, 1] = -INF
    for metric, states in (("sliced_wasserstein", x), ("cosine", x[:, 0] + x[:, 1]), ("hellinger", x[:2, 0])):
        bad = ~states.flatten(1).isfinite().all(1)
        assert torch.equal(state_similarity(states, states, metric=metric).isnan(), bad[:, None] | bad)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_any_reward_scale(scale):
    """Two curves that are apart by the scale throughout score 1/e."""
    step = scale if scale in (1e-3, 1.0) else 0.0  # others leave float32 when they are squared
    curves = Trajectories(torch.tensor([[0.0] * 4, [step] * 4, [0.5] * 4]))
    score = rhyme_similarity(curves, curves, reward_weight=1, reward_scale=scale)
    far = [math.exp(-((a / scale) ** 2)) if a / scale < 20 else 0.0 for a in (step, 0.5, 0.5 - step)]
    expected = torch.tensor([[1, far[0], far[1]], [far[0], 1, far[2]], [far[1], far[2], 1]])
    torch.testing.assert_close(score, expected)


def with_largest(call):
    """Return the results of a call, and the elements of the largest tensor computed, apart from those results."""
    with Launches() as launches:
        results = call()
    return results, max(shape.numel() for name, shape in launches.results if name not in ("new_empty", "empty"))


def blocked_calls():
    x = integers(19, 6, 2, high=3)
    y = integers(23, 9, 2, high=3)
    x[3, 2] = NAN
    y[5] = y[4]
    lengths = {"x_lengths": torch.arange(19) % 7, "y_lengths": torch.arange(23) % 10}
    query, bank = (Trajectories(t[..., 0], t.nan_to_num().abs(), v) for t, v in zip((x, y), lengths.values()))
    bank = Trajectories(bank.rewards, bank.states[:, :6], bank.lengths)
    single = Trajectories(query.rewards[:1], query.states[:1])
    options = {"backend": "torch", "projections": 4}
    return {
        "dtw": lambda: dtw(x, y, **lengths, band=2, backend="torch"),
        "subsequence": lambda: dtw(x, y, **lengths, mode="subsequence", backend="torch"),
        "subsequence of a long y": lambda: dtw(x[:, :1], y, mode="subsequence", backend="torch"),
        "dtw_topk": lambda: dtw_topk(x, y, 5, **lengths, backend="torch"),
        "dtw_topk of one": lambda: dtw_topk(x[:1], y, 22, backend="torch"),
        "dtw_topk of none": lambda: dtw_topk(x, y, 0, backend="torch"),
        "sliced_wasserstein": lambda: state_similarity(query.states, bank.states, projections=4),
        "hellinger": lambda: state_similarity(query.states[:, 0], bank.states[:, 0], metric="hellinger"),
        "cosine": lambda: state_similarity(query.states[:, 1], bank.states[:, 1], metric="cosine"),
        "rhyme_similarity": lambda: rhyme_similarity(query, bank, **options),
        "rhyme_topk": lambda: rhyme_topk(query, bank, k=5, **options),
        "rhyme_topk of one": lambda: rhyme_topk(single, bank, k=22, **options),
    }


@pytest.mark.parametrize("name", blocked_calls())
def test_blocks_change_no_value_and_bound_the_memory(name, monkeypatch):
    torch.manual_seed(1)
    call = blocked_calls()[name]
    expected, largest = with_largest(call)
    inputs = 23 * 9 * 2  # of the largest, whose padding a copy blanks
    assert largest > inputs or name.endswith(("of a long y", "of one", "of none"))
    monkeypatch.setattr(reference, "BLOCK_PAIRS", 20)
    monkeypatch.setattr(reference, "BLOCK_FLOATS", 300)
    results, largest = with_largest(call)
    assert_equal(results, expected, equal_nan=True)
    assert largest <= inputs < 19 * 23


def curves(n, steps, states):
    return Trajectories(torch.rand(n, steps), torch.rand(n, *states), torch.randint(1, steps + 1, (n,)))


@pytest.mark.parametrize(("states", "metric"), [((10, 2), "sliced_wasserstein"), ((7,), "hellinger")])
def test_rhyme_similarity_is_its_formula(states, metric):
    query = curves(3, 8, states)
    bank = curves(5, 11, states)
    similarity = rhyme_similarity(query, bank, reward_weight=0.3, reward_scale=0.4, band=2)
    state = state_similarity(query.states, bank.states, metric=metric)
    for i in range(3):
        for j in range(5):
            a = query.rewards[i, : query.lengths[i]].double()
            b = bank.rewards[j, : bank.lengths[j]].double()
            reward = math.exp(-brute_dtw(a, b, 2) / ((len(a) + len(b)) / 2 * 0.16))
            assert math.isclose(similarity[i, j].item(), 0.3 * reward + 0.7 * state[i, j].item(), rel_tol=1e-5)


def test_rhyme_of_rewards_alone_and_of_empty_curves():
    query = Trajectories(torch.tensor([[0.5, NAN], [NAN, NAN]]), None, torch.tensor([1, 0]))
    assert rhyme_similarity(query, query, reward_weight=1).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    with pytest.raises(ValueError, match="must be given unless reward_weight is 1"):
        rhyme_similarity(query, query)


@pytest.mark.parametrize(
    ("fraction", "size", "k"), [(0.2, 15, 3), (0.2, 16, 4), (0.07, 100, 7), (1e-9, 4, 1), (1, 4, 4), (0.2, 0, 0)]
)
def test_rhyme_topk_takes_the_ceiling(fraction, size, k):
    query = Trajectories(integers(2, 1, high=3))
    bank = Trajectories(integers(size, 1, high=3))  # ties
    score, index = rhyme_topk(query, bank, fraction=fraction, reward_weight=1)
    assert score.shape == index.shape == (2, k)
    dense = rhyme_similarity(query, bank, reward_weight=1).sort(dim=1, descending=True, stable=True)
    assert torch.equal(score, dense.values[:, :k]) and torch.equal(index, dense.indices[:, :k])


ONE = torch.ones(2, 3)
ALL = Trajectories(ONE)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: dtw([1.0], ONE), TypeError, "x must be a torch.Tensor, got list"),
    (lambda: dtw(ONE.long(), ONE), TypeError, "x must have dtype .* got torch.int64"),
    (lambda: dtw(ONE[0], ONE), ValueError, r"x must have 2 or 3 dimensions, got shape \(3,\)"),
    (lambda: dtw(ONE, ONE[..., None]), ValueError, "y must have as many dimensions as x"),
    (lambda: dtw(ONE[..., None], torch.ones(2, 3, 2)), ValueError, r"y must have shape \[any, any, 1\]"),
    (lambda: dtw(ONE, ONE, band=-1), ValueError, "band must be >= 0, got -1"),
    (lambda: dtw(ONE, ONE, mode="open"), ValueError, "mode must be one of 'full', 'subsequence'"),
    (lambda: dtw(ONE, ONE, band=2, mode="subsequence"), ValueError, "band must be None with mode"),
    (lambda: dtw(ONE, ONE, x_lengths=torch.tensor([1])), ValueError, r"x_lengths must have shape \[2\]"),
    (lambda: dtw(ONE, ONE, x_lengths=torch.tensor([1, 4])), ValueError, "x_lengths must lie between 0 and 3"),
    (lambda: dtw_topk(ONE, ONE, 1, y_lengths=torch.tensor([-1, 3])), ValueError, "y_lengths must lie between 0"),
    (lambda: dtw(ONE, ONE, y_lengths=ONE[:, 0]), TypeError, "y_lengths must have dtype"),
    (lambda: dtw(ONE, ONE, backend="gpu"), ValueError, "backend must be one of"),
    (lambda: dtw_topk(ONE, ONE, 3), ValueError, "k must be between 0 and 2, got 3"),
    (lambda: dtw_topk(ONE, ONE, True), TypeError, "k must be an integer, got True"),
    (lambda: soft_dtw(ONE, ONE, gamma=0), ValueError, "gamma must be > 0, got 0"),
    (lambda: soft_dtw(ONE, ONE[:1]), ValueError, r"y must have shape \[2, any\], got \[1, 3\]"),
    (lambda: state_similarity(ONE, ONE), ValueError, "x must have 3 dimensions"),
    (lambda: state_similarity(ONE, ONE, metric="l2"), ValueError, "metric must be one of"),
    (lambda: state_similarity(-ONE, ONE, metric="hellinger"), ValueError, "x must hold histograms >= 0, got -1"),
    (lambda: state_similarity(ONE, ONE, metric="cosine", scale=0), ValueError, "scale must be > 0"),
    (lambda: Trajectories(ONE, -ONE), ValueError, "states must hold histograms >= 0, got -"),
    (lambda: dtw(ONE.clone().requires_grad_(), ONE), ValueError, "x must not require grad.*soft_dtw"),
    (lambda: dtw_topk(ONE, ONE.clone().requires_grad_(), 1), ValueError, "y must not require .*detach"),
    (lambda: state_similarity(ONE[..., None], ONE[..., None], seed=2**70), ValueError, "seed must be between"),
    (lambda: state_similarity(ONE, ONE.clone().requires_grad_(), metric="cosine"), ValueError, "y must not require gr"),
    (lambda: Trajectories(ONE.clone().requires_grad_()), ValueError, r"rewards must not .* rewards\.detach"),
    (lambda: Trajectories(ONE, ONE.clone().requires_grad_()), ValueError, "states must not require gradients"),
    (lambda: Trajectories(ONE[0]), ValueError, "rewards must have 2 dimensions"),
    (lambda: Trajectories(ONE, ONE[:1]), ValueError, r"states must have shape \[2, any\]"),
    (lambda: Trajectories(ONE, None, torch.tensor([9, 1])), ValueError, "lengths must lie between 0 and 3"),
    (lambda: rhyme_similarity(ONE, ONE), TypeError, "query must be Trajectories, got Tensor"),
    (lambda: rhyme_similarity(ALL, ALL, reward_weight=2), ValueError, "reward_weight must be between 0 and 1"),
    (lambda: rhyme_topk(ALL, ALL, fraction=0), ValueError, "fraction must be > 0, got 0"),
    (lambda: rhyme_topk(ALL, ALL, k=5), ValueError, "k must be between 0 and 2, got 5"),
])  # fmt: skip
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
