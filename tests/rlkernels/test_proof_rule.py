"""The rule that decides whether a backend computes an op, and the cases that it judges."""

import itertools
import math

import pytest
import torch

from rlkernels.proof.cases import attention
from rlkernels.proof.problem import Problem, Tolerance, check
from rlkernels.proof.worker import race, run_timing

CPU = torch.device("cpu")


def gate(exact, plain=None, floor=1e-6):
    return Tolerance(Problem(lambda backend: exact if plain is None else plain, lambda: exact, floor=floor))


def passes(verdict):
    error, allowed = verdict
    return error <= allowed


def test_rule_is_twice_the_error_of_plain_torch():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain, close, far = (torch.tensor([1.0, 2.0 + e]) for e in (0.01, 0.019, 0.021))
    assert passes(gate(exact, plain).judge(close)) and not passes(gate(exact, plain).judge(far))


@pytest.mark.parametrize("ours", [
    torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf]), torch.ones(3), torch.ones(2, dtype=torch.float64),
    (torch.ones(2), torch.ones(2)),
])  # fmt: skip
def test_wrong_values_shapes_and_dtypes_fail(ours):
    assert not passes(gate(torch.ones(2)).judge(ours))


def test_equal_integers_pass_and_others_fail():
    ids = torch.tensor([1, 2, 3])
    judge = gate((ids, torch.ones(1)), floor=1.0)
    assert judge.judge((ids, torch.ones(1))) == (0.0, 0.0) and not passes(judge.judge((ids + 1, torch.ones(1))))


def test_large_outputs_are_compared_piece_by_piece(monkeypatch):
    monkeypatch.setattr("rlkernels.proof.problem.PIECE", 3)
    exact = torch.arange(10.0)
    exact[4], exact[8] = math.nan, math.inf
    assert gate(exact).judge(exact.clone()) == (0.0, pytest.approx(9e-6))
    for place in (0, 5, 9):
        wrong = exact.clone()
        wrong[place] += 0.5
        assert gate(exact).judge(wrong)[0] == 0.5
    assert gate(exact).judge(exact.nan_to_num())[0] == math.inf


def test_a_launcher_that_writes_nothing_fails():
    right = torch.ones(4096)
    for output in (lambda: torch.empty(4096), lambda: torch.empty(4096, dtype=torch.int64)):
        problem = Problem(lambda backend, output=output: right if backend == "torch" else output())
        assert not passes(check(problem, "cuda", CPU)[0])
    state = torch.zeros(4096)
    reset = Problem(
        lambda backend: state.fill_(1) if backend == "torch" else state, reset=lambda: state.fill_(math.nan)
    )
    assert not passes(check(reset, "cuda", CPU)[0])


def test_runs_must_repeat_to_the_bit():
    runs = iter(range(9))
    moving = Problem(lambda backend: torch.full((3,), 1.0 + (backend != "torch") * 1e-7 * next(runs)), floor=1e-3)
    verdict, repeats = check(moving, "cuda", CPU)
    assert passes(verdict) and not repeats
    still = Problem(lambda backend: torch.tensor([math.nan, 1.0]))
    assert check(still, "cuda", CPU)[1]


def test_backends_are_timed_in_turns_and_wrong_ones_are_not():
    order, said = [], []

    def call(backend):
        order.append(backend)
        return torch.ones(2) * (1.5 if backend == "triton" else 1)

    times = race(Problem(call), ["cuda", "torch"], CPU, 0.0)
    assert times.keys() == {"cuda", "torch"} and len(times["cuda"]) == len(times["torch"]) == 3
    switches = sum(a != b for a, b in itertools.pairwise(order))
    assert switches >= 7  # once each to find how often a sample calls, then three rounds
    case = attention.Case("merge_attention", "planted", lambda device: Problem(call), timed=True)
    answer = run_timing(case, ["cuda", "triton"], CPU, 0.0, said.append)
    assert answer["judged"]["cuda"]["right"] and not answer["judged"]["triton"]["right"]
    assert answer["times"].keys() == {"cuda", "torch"}
    assert [message["begin"] for message in said] == ["torch", "cuda", "triton", ""]


def test_caches_hold_nan_wherever_no_kernel_may_read():
    pages = attention.Pages(5, 4, 1, 2, torch.float32, CPU)
    table = pages.table([6, 1])
    key, value = pages.finished()
    assert table.shape == (2, 3) and (table[:, 2] == -1).all() and table[1, 1] == -1
    for cache in (key, value):
        assert cache.isfinite().all(-1).sum() == 7
        assert cache[table[0, 1], 2:].isnan().all()
