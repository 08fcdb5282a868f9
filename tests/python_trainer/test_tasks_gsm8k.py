import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_trainer.errors import UserError
from python_trainer.tasks.gsm8k import GSM8KSettings, accuracy, final_number


def judge(completion, gold="#### 18"):
    return accuracy([""], [completion], [[]], answer=[gold])[0]


@pytest.mark.parametrize(
    "text",
    ["#### 18", "18 = 18\n#### 18", "A: 18", "#### 18.", "#### $18", "A: 18.0", "####18", "A:  18 ", "A: 3\n#### 18\n"],
)
def test_right_answers(text):
    assert judge(text) == 1


@pytest.mark.parametrize(
    "text",
    ["", "18", "####", "A:", "#### -18", "#### 18 19", "#### 1,8", "#### 18..", "#### 18\n#### 19", "#### 18 eggs",
     "1A: 18"],
)  # fmt: skip
def test_wrong_answers(text):
    assert judge(text) == 0


@pytest.mark.parametrize(
    ("text", "gold"),
    [("A: 65960", "A: 65,960"), ("#### 1,234,567", "#### 1234567"), ("A: -$5.50", "#### -5.5"), ("A: $-5", "#### -5")],
)
def test_spellings_of_one_number(text, gold):
    assert judge(text, gold) == 1


@given(st.text("#A:$,.-+0123456789e \n٣", max_size=20))
def test_any_text_is_judged(text):
    assert judge(text) in (0, 1)


@given(st.decimals(min_value=-(10**6), max_value=10**6, places=2))
def test_every_number_is_read(number):
    assert final_number(f"so\n#### {number:,}") == number


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_agrees_with_every_gold_answer(gsm8k_dir, name):
    rows = [json.loads(line) for line in (gsm8k_dir / name).read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    assert all(final_number(a) == int(a.rpartition("#### ")[2].replace(",", "")) for a in answers)
    assert accuracy([], answers, [], answer=answers) == [1.0] * len(rows)


def test_agrees_with_every_label_of_the_model_solutions(gsm8k_dir):
    rows = map(json.loads, (gsm8k_dir / "example_model_solutions.jsonl").read_text().splitlines())
    pairs = [(row["ground_truth"], value) for row in rows for value in row.values() if isinstance(value, dict)]
    assert len(pairs) == 5276
    judged = accuracy([], [value["solution"] for _, value in pairs], [], answer=[gold for gold, _ in pairs])
    assert judged == [float(value["is_correct"]) for _, value in pairs]


def test_task_from_files(gsm8k_dir):
    paths = {"train_path": gsm8k_dir / "train.jsonl", "test_path": gsm8k_dir / "test.jsonl"}
    task = GSM8KSettings(gate_size=100, test_size=50, chat=True, **paths).load()
    assert (len(task.train), len(task.gate), len(task.test)) == (7373, 100, 50)
    questions = {example.columns["question"] for example in task.train}
    assert not questions & {example.columns["question"] for example in task.gate}
    (message,) = task.test[0].prompt
    assert message["role"] == "user" and message["content"].startswith("Janet")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "1+2?", "answer": "three"}', ":3: answer has no final number"),
        ('{"question": "1+2?"}', ":3: column 'answer' is None; allowed: a string .*; the line has 'question'$"),
        ('{"question": "", "answer": "#### 3"}', ":3: column 'question' is ''; allowed: a string"),
        (r'{"question": "1+2?\ud83d", "answer": "#### 3"}', ":3: prompt has the lone surrogate"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    file = tmp_path / "problems.jsonl"
    file.write_text(f'{{"question": "1+1?", "answer": "#### 2"}}\n\n{line}\n')
    with pytest.raises(UserError, match=rf"problems\.jsonl{message}"):
        GSM8KSettings(train_path=file, test_path=file).load()
