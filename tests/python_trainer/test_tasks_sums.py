import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_trainer.tasks.rewards import score
from python_trainer.tasks.sums import TERMS, SumsSettings, final_answer, solution
from tools.policies.sums import CARRY, CHANCE, carries, slip_chance, slipping_solution

terms_lists = st.lists(st.integers(10, 99), min_size=2, max_size=24)


FINGERPRINTS = {
    "all": "c1fd65d38ea7391d3aae3b1933fdacc0",
    "short": "9a8fdfec646da507984eaf2f6bf67b10",
    "longest": "8eb3518a91cca06475a2bc167bb9f585",
}


@pytest.mark.parametrize("variant", TERMS)
def test_prompts_are_always_the_same_and_disjoint_and_answers_are_sums(variant):
    task = SumsSettings(variant=variant).load()
    assert task.fingerprint == FINGERPRINTS[variant]
    assert (len(task.train), len(task.gate), len(task.test)) == (192, 512, 4096)
    examples = [*task.train, *task.gate, *task.test]
    assert len({example.prompt for example in examples}) == len(examples)
    for example in examples:
        terms = [int(term) for term in re.fullmatch(r"(\d\d(?:\+\d\d)+)=", example.prompt)[1].split("+")]
        assert example.columns == {"answer": sum(terms), "terms": len(terms)}
        assert len(terms) in TERMS[variant] and len(set(terms)) == len(terms)


@given(terms_lists)
def test_solutions_are_right(terms):
    text = solution(terms)
    assert final_answer(text) == sum(terms)
    for line in text.splitlines()[:-1]:
        summands, result = line.split("=")
        assert sum(map(int, summands.split("+"))) == int(result)


@given(terms_lists, st.data())
def test_a_slip_makes_the_answer_wrong_by_as_much(terms, data):
    step = data.draw(st.integers(0, len(terms) - 2))
    assert final_answer(solution(terms, step, -1)) == sum(terms) - 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("12+34=46\nA:46", 46), ("A:46", 46), ("A:0", 0)]
    + [(text, None) for text in (
        "", "A:", "A: 46", "A:46\n", "A:46 ", "A:46.", "A:46\nA:46", "A:45\nA:46", "A:A:46", "xA:46", " A:46", "A:046",
        "A:-46", "A:+46", "A:4 6", "A:4_6", "A:٤٦", "A:46\n12+34=46", "a:46", "46", "12+34=46\rA:46", "A:" + "9" * 5000,
    )],
)  # fmt: skip
def test_final_answer_is_strict(text, number):
    assert final_answer(text) == number


@given(st.text("A:0123456789\n+= ", max_size=30))
def test_final_answer_of_anything_is_its_last_line(text):
    number = final_answer(text)
    if number is not None:
        assert text.split("\n")[-1] == f"A:{number}" and text.count("A:") == 1


def test_reward_looks_at_the_last_line():
    task = SumsSettings().load()
    example = next(example for example in task.test if example.columns["terms"] == 2)
    (a, b) = map(int, example.prompt[:-1].split("+"))
    gold = example.columns["answer"]
    texts = {f"{a}+{b}={gold}\nA:{gold}": 1, f"1+1=3\nA:{gold}": 1, f"{a}+{b}={gold}\nA:{gold + 1}": 0,
             f"{a}+{b}={gold}": 0, f"A:{gold}\nA:{gold}": 0, "": 0}  # fmt: skip
    assert score(task, [example] * len(texts), list(texts), [[]] * len(texts)).accuracy == list(texts.values())


@pytest.mark.parametrize(
    ("a", "b", "carry"),
    [(12, 34, False), (15, 15, True), (50, 50, True), (90, 10, True), (155, 44, False), (155, 45, True),
     (999, 11, True), (1105, 12, False), (905, 90, False)],
)  # fmt: skip
def test_a_carry_makes_slips_likelier(a, b, carry):
    assert carries(a, b) == carry
    assert slip_chance(a, b) == (0 if a < 100 else CHANCE * (CARRY if carry else 1))


def test_every_step_slips_with_its_own_chance():
    rng = random.Random(0)
    slips = 0
    expected = 0.0
    variance = 0.0
    for _ in range(400):
        terms = rng.sample(range(10, 100), 30)
        *steps, last = slipping_solution(terms, rng).split("\n")
        partial = terms[0]
        assert len(steps) == 29
        for step, term in zip(steps, terms[1:]):
            a, b, result = map(int, re.fullmatch(r"(\d+)\+(\d+)=(\d+)", step).groups())
            assert (a, b) == (partial, term) and abs(result - a - b) in (0, 1, 10)
            slips += result != a + b
            expected += slip_chance(a, b)
            variance += slip_chance(a, b) * (1 - slip_chance(a, b))
            partial = result
        assert last == f"A:{partial}"
    assert abs(slips - expected) < 4 * variance**0.5
