import hashlib
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_trainer.config import check_config
from python_trainer.errors import UserError
from python_trainer.tasks.arithmetic import TERMS, ArithmeticSettings, accuracy, final_answer, solution

terms_lists = st.lists(st.integers(10, 99), min_size=2, max_size=24)


def terms_of(prompt):
    return [int(t) for t in re.fullmatch(r"(\d\d(?:\+\d\d)+)=", prompt)[1].split("+")]


@pytest.mark.parametrize("variant", TERMS)
def test_prompts_are_disjoint_and_answers_are_sums(variant):
    task = ArithmeticSettings(variant=variant).load()
    assert (len(task.train), len(task.gate), len(task.test)) == (512, 2048, 8192)
    examples = [*task.train, *task.gate, *task.test]
    assert len({example.prompt for example in examples}) == len(examples)
    for example in examples:
        terms = terms_of(example.prompt)
        assert example.columns == {"answer": sum(terms), "terms": len(terms)}
        assert len(terms) in TERMS[variant] and len(set(terms)) == len(terms)


def test_a_seed_always_gives_the_same_prompts():
    first, again, other = (ArithmeticSettings(seed=seed, gate_size=8, test_size=64).load() for seed in (3, 3, 4))
    assert first == again
    assert first.train != other.train
    # the prompts themselves are part of every published figure
    assert ArithmeticSettings().load().train[0].prompt == "46+99+48="
    long = hashlib.sha256("".join(e.prompt for e in ArithmeticSettings(variant="long").load().test).encode())
    assert long.hexdigest()[:12] == "23df7ecd1e0a"


def test_lengths_spread():
    lengths = {
        v: [len(solution(terms_of(e.prompt))) + 1 for e in ArithmeticSettings(variant=v).load().train] for v in TERMS
    }
    assert 28 <= statistics.mean(lengths["short"]) <= 40
    assert max(lengths["short"]) >= 5 * min(lengths["short"])
    assert min(lengths["long"]) >= 200
    assert 450 <= min(lengths["longest"]) and max(lengths["longest"]) <= 620


@given(terms_lists)
def test_solutions_are_right(terms):
    text = solution(terms)
    assert final_answer(text) == sum(terms)
    for line in text.splitlines()[:-1]:
        left, result = line.split("=")
        assert sum(map(int, left.split("+"))) == int(result)


@given(terms_lists, st.data())
def test_a_slip_makes_the_answer_wrong_by_as_much(terms, data):
    step = data.draw(st.integers(0, len(terms) - 2))
    assert final_answer(solution(terms, step, -1)) == sum(terms) - 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12+34=46\nA:46", 46),
        ("A:46", 46),
        ("A:0", 0),
        ("", None),
        ("A:", None),
        ("A: 46", None),
        ("A:46\n", None),
        ("A:46 ", None),
        ("A:46.", None),
        ("A:46\nA:46", None),
        ("A:45\nA:46", None),
        ("A:A:46", None),
        ("xA:46", None),
        (" A:46", None),
        ("A:046", None),
        ("A:-46", None),
        ("A:+46", None),
        ("A:4 6", None),
        ("A:4_6", None),
        ("A:٤٦", None),
        ("A:46\n12+34=46", None),
        ("a:46", None),
        ("46", None),
        ("12+34=46\rA:46", None),
        ("A:" + "9" * 5000, None),
    ],
)
def test_final_answer_is_strict(text, number):
    assert final_answer(text) == number


@given(st.text("A:0123456789\n+= ", max_size=30))
def test_final_answer_of_anything_is_its_last_line(text):
    number = final_answer(text)
    if number is not None:
        assert text.split("\n")[-1] == f"A:{number}" and text.count("A:") == 1


def test_accuracy_judges_each_completion_by_its_own_answer():
    texts = ["12+34=46\nA:46", "12+34=47\nA:47", "A:46\nA:46"]
    assert accuracy(["12+34="] * 3, texts, [[]] * 3, answer=[46, 46, 46], terms=[2] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "chess"}, "name"),
        ({"variant": "medium"}, "variant"),
        ({"train_size": 0}, "train_size"),
        ({"gate_size": -1}, "gate_size"),
        ({"sied": 1}, "sied"),
        ({"train_path": "a.jsonl"}, "train_path has no meaning for task arithmetic"),
        ({"name": "gsm8k", "test_path": "a.jsonl"}, "needs train_path"),
        ({"name": "jsonl", "train_path": "a.jsonl", "test_path": "b.jsonl"}, "needs reward"),
    ],
)
def test_wrong_settings_are_named(settings, named):
    with pytest.raises(UserError, match=f"task.*{named}"):
        check_config({"task": settings}, source="test")
