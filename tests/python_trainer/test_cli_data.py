"""The command line on prompts and rewards: bad ones are named, doubtful ones noted, what they ended can go on."""

import json
import sys

import pytest
from conftest import one_clear_line

from python_trainer.run_directory import read_metrics


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "A"}\n' + json.dumps({"prompt": "AB" * 100}), [":2 has 200 tokens", "limit of 128", "1 to 116"]),
        (json.dumps({"messages": [{"role": "user", "content": "AB"}]}), ["no chat template"]),
    ],
)
def test_bad_prompts(run, tmp_path, text, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    one_clear_line(run({"task": {"train_path": str(path)}}), tmp_path, *words)
    assert not (tmp_path / "run").exists()


PARTIAL = """
def unsure(completions, **_): return [None, None] + [0.0] * (len(completions) - 2)
def partial(completions, **_): return [None, 0.6] + [0.0] * (len(completions) - 2)
def clear(completions, **_): return [-1.0, 1.0] + [0.0] * (len(completions) - 2)
"""


def test_partial_rewards_and_answers_that_are_all_cut_are_noted_once(run, tmp_path, monkeypatch):
    (tmp_path / "part_rewards.py").write_text(PARTIAL)
    monkeypatch.syspath_prepend(tmp_path)
    task = {"reward": ["part_rewards:unsure", "part_rewards:partial", "part_rewards:clear"]}
    code, error = run({"task": task, "max_steps": 2, "evaluation": {"eval_steps": 1}})
    sys.modules.pop("part_rewards")
    assert code == 0, error
    (line,) = [line for line in error.splitlines() if line.startswith("note: ")]
    assert line.startswith("note: to 1 of 6 answers partial gave neither 0 nor 1 but 0.6 and the like: ")
    assert "no answer is right or wrong, dynamic sampling and accelerators compare rewards" in line
    cut = {"prompts_per_step": 1, "num_generations": 2, "max_completion_length": 1}
    code, error = run({"rollout": cut, "max_steps": 2}, folder="cut")
    assert code == 0
    assert error.count("note: no answer of the first step ended within rollout.max_completion_length\n") == 1


REWARDS = """
calls = 0
def sleepy(completions, **_):
    global calls
    calls += 1
    if calls in (1, 3): raise RuntimeError("the judge is asleep")
    return [float(len(c)) for c in completions]
"""


def test_a_reward_function_that_raises_is_named_with_its_line(run, tmp_path, monkeypatch):
    """In the first evaluation, then in the first step; neither run holds its folder."""
    (tmp_path / "bad_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"task": {"reward": "bad_rewards:sleepy"}, "max_steps": 1, "save": {"save_steps": 1}}
    one_clear_line(run(changes), tmp_path, "RuntimeError: the judge is asleep (", "bad_rewards.py:6)")
    code, error = run()
    assert code == 2 and "error: reward function sleepy raised RuntimeError: the judge is asleep (" in error
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0]
    code, error = run()
    sys.modules.pop("bad_rewards")
    assert code == 0, error
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1]
