import pytest
from pydantic import ValidationError

from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.tasks.files import FileTaskSettings
from python_trainer.tasks.rewards import score


def contains(prompts, completions, completion_ids, word, **_):
    return [float(w in c) for c, w in zip(completions, word)]


def brevity(prompts, completions, completion_ids, **_):
    return [-0.01 * len(ids) if ids else None for ids in completion_ids]


CONTAINS = "test_tasks_jsonl:contains"
BREVITY = "test_tasks_jsonl:brevity"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def task_of(lines, folder, **settings):
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"reward": CONTAINS, "train_path": "data.jsonl", "test_path": "data.jsonl"} | settings
    return FileTaskSettings(**settings).load()


def test_strings_and_chat_messages(folder):
    chat = '{"messages": [{"role": "user", "content": "Say hi"}], "word": "hi"}'
    text = '{"prompt": "Say yes", "word": "yes"}'
    assert [type(row.prompt) for row in task_of(["\ufeff" + text, chat], folder).train] == [str, list]  # as of Windows
    mixed = task_of([text, chat], folder, chat=True).train
    assert [row.prompt[0]["content"] for row in mixed] == ["Say yes", "Say hi"] and mixed[1].place == "data.jsonl:2"
    assert task_of([chat], folder).train[0].prompt == [{"role": "user", "content": "Say hi"}]
    task = task_of([text, text], folder)
    assert task.train[0] == Example("Say yes", {"word": "yes"})
    scores = score(task, task.train, ["oh yes", "no"], [[1], [2]])
    assert scores.rewards == {"contains": [1.0, 0.0]} and scores.accuracy == scores.total == [1.0, 0.0]


def test_a_line_without_a_column_to_rename_is_named(folder):
    with pytest.raises(UserError, match=r"task.columns: data\.jsonl:2 has no column 'text'; it has 'word'"):
        task_of(['{"text": "a", "word": "b"}', '{"word": "b"}'], folder, columns={"prompt": "text"})


def test_several_weighted_rewards(folder):
    settings = {"reward": [CONTAINS, BREVITY], "reward_weights": [2, 10]}
    task = task_of(['{"text": "Say yes", "word": "yes"}'], folder, **settings, columns={"prompt": "text"})
    scores = score(task, [task.train[0]] * 2, ["yes", "yes"], [[1, 2], []])
    assert scores.rewards["brevity"] == [-0.02, None]
    assert scores.total == pytest.approx([1.8, 2.0])


def test_gate_prompts_come_in_random_order(folder):
    """Files are sorted by subject or level, and the gate looks at some prompts first."""
    rows = [f'{{"prompt": "{i}", "word": "g"}}' for i in range(200)]
    first, second = ([int(row.prompt) for row in task_of(rows, folder, gate_size=100).gate] for _ in range(2))
    assert first == second and len(set(first)) == 100
    assert sum(number < 100 for number in first[:50]) in range(10, 41)


@pytest.mark.parametrize(("lines", "message"), [
    ([], r"data\.jsonl: no examples"),
    (['{"prompt": "a"}', '{"prompt": '], r"data\.jsonl:2: not JSON"),
    (["[1]"], r"data\.jsonl:1: list '\[1\]'; allowed: one JSON object"),
    (["[" * 100_000], r"data\.jsonl:1: not JSON"),
    (['{"word": "a"}'], r"data\.jsonl:1: no column 'prompt' or 'messages'; the line has 'word'"),
    (['{"prompt": ""}'], r"data\.jsonl:1: prompt is ''; allowed: a string"),
    (['{"prompt": 3}'], r"data\.jsonl:1: prompt is 3"),
    (['{"messages": []}'], r"data\.jsonl:1: prompt is \[\]"),
    (['{"messages": [{"role": "user"}]}'], r"data\.jsonl:1: prompt is"),
    ([r'{"prompt": "ABC\ud83d"}'], r":1: prompt is no Unicode text: .*'\\ud83d' in position 3: surrogates not allowed"),
    ([r'{"messages": [{"role": "user", "content": "\ude00"}]}'], r"data\.jsonl:1: prompt is no Unicode text"),
    (['{"prompt": "a", "completions": 1}'], r"data\.jsonl:1: column 'completions'"),
    (['{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "42\\n"}], "answer": 42}'],
     r"data\.jsonl:1: the last message of the prompt is the column answer, 42; take it out of the messages"),
])  # fmt: skip
def test_bad_lines_are_named(folder, lines, message):
    with pytest.raises(UserError, match=message):
        task_of(lines, folder)


@pytest.mark.parametrize(("settings", "message"), [
    ({"train_path": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read: No such file or directory"),
    ({"test_path": "bytes.jsonl"}, r"bytes\.jsonl: cannot be read as UTF-8"),
    ({"train_path": "."}, "cannot be read"),
    ({"train_size": 2}, r"train_size is 2, but data\.jsonl has 1"),
    ({"test_size": 2}, r"test_size is 2, but data\.jsonl has 1"),
    ({"gate_size": 1}, r"gate_size 1 leaves nothing of data\.jsonl"),
    ({"reward": "math"}, "math needs column 'answer', which data.jsonl lacks; it has 'word'"),
    ({"reward": "contains"}, "must be one of math, .*, module:function, got 'contains'$"),
    ({"reward": "maths"}, "got 'maths'; did you mean math"),
    ({"reward": "own_rewards:"}, "must be one of .*, got 'own_rewards:'"),
    ({"reward": "inner/own.py:score"}, "got 'inner/own.py:score'; name a module without .py$"),
    ({"reward": "broken:f"}, "'broken:f': importing failed: ZeroDivisionError"),
    ({"reward": "math:pi"}, "reward 'math:pi' is not a function"),
    ({"reward": ["math:fsum", "math:fsum"]}, "different names"),
    ({"test_path": None}, "task jsonl needs test_path: a file"),
    ({"train_path": None}, "task jsonl needs train_path: a file"),
    ({"reward": []}, "task jsonl needs reward: "),
])  # fmt: skip
def test_bad_settings_are_named(folder, settings, message):
    (folder / "broken.py").write_text("1 / 0")
    (folder / "bytes.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises((UserError, ValidationError), match=message):
        task_of(['{"prompt": "a", "word": "b"}'], folder, **settings)
