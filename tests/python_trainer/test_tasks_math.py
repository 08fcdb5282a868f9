"""The reward ``math``: what counts as equal, answers that never end."""

import importlib.util
import json
import re

import pytest
from support import lacks

from python_trainer.errors import UserError
from python_trainer.tasks import mathematics
from python_trainer.tasks.files import FileTaskSettings
from python_trainer.tasks.rewards import score


@pytest.fixture(scope="module", autouse=True)
def math_verify():
    if importlib.util.find_spec("math_verify") is None:
        lacks("math-verify (pip install '.[math]')")


@pytest.fixture(scope="module")
def judge():
    verifier = mathematics.Verifier(seconds=1.0)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(("gold", "completion", "right"), [
    ("18", "She makes $<<9*2=18>>18 every day\n#### 18", True),
    ("18", "#### 18.5", False),
    ("18", "I do not know", False),
    ("9 * 2 = <<9*2=18>>18\n#### 1,018", r"so it is \boxed{1018}", True),
    ("0.5", r"It is $\frac{1}{2}$.", True),
    (r"\frac{3}{4}", "The answer is 3/4", True),
    (r"\frac{3}{4}", r"\boxed{\frac{6}{8}}", True),
    (r"\frac{3}{4}", r"\boxed{\frac{4}{3}}", False),
    ("12 cm", r"The side is $12\text{ cm}$.", True),
    ("$18", r"\boxed{\$18}", True),
    ("50%", r"\boxed{50\%}", True),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", True),
    ("$x^2 - 1$", r"\boxed{(x-1)(x+1)}", True),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}", True),
    ("-3", "#### 3", False),
    ("7", r"first \boxed{7}, but then $\boxed{8}$", False),
    ("7", "", False),
])  # fmt: skip
def test_what_counts_as_equal(judge, gold, completion, right):
    assert judge(completion, gold) is right


def test_gold_without_mathematics(judge):
    assert judge("18", "") is None


def test_an_answer_that_never_ends_is_wrong(judge):
    endless = r"\boxed{" + "9^{" * 6 + "9" + "}" * 6 + "}"
    assert judge(endless, "18") is False
    assert judge._worker is None
    assert judge("18", "18") is True


def test_a_worker_that_was_killed(judge):
    assert judge("18", "18") is True
    judge._worker.kill()
    judge._worker.wait()
    assert judge("18", "18") is False  # as if it had been too long
    assert judge("18", "18") is True


@pytest.fixture
def task(tmp_path):
    """Return a jsonl task with ``reward: math`` and this gold answer."""

    def make(gold, **settings):
        path = tmp_path / "data.jsonl"
        path.write_text(json.dumps({"question": "how much?", "answer": gold}))
        files = {"train_path": str(path), "test_path": str(path), "columns": {"prompt": "question"}}
        return FileTaskSettings(**files, reward="math", **settings).load()

    return make


@pytest.mark.parametrize("chat", [False, True])
def test_by_name_in_a_task(task, chat):
    math_task = task("9 * 2 = 18\n#### 18", chat=chat)
    scores = score(math_task, [math_task.train[0]] * 2, [r"\boxed{18}", "#### 17"], [[1], [2]])
    assert scores.rewards == {"math": [1.0, 0.0]} and scores.accuracy == [1.0, 0.0]


@pytest.mark.parametrize(("gold", "answers"), [
    (0, ("0", "#### 1")),
    (-3, (r"\boxed{-3}", "3")),
    (0.5, (r"$\frac{1}{2}$", "5")),
    (42.0, ("42", "4.2")),
    (1e-07, ("0.0000001", "1")),
    (10**25, (f"{10**25}", "10")),
])  # fmt: skip
def test_gold_answers_may_be_numbers(task, gold, answers):
    math_task = task(gold)
    assert score(math_task, [math_task.train[0]] * 2, answers, [[1], [2]]).rewards == {"math": [1.0, 0.0]}


@pytest.mark.parametrize("gold", ["", True, None, [1], float("nan")])
def test_gold_answers_that_are_none_are_named(task, gold):
    math_task = task(gold)
    with pytest.raises(UserError, match=f"math raised ValueError: column answer must .*{re.escape(repr(gold))}"):
        score(math_task, math_task.train, ["18"], [[1]])


def test_without_the_library(task, monkeypatch):
    monkeypatch.setattr(mathematics, "_verifier", mathematics.Verifier())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    math_task = task("18")
    with pytest.raises(UserError, match=r"needs the package math-verify: pip install math-verify"):
        score(math_task, math_task.train, ["18"], [[1]])
