import random
import re

import pytest

from python_trainer.tasks.arithmetic import solution
from python_trainer.tasks.rewards import score
from python_trainer.tasks.sums import TERMS, SumsSettings
from tools.policies.sums import CARRY, CHANCE, carries, slip_chance, slipping_solution


@pytest.fixture(scope="module")
def task():
    return SumsSettings().load()


def test_prompts_are_disjoint_sums_of_every_length(task):
    examples = [*task.train, *task.gate, *task.test]
    assert (len(task.train), len(task.gate), len(task.test)) == (192, 512, 4096)
    assert len({example.prompt for example in examples}) == len(examples)
    for example in examples:
        terms = [int(term) for term in re.fullmatch(r"\d\d(\+\d\d)+=", example.prompt)[0][:-1].split("+")]
        assert example.columns == {"answer": sum(terms), "terms": len(terms)} and len(terms) in TERMS
    assert {example.columns["terms"] for example in task.test} == set(range(2, 31)) == set(TERMS)
    assert sum(TERMS.values()) == pytest.approx(1)


def test_answers_have_14_to_350_tokens(task):
    lengths = [len(solution([int(t) for t in example.prompt[:-1].split("+")])) + 1 for example in task.test]
    assert 13 <= min(lengths) <= 15 and 340 <= max(lengths) <= 384


def test_reward_looks_at_the_last_line(task):
    example = next(example for example in task.test if example.columns["terms"] == 2)
    (left, right), gold = map(int, example.prompt[:-1].split("+")), example.columns["answer"]
    texts = {f"{left}+{right}={gold}\nA:{gold}": 1, f"1+1=3\nA:{gold}": 1, f"{left}+{right}={gold}\nA:{gold + 1}": 0,
             f"{left}+{right}={gold}": 0, f"A:{gold}\nA:{gold}": 0, "": 0}  # fmt: skip
    assert score(task, [example] * len(texts), list(texts), [[]] * len(texts)).accuracy == list(texts.values())


@pytest.mark.parametrize(
    ("left", "right", "carry"),
    [(12, 34, False), (15, 15, True), (50, 50, True), (90, 10, True), (155, 44, False), (155, 45, True),
     (999, 11, True), (1105, 12, False), (905, 90, False)],
)  # fmt: skip
def test_a_carry_makes_slips_likelier(left, right, carry):
    assert carries(left, right) == carry
    assert slip_chance(left, right) == (0 if left < 100 else CHANCE * (CARRY if carry else 1))


def test_every_step_slips_with_its_own_chance():
    rng, slips, expected, variance = random.Random(0), 0, 0.0, 0.0
    for _ in range(400):
        terms = rng.sample(range(10, 100), 30)
        *steps, last = slipping_solution(terms, rng).split("\n")
        partial = terms[0]
        assert len(steps) == 29
        for step, term in zip(steps, terms[1:]):
            left, right, result = map(int, re.fullmatch(r"(\d+)\+(\d+)=(\d+)", step).groups())
            assert (left, right) == (partial, term) and abs(result - left - right) in (0, 1, 10)
            slips += result != left + right
            expected += slip_chance(left, right)
            variance += slip_chance(left, right) * (1 - slip_chance(left, right))
            partial = result
        assert last == f"A:{partial}"
    assert abs(slips - expected) < 4 * variance**0.5
