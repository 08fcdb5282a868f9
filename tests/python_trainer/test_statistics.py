"""Paired intervals against known values, and the evidence that the gate asks for."""

import math

import numpy
import pytest
from scipy.integrate import quad

from python_trainer.command_line.report import difference_of_runs
from python_trainer.run.directory import EVALUATIONS, append_row, read_evaluations
from rlkernels.extrapolation import Gate
from rlkernels.extrapolation.gate import count_changes, improvement_e_value


def answers(count, rate, seed):
    return (numpy.random.default_rng(seed).random(count) < rate).astype(float)


def test_difference_is_the_mean_and_its_interval_is_as_wide_as_theory_says():
    after = answers(4000, 0.8, 0)
    before = answers(4000, 0.7, 1)
    difference = difference_of_runs([after], [before])
    assert difference.value == pytest.approx(after.mean() - before.mean())
    half_width = 1.96 * (after - before).std() / 4000**0.5
    assert difference.high - difference.value == pytest.approx(half_width, rel=0.05)
    assert difference.value - difference.low == pytest.approx(half_width, rel=0.05)
    assert not difference.low <= 0 <= difference.high
    assert difference == difference_of_runs([after], [before]), "the same seed gives the same interval"


def test_pairing_narrows_the_interval():
    before = answers(2000, 0.5, 0)
    after = before.copy()
    after[:50] = 1
    paired = difference_of_runs([after], [before])
    unpaired = difference_of_runs([after], [numpy.roll(before, 77)])
    assert not paired.low <= 0 <= paired.high
    assert paired.high - paired.low < (unpaired.high - unpaired.low) / 4


def test_equal_answers_are_not_resolved():
    results = answers(100, 0.5, 0)
    difference = difference_of_runs([results], [results])
    assert (difference.value, difference.low, difference.high) == (0, 0, 0)


def test_difference_of_runs_is_about_other_seeds_too():
    before = [answers(4000, 0.5, seed) for seed in range(8)]
    after = [answers(4000, 0.5 + shift, seed) for seed, shift in enumerate([0.0, 0.3] * 4)]  # the same noise
    difference = difference_of_runs(after, before)
    gains = numpy.mean(after, axis=1) - numpy.mean(before, axis=1)
    assert difference.value == pytest.approx(gains.mean())
    assert difference.high - difference.low == pytest.approx(2 * 1.96 * gains.std() / 8**0.5, rel=0.1), (
        "seeds decide the width"
    )
    with pytest.raises(ValueError):
        difference_of_runs(after, before[:2])


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (3, 0), (10, 10), (30, 12), (5, 9), (200, 150)])
def test_evidence_is_the_averaged_likelihood_ratio(gained, lost):
    ratio, _ = quad(lambda q: (2 * q) ** gained * (2 - 2 * q) ** lost, 0.5, 1)
    assert improvement_e_value(gained, lost) == pytest.approx(2 * ratio, rel=1e-6)
    before = [0] * gained + [1] * lost + [1] * 40 + [0] * 40
    after = [1] * gained + [0] * lost + [1] * 40 + [0] * 40
    assert count_changes(after, before) == (gained, lost)
    raw = [2 * value - 0.5 for value in before], [2.5 * value - 0.5 for value in after]  # rewards: 2.0 is above 1.5
    assert count_changes(raw[1], raw[0]) == (gained + 40, lost)


def test_evidence_beyond_a_float_is_infinite():
    assert improvement_e_value(2000, 0) == math.inf and Gate(0.05).compare([1.0] * 2000, [0.0] * 2000).accepted


@pytest.mark.parametrize("pair", [([], []), ([1, 0], [1, 0, 1])])
def test_unequal_numbers_of_prompts_are_refused(pair):
    with pytest.raises(ValueError, match="same prompts"):
        difference_of_runs([pair[0]], [pair[1]])


def test_the_final_evaluation_is_that_of_the_last_step(tmp_path):
    assert read_evaluations(tmp_path, 8) == {}
    for step, name in ((0, "start"), (4, "final"), (8, "final")):
        append_row(tmp_path / EVALUATIONS, {"step": step, "name": name, "correct": [step / 8]})
    assert read_evaluations(tmp_path, 8) == {"start": [0], "final": [1]}
    assert read_evaluations(tmp_path, 6) == {"start": [0]}, "the run went on"
