"""The training on a GPU, as far as it runs without one; the decode pass and the micro-batch of a whole model."""

import json
import time
from contextlib import nullcontext
from pkgutil import resolve_name

import pytest
import torch

from bench.gpu import model, train, worker
from python_trainer.accelerators import ACCELERATORS
from python_trainer.config import load_config
from python_trainer.run.directory import read_metrics
from python_trainer.tasks.sums import SumsSettings
from tools.policies import sums as pretrain


@pytest.fixture
def dry(tmp_path):
    """Return a function that runs the dry run, and gives the exit code and the record."""

    def run(*changes, folder="work"):
        record = tmp_path / "record.json"
        options = ["--device", "cpu", "--work-dir", str(tmp_path / folder), "--output", str(record)]
        code = train.main([*options, *changes])
        return code, json.loads(record.read_text()) if record.exists() else None

    return run


def test_settings_fit_task_and_policy():
    config = load_config(train.SETTINGS)
    task = config.task.load()
    max_tokens = config.rollout.max_completion_length
    with torch.device("meta"):
        max_positions = pretrain.new_policy("large").config.max_position_embeddings
    for example in [*task.train, *task.gate, *task.test]:
        terms = [int(term) for term in example.prompt[:-1].split("+")]
        assert len(pretrain.solution(terms)) < max_tokens and len(example.prompt) + max_tokens <= max_positions
    # the examples that pretraining leaves out hold all examples of the training
    shipped = SumsSettings(variant=config.task.variant).load()
    shipped_prompts = {example.prompt for example in [*shipped.train, *shipped.gate, *shipped.test]}
    assert {example.prompt for example in [*task.train, *task.gate, *task.test]} <= shipped_prompts
    assert len(task.gate) == 512
    assert config.accelerators.alpha.first_step < config.max_steps


@pytest.mark.slow
def test_dry_run_stops_goes_on_and_ends(dry, tmp_path, monkeypatch):
    settings = ["--set", "max_steps=60"]
    baseline_folder = tmp_path / "work/runs/baseline/seed-0"
    start_time = time.monotonic()

    def two_steps_are_logged():
        return start_time + (10**6 if len(read_metrics(baseline_folder)) > 2 else 0)

    monkeypatch.setattr(train.time, "monotonic", two_steps_are_logged)
    code, record = dry(*settings, "--budget-seconds", "1000030")
    assert code == 0 and not record["finished"] and not record["failed"]
    stopped_run = record["runs"]["baseline"]
    assert 2 <= stopped_run["steps"] < 60 and not stopped_run["finished"]
    assert stopped_run["last_row"]["step"] == stopped_run["steps"]
    assert record["policy"]["parameters"] > 0 and record["runs"]["all"]["steps"] == 0

    monkeypatch.undo()
    code, record = dry(*settings, "--budget-seconds", "3000")
    assert code == 0 and record["finished"] and not record["gpu"] and "max_steps=60" in record["settings"]
    for name, accelerators in (("baseline", set()), ("all", set(ACCELERATORS.names))):
        run = record["runs"][name]
        assert run["finished"] and run["steps"] == run["summary"]["steps"] == 60
        assert run["summary"]["accelerators"].keys() == accelerators
        assert run["generated_tokens"] == run["summary"]["generated_tokens"] > 0
        assert run["rollout_s"] > 0 and run["update_s"] > 0 and run["rollout_tokens_per_second"] > 0
        assert [step for step, _ in run["accuracies"]] == [0, 60]


def test_what_fails_is_named(dry, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "run_child", lambda command, *_: f"python {command[1]} ended with code 2")
    code, record = dry()
    assert code == 1 and record["failed"] == ["policy: python tools.policies.sums ended with code 2"]
    (tmp_path / "work/policy").mkdir()
    (tmp_path / "work/policy" / train.FACTS).write_text("{}")
    code, record = dry()
    assert code == 1 and record["failed"] == ["python python_trainer ended with code 2"]
    assert "failed: python python_trainer" in capsys.readouterr().out


@pytest.mark.parametrize(("script", "stop", "kill", "expected"), [
    ("pass", 100, 100, ""),
    ("raise SystemExit(3)", 100, 100, "ended with code 3"),
    ("import time; time.sleep(600)", 0, 100, "stopped by the budget"),
    ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)", 3, 4,
     "killed at the end of the budget"),
])  # fmt: skip
def test_a_child_ends_in_time(script, stop, kill, expected):
    now = time.monotonic()
    message = train.run_child(["-c", script], now + stop, now + kill)
    assert message.endswith(expected) and bool(message) == bool(expected)


def row_of(part, timed_rows=()):
    messages = []
    job = {"kind": "model", "op": part, "case": "auto", "device": "cpu", "without": list(timed_rows)}
    assert worker.do(job, [], messages.append) == {"ok": True}
    return messages[-1]["row"] if messages else None


@pytest.mark.slow
@pytest.mark.parametrize("part", model.PARTS)
def test_a_part_of_the_model_is_judged_timed_and_profiled(part):
    row = row_of(part)
    assert row["ok"] and 0 < row["error"] <= row["allowed"]
    # decoding's median is a difference of two timings, whose sign noise may flip at this size
    assert row["median_s"] * row["tokens_per_s"] > 0 and (part == "decode" or row["median_s"] > 0)
    assert any(line["name"].startswith("aten::") and line["calls"] > 0 for line in row["profile"])
    assert row_of(part, timed_rows=["auto"]) is None


@pytest.mark.slow
@pytest.mark.parametrize(("part", "attention"), [
    ("decode", "rlkernels.prefix_cache.reference.paged_attention"),
    ("train", "rlkernels.prefix_cache.reference.tree_attention"),
])  # fmt: skip
def test_attention_that_is_off_by_a_third_does_not_pass(monkeypatch, part, attention):
    attend = resolve_name(attention)

    def wrong(*args, **kwargs):
        out = attend(*args, **kwargs)
        return (out[0] * 0.7, out[1]) if isinstance(out, tuple) else out * 0.7

    monkeypatch.setattr(model, "backend", lambda who: nullcontext())
    monkeypatch.setenv("RLKERNELS_BACKEND", "torch")
    assert row_of(part)["ok"]
    monkeypatch.setattr(attention, wrong)
    monkeypatch.setattr("python_trainer.model.traits._agree", lambda *_: True)  # else it is refused at load
    row = row_of(part)
    assert not row["ok"] and row["error"] > row["allowed"] and "median_s" not in row
