import ast
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from python_trainer.errors import UserError
from python_trainer.tasks.countdown import STRATA, CountdownSettings, accuracy, apply, chain, correct, count_chains
from tools.policies import countdown as maker
from tools.policies.countdown import LONG, draw_answer, draw_chain, draw_near

numbers_lists = st.lists(st.integers(1, 20), min_size=3, max_size=5, unique=True)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("A:3+7+15", True),
        ("A:15+3+7", True),
        ("A:15-(-3-7)", False),  # a sign
        ("A:(3+7)+15", True),
        ("A:((15)+(7+3))", True),
        ("3*7=21,21-15=6\n3+7=10,10+15=25\nA:3+7+15", True),
        ("3+7=11,nonsense\nA:3+7+15", True),  # what comes before is not judged
        ("A:1\nA:3+7+15", True),
        ("A:3+7+15\nA:1", False),
        ("A:3+7+15\n", False),
        ("A:3+7+15 ", False),
        ("A: 3+7+15", False),
        ("A:3 +7+15", False),
        ("A:3+7+15=25", False),
        ("xA:3+7+15", False),
        ("A:25", False),
        ("A:3+7+15+0", False),
        ("A:3+7+15*1", False),
        ("A:3+7+1+14", False),
        ("A:3+7+07+8", False),
        ("A:03+7+15", False),
        ("A:3+22", False),
        ("A:3*7+15", False),
        ("A:3-7-15", False),
        ("A:(3+7+15", False),
        ("A:3+7+15)", False),
        ("A:3+7++15", False),
        ("A:+3+7+15", False),
        ("A:(3)(7)(15)", False),
        ("A:3**7+15", False),
        ("A:()", False),
        ("A:", False),
        ("", False),
        ("A:3+7+١٥", False),
        ("A:" + "(" * 300 + "3+7+15" + ")" * 300, False),
        ("A:" + "-" * 5000 + "3+7+15", False),
        ("A:" + "9" * 5000, False),
        ("3+7+15", False),
    ],
)
def test_answers_by_hand(text, right):
    assert correct([3, 7, 15], 25, text) is right


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(2+3)*4", 20), ("2+3*4", 14), ("4*(2+3)", 20), ("4*2+3", 11), ("4-(3-2)", 3), ("4-3-2", -1), ("2-3*4", -10),
        ("3-(2-4)", 5), ("2*3*4", 24),
    ],
)  # fmt: skip
def test_precedence(expression, value):
    assert [target for target in range(-30, 100) if correct([2, 3, 4], target, f"A:{expression}")] == [value]


def test_numbers_that_come_twice_are_used_twice():
    assert correct([5, 5, 2], 20, "A:(5+5)*2")
    assert not correct([5, 5, 2], 15, "A:5+5*2+0") and not correct([5, 2], 20, "A:(5+5)*2")


def reachable(numbers):
    """Results of every expression over all the numbers, in any bracketing: split into two sides, over and over."""

    @cache
    def values(chosen):
        if len(chosen) == 1:
            return {chosen[0]: str(chosen[0])}
        found = {}
        for mask in range(1, 2 ** len(chosen) - 1):
            left = tuple(n for i, n in enumerate(chosen) if mask >> i & 1)
            right = tuple(n for i, n in enumerate(chosen) if not mask >> i & 1)
            for (a, x), (b, y) in product(values(left).items(), values(right).items()):
                found |= {a + b: f"({x}+{y})", a - b: f"({x}-{y})", a * b: f"({x}*{y})"}
        return found

    return values(tuple(numbers))


def test_what_a_solver_finds_is_right_and_nothing_else():
    numbers = [2, 7, 11, 16]
    for value, expression in reachable(numbers).items():
        assert correct(numbers, value, f"A:{expression}")
        assert not correct(numbers, value + 1, f"A:{expression}")
        assert not correct([2, 7, 11, 15], value, f"A:{expression}")


@given(st.text("A:0123456789\n+-*()= ", max_size=40))
def test_judging_never_fails(text):
    if correct([3, 7, 15], 25, text):
        assert set(ast.unparse(ast.parse(text.split("A:")[-1]))) <= set("1357+-*() ")


@pytest.mark.parametrize("numbers", [[3, 7, 15], [20, 4, 9, 11], [1, 2, 3, 4, 19]])
def test_chains_are_counted_as_by_brute_force(numbers):
    counts = Counter()
    for order, operators in product(permutations(numbers), product("+-*", repeat=len(numbers) - 1)):
        if (found := chain(order, operators)) is not None:
            counts[found.results[-1]] += 1
    for row in count_chains([numbers, numbers[::-1]]):
        assert {int(i): int(row[i]) for i in row.nonzero()[0]} == counts


@given(numbers_lists, st.integers(0, 99), st.integers(0, 2), st.integers(0, 2**32))
def test_answers_to_learn_from_are_legal_and_say_what_was_found(numbers, target, aimed, seed):
    *lines, last = draw_answer(random.Random(seed), numbers, target, LONG[len(numbers)], aimed).split("\n")
    assert 1 <= len(lines) <= LONG[len(numbers)][1] and len("\n".join([*lines, last])) < 400
    for line in lines:
        steps = [step.split("=") for step in line.split(",")]
        used, before = [], None
        for asked, result in steps:
            operator = next(o for o in "+-*" if o in asked)
            left, right = map(int, asked.split(operator))
            assert apply(left, operator, right) == int(result) and 0 <= int(result) <= 99
            assert before in (None, left)
            used += [left, right] if before is None else [right]
            before = int(result)
        assert sorted(used) == sorted(numbers)
        assert (before == target) is (line == lines[-1] and correct(numbers, target, last))
    assert correct(numbers, before, last)


def test_aiming_hits_more_often():
    rng = random.Random(0)
    hits = Counter()
    for _ in range(2000):
        numbers = rng.sample(range(1, 21), 4)
        target = draw_chain(rng, numbers).results[-1]
        hits["random"] += draw_chain(rng, numbers).results[-1] == target
        for steps in (1, 2):
            hits[steps] += draw_near(rng, numbers, target, steps).results[-1] == target
    assert hits[1] > 1.8 * hits["random"] and hits[2] > 1.5 * hits[1]


def test_prompts_are_disjoint_and_of_their_strata():
    task = CountdownSettings().load()
    assert (len(task.train), len(task.gate), len(task.test)) == (192, 512, 4096)
    examples = [*task.train, *task.gate, *task.test]
    assert len({example.prompt for example in examples}) == len(examples)
    for example in examples:
        numbers, target = example.columns["numbers"], example.columns["target"]
        assert example.prompt == f"{' '.join(map(str, numbers))}>{target}:"
        stratum = STRATA[example.columns["stratum"]]
        assert len(numbers) == stratum.count and stratum.low < example.columns["chance"] <= stratum.high
    for example in examples[::200]:
        assert example.columns["target"] in reachable(example.columns["numbers"])


def test_fewer_numbers():
    task = CountdownSettings(numbers=[3, 4], train_size=64, gate_size=0, test_size=1).load()
    assert {len(example.columns["numbers"]) for example in task.train} == {3, 4}


def test_prompts_run_out():
    """Of two easy or rare ones in three the easy ones are too few: the rare ones fill up; then nothing is left."""
    settings = CountdownSettings(numbers=[3], train_size=64, gate_size=64, test_size=3000)
    task = settings.load()
    strata = Counter(example.columns["stratum"] for example in [*task.train, *task.test])
    assert len(task.test) == 3000 and strata["rare"] > 1150  # a third would be 1,021
    with pytest.raises(
        UserError, match=r"task.numbers \[3\] leaves 4[0-9]{3} prompts, fewer than train_size, gate_size"
    ):
        settings.model_copy(update={"test_size": 5000}).load()


def test_accuracy_judges_each_completion_by_its_own_columns():
    texts = ["A:3+7+15", "A:3+7+15", "A:2*9-1"]
    columns = {"numbers": [[3, 7, 15], [3, 7, 14], [1, 2, 9]], "target": [25, 25, 17], "chance": [0.1] * 3}
    assert accuracy(["..."] * 3, texts, [[]] * 3, **columns) == [1.0, 0.0, 1.0]


def test_base_policy_is_made_the_same_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(maker, "PHASES", [replace(phase, steps=1, batch=2) for phase in maker.PHASES])
    threads = torch.get_num_threads()
    for name in ("a", "b"):
        maker.main(["--output", str(tmp_path / name)])
    torch.set_num_threads(threads)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second


def test_counts_of_numbers_are_checked():
    for wrong in ([], [2], [3, 3]):
        with pytest.raises(ValidationError, match="numbers"):
            CountdownSettings(numbers=wrong)
