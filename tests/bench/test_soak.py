"""Soak: the comparisons see what they are for."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bench.soak import __main__ as soak
from bench.soak import operations
from rlkernels.history.reference import History


def test_the_history_equals_its_model(compiled):
    totals: dict[str, int] = {}
    operations.run_pair(lambda rng: operations.HistoryPair(rng.choice([100, 400])), "0", 3000, totals)
    assert totals["draft tokens"] > 100 and totals["evictions"] > 10


def test_a_history_that_is_not_its_model_is_named(compiled, monkeypatch):
    full_draft = History.draft
    monkeypatch.setattr(History, "draft", lambda *arguments: full_draft(*arguments)[:-1])
    row = operations.run_history(SimpleNamespace(operations=500, seed=0))
    assert row["operations"] == 0 and "AssertionError: ('draft'" in row["problems"][0]


def test_growth_is_the_slope_and_its_interval():
    rng = np.random.default_rng(0)
    steps = range(4000)
    noise = rng.normal(0, 1e5, len(steps))
    for expected in (0.0, 300.0):
        slope, low, high = soak.growth([3e8 + expected * step + noise_bytes for step, noise_bytes in zip(steps, noise)])
        assert low < expected < high and high - low < 30 and low < slope < high  # noise of 1.4 a step: 95 % are 5.4


def test_too_few_steps_for_a_slope_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.soak", "memory", "--steps", "49"])
    monkeypatch.setitem(soak.PARTS, "memory", lambda args: pytest.fail("it trains"))
    with pytest.raises(SystemExit):
        soak.main()
    assert "--steps must be at least 50, got 49" in capsys.readouterr().err
    assert np.isfinite(soak.growth([*range(soak.MIN_STEPS)][int(soak.WARM_UP * soak.MIN_STEPS) :])).all()


@pytest.mark.slow
def test_memory_of_a_run(monkeypatch):
    monkeypatch.setattr(soak, "BLOCKS", 3)
    row = soak.run_memory(SimpleNamespace(steps=4))
    assert row["what"] == "memory of 4 steps" and "bytes a step" in row["found"]
