"""The tasks and environments in examples/: their rewards, and a short run of each."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calculator import Calculator, calculate, right_number
from countdown import CountdownSettings, reward
from rich.console import Console
from sentences import WORKED_FORMS, SentencesSettings, count, first_wrong_line, form, keys, near
from support import ROOT, lacks, write_jsonl
from tiny import save_tiny_policy
from transformers import AutoTokenizer

from python_trainer.config import load_config
from python_trainer.trainer import Trainer
from rlkernels import linear_token_logprobs

QUICK = ["max_steps=1", "model.path=small", "rollout.prompts_per_step=2", "rollout.num_generations=2",
         "rollout.max_completion_length=16"]  # fmt: skip


def run(folder, settings, *overrides):
    Trainer(load_config(settings, [*QUICK, *overrides]), folder, console=Console(quiet=True)).run()
    return json.loads((folder / "summary.json").read_text())


def test_calculator_answers_calls():
    env = Calculator()
    assert env.step("so <calc>12*(3+4)-1/2</calc>") == ("=83.5\n", 0.0, False)
    assert env.step("<calc>1,000*3</calc> \n") == ("=3000\n", 0.0, False)
    for wrong in ("1/0", "2**9999", "x+1", "__import__('os')", "(1", "True+1", "-" * 150 + "1"):
        answer, reward, over = env.step(f"<calc>{wrong}</calc>")
        assert (answer.startswith("=error: ") or wrong.startswith("-")) and (reward, over) == (0.0, False)
    assert env.step("<calc>1+1</calc> is 2") == ("", 0.0, True)
    with pytest.raises(ValueError, match="only numbers"):
        calculate("9**9")


def test_calculator_rewards_the_last_number():
    texts = ["<calc>2*3</calc>=6\nso 6", "5,999,994.", "60", ""]
    assert right_number([], texts, [], answer=[6, "5999994", 6, 6]) == [1.0, 1.0, 0.0, 0.0]


def test_calculator_runs(tmp_path):
    train_path = tmp_path / "doubles.jsonl"
    rows = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(3)]
    write_jsonl(train_path, rows)
    task = {"name": "jsonl", "train_path": str(train_path), "test_path": str(train_path),
            "reward": "calculator:right_number", "environment": "calculator:Calculator"}  # fmt: skip
    assert run(tmp_path / "run", {"task": task})["steps"] == 1


@pytest.mark.parametrize(
    ("text", "right"),
    [("A:3+7+15", True), ("try\nA:(3+7)+15", True), ("A:3+7+15 ", False), ("A:25", False), ("A:3+7+15\n", False),
     ("A:3*7+4", False), ("A:3+7+15)", False), ("A:15+7+3", True), ("", False)],
)  # fmt: skip
def test_countdown_judges_the_last_line(text, right):
    assert reward([], [text], [], numbers=[[3, 7, 15]], target=[25]) == [float(right)]


def test_countdown_targets_can_be_reached(tmp_path):
    task = CountdownSettings(train_size=50, test_size=20).load()
    assert len(task.train) == 50 and not {e.prompt for e in task.train} & {e.prompt for e in task.test}
    assert all(str(example.columns["target"]) in example.prompt for example in task.train)
    assert run(tmp_path / "run", {"task": {"name": "countdown:CountdownSettings", "test_size": 4}})["steps"] == 1


def as_messages(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("text", "right"),
    [("The island lies in a storm beside the river.", True),
     (" The island lies in a storm beside the river.\n", True),
     ("The island storm rises over the wide river.", False),  # two keys side by side
     ("The island lies in a storm beside the lake.", False),
     ("An island, a storm, a river.", False),  # six words
     ("The island lies in a storm beside the river", False),
     ("The island lies in a storm. It is a river.", False),
     ("the island lies in a storm beside the river.", False),
     ("The the the island the the storm the the river.", False),
     ("", False)],
)  # fmt: skip
def test_sentences_with_keys(text, right):
    assert keys([], as_messages(text), [], words=[["river", "storm", "island"]]) == [float(right)]


@pytest.mark.parametrize(
    ("text", "is_exact", "is_near"),
    [("The road goes on and on without an end.", 0.0, 1.0), ("The road goes on without an end.", 0.0, 1.0),
     ("The road goes on for ever and again.", 1.0, 1.0), ("The road goes on.", 0.0, 0.0),
     ("The path goes on for ever and again.", 0.0, 0.0), ("A road. The road goes on for ever.", 0.0, 0.0)],
)  # fmt: skip
def test_sentences_of_eight_words(text, is_exact, is_near):
    columns = {"subject": ["road"], "length": [8]}
    assert count([], as_messages(text), [], **columns) == [is_exact]
    assert near([], as_messages(text), [], **columns) == [is_near]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [("", "", None), ("Name: Max", "Max", 0), ("brown fur and a long tail", " ", 1), ("Food: ", "Meals: ", 2),
     ("Home", "\nHome", 3), ("lake", "lake with one boat and two green doors", 3), ("tree", "tower", 4),
     ("\nStory", " Story", 3), ("over.", "over", 4), ("over.", "over.\nEnd", 5), (": The dog", ": A tree rain", 4)],
)  # fmt: skip
def test_forms(old, new, line):
    (_, *words), text = WORKED_FORMS[0]
    text = text.replace(old, new, 1)
    assert first_wrong_line(text, words) == line
    assert form([], as_messages(text), [], words=[["dog", *words]]) == [float(line is None)]


@pytest.mark.parametrize("constraint", ["keys", "near", "form"])
def test_sentences_that_are_held_out_are_not_trained_on(constraint):
    def columns_of(examples):
        return [str(sorted(map(str, example.columns.values()))) for example in examples]

    task = SentencesSettings(constraint=constraint, gate_size=100).load()
    assert len(task.test) == 256 and len(task.gate) == 100
    every = columns_of([*task.train, *task.test, *task.gate])
    assert len(set(every)) == len(every)
    assert all(word in e.prompt[-1]["content"] for e in task.test for word in map(str, e.columns.get("words", [])))


def test_make_language_trains_the_model_that_its_tool_left(tmp_path):
    """Run the target's commands in a copy, with a tiny policy where tools/smollm2.py puts its model."""
    if not shutil.which("make"):
        lacks("make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("tools", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    model = save_tiny_policy(tmp_path / "runs" / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    settings = "--set max_steps=2 task.test_size=4 rollout.prompts_per_step=2"
    command = ["make", "--old-file=.venv/.built", "language", "VENV=.venv", f"LANGUAGE={settings}"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1", "MAKEFLAGS": ""}  # `make test` may have set flags
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    assert "runs/smollm2 is there" in process.stdout
    assert process.stdout.count("  before: ") == process.stdout.count("  after: ") == 4
    run_folder = tmp_path / "runs" / "language"
    assert json.loads((run_folder / "summary.json").read_text())["steps"] == 2
    assert "Write one short sentence with the words" in (run_folder / "report.html").read_text()


def test_a_loop_of_your_own_packs_what_answers_begin_with(capsys):
    names = runpy.run_path(str(Path(__file__).parents[1] / "examples/packed_loop.py"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("9 tokens instead of 29" in line for line in lines)
    packed, model = names["packed"], names["model"]
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        hidden = model.base_model(packed.ids[None], **names["inputs"]).last_hidden_state[0]
        logprobs = linear_token_logprobs(hidden[packed.rows], head, packed.targets)[packed.pairs]
        model.set_attn_implementation("eager")
        expected = []
        for answer in names["answers"]:
            ids = torch.tensor([names["prompt"] + answer])
            model_logprobs = model(ids).logits[0, len(names["prompt"]) - 1 : -1].log_softmax(-1)
            expected.append(model_logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0])
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-4, rtol=1e-4)
