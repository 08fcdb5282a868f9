"""The command line: help that teaches, bad input that is named, comparisons that go on where they stopped."""

import io
import json
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
import yaml
from conftest import QUIET, one_clear_line, save_tiny_policy
from rich.console import Console
from safetensors.torch import load_file, save_file
from support import ROOT

from python_trainer.__main__ import main
from python_trainer.command_line.report import find_runs, report, summary_rows
from python_trainer.errors import UserError
from python_trainer.run.directory import read_evaluations, read_metrics
from python_trainer.trainer import Trainer


@pytest.mark.parametrize(("arguments", "words"), [
    (["--help"], ["on reference answers probe", "accelerators.rhyme.database has recorded"]),  # a whole line on each
    *[([command, "--help"], [f"usage: python -m python_trainer {command}"])
      for command in ("train", "compare", "sft", "probe", "report", "history")],
    (["train", "--help-settings"],
     ["optimizer.learning_rate: float, > 0 = 1.0e-05", "Peak learning rate.", "algorithm.loss_type: grpo | dapo"]),
])  # fmt: skip
def test_help_is_shown(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    output = " ".join(capsys.readouterr().out.split())
    assert exit.value.code == 0 and all(word in output for word in words)


def without_eos(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))


def of_an_earlier_run(folder):
    (folder / "model").mkdir()
    for path in folder.glob("*.*"):
        path.rename(folder / "model" / path.name)


def weights_outside(folder, **files):
    """Move the weights out of the folder, and let a file of the folder name them there."""
    (folder / "model.safetensors").rename(folder.parent / "x.safetensors")
    for name, content in files.items():
        path = folder / {"config": "config.json"}.get(name, f"{name}.index.json")
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))


def weights_that_run_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save(os.getcwd, folder / "pytorch_model.bin")  # torch would import the function, unless it reads weights only


OUTSIDE = {"metadata": {}, "weight_map": {"model.norm.weight": "../x.safetensors"}}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *(
            (partial(weights_outside, **files), ["must name weight files of its own folder, got '../x.safetensors'"])
            for files in (
                {"model.safetensors": OUTSIDE},
                {"pytorch_model.bin": OUTSIDE},
                {"config": {"transformers_weights": "../x.safetensors"}},
            )
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"not weights"), []),
        (weights_that_run_code, ["no causal language model", "Weights only load failed"]),
        ({"model.embed_tokens.weight": torch.zeros(3, 3)}, ["embed_tokens.weight is [3, 3], not [64, 32]"]),
        ({"model.layers.1.mlp.up_proj.weight": None}, ["lacks 1 weights", "model.layers.1.mlp.up_proj.weight"]),
        ({"model.norm.weight": torch.full((32,), torch.nan)}, ["NaN or infinity: model.norm.weight"]),
        ("tokenizer*", ["no tokenizer"]),
        (without_eos, ["no EOS token"]),
        (shutil.rmtree, ["model.path"]),
        ("*", ["no causal language model"]),
        (of_an_earlier_run, ["no causal language model", "that of this run is in ", "policy/model"]),
    ],
)
def test_a_model_that_is_no_good_is_named(run, tmp_path, damage, words):
    """Damaged by a function, by missing files, or by other weights, None for missing ones."""
    folder = save_tiny_policy(tmp_path / "policy")
    if isinstance(damage, dict):
        weights = load_file(folder / "model.safetensors") | damage
        present = {name: weight for name, weight in weights.items() if weight is not None}
        save_file(present, folder / "model.safetensors", {"format": "pt"})
    elif isinstance(damage, str):
        for path in folder.glob(damage):
            path.unlink()
    else:
        damage(folder)
    one_clear_line(run({"model": {"path": str(folder)}}), tmp_path, str(folder), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("backend", ["nonsense", "triton"])
def test_a_backend_that_cannot_be(run, tmp_path, monkeypatch, backend):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("RLKERNELS_BACKEND", backend)
    one_clear_line(run(), tmp_path, "RLKERNELS_BACKEND", backend)
    assert not (tmp_path / "run").exists()


LIGHT = """
import json, sys
from python_trainer.__main__ import main
for line in json.load(sys.stdin):
    code = main(line)
    print(code, [name for name in ("torch", "transformers", "matplotlib") if name in sys.modules], flush=True)
"""
MISTAKES = [
    ("train", ["--set", "optimizer.learning_rat=1"], "optimizer.learning_rat: unknown setting"),
    ("train", ["--set", "accelerators.enabled=[rhime]"], "'rhime'"),
    ("train", ["--set", "task.name=summs"], "'summs'"),
    ("train", ["--set", "model.path=/nowhere/model"], "/nowhere/model"),
    ("train", ["--set", "task.train_path=/nowhere.jsonl"], "task.train_path: there is no file /nowhere.jsonl"),
    ("train", ["--output-dir", "full"], "already holds a run"),
    ("train", ["--output-dir", "settings.yaml"], "is a file"),
    ("train", ["--output-dir", "mine"], "mine holds config.yaml and model of something else"),
    ("sft", ["--output-dir", "mine", "--resume"], "mine holds config.yaml and model of something else"),
    ("compare", ["--variants", "baseline,warp"], "'warp'"),
    ("compare", ["--variants", "baseline@"], "steps >= 1 after @, got 'baseline@'"),
    ("compare", ["--variants", "baseline,rpo@-3"], "steps >= 1 after @, got 'rpo@-3'"),
    ("compare", ["--variants", "baseline+rpo"], "module:Class joined by +, got 'baseline+rpo'"),
    ("compare", ["--seeds", "0"], "--seeds"),
]


def test_mistakes_are_found_before_torch_is_loaded(settings, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    (tmp_path / "full" / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "mine" / "model").mkdir(parents=True)  # the model to begin with, beside its settings
    (tmp_path / "mine" / "config.yaml").touch()
    lines = [[name, "--config", str(path), "--output-dir", "run", *arguments] for name, arguments, _ in MISTAKES]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run([sys.executable, "-c", LIGHT], input=json.dumps(lines), env=env, cwd=tmp_path,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert process.stdout == "2 []\n" * len(lines) and "Traceback" not in process.stderr
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(MISTAKES), process.stderr
    for error, (*_, words) in zip(errors, MISTAKES):
        assert words in error


def test_a_reader_that_has_seen_enough():
    command = [sys.executable, "-m", "python_trainer", "train", "--help-settings"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0


def test_resume_tells_of_a_missing_checkpoint_and_of_changed_settings(run, tmp_path, capsys):
    """Without ``resume`` a finished run stays as it is."""
    assert "has no checkpoint to resume" in run({"max_steps": 1}, "--resume")[1]
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    code, error = run()
    assert code == 2 and "already holds a run" in error and "--resume" in error
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics
    assert "resumed with" not in run({}, "--resume")[1]
    _, error = run({"max_steps": 2, "optimizer": {"learning_rate": 0.25}}, "--resume")
    assert "resumed with other settings than before: max_steps: 1 -> 2, optimizer.learning_rate: " in error
    assert "-> 0.25" in error
    earlier = (tmp_path / "run" / "config-until-step-1.yaml").read_text()
    assert "max_steps: 1\n" in earlier and "max_steps: 2\n" in (tmp_path / "run" / "config.yaml").read_text()
    (step_2,) = (tmp_path / "run" / "checkpoints").glob("step-000002")
    shutil.rmtree(step_2)  # as if it had been killed before
    run({"max_steps": 3}, "--resume")
    assert (tmp_path / "run" / "config-until-step-1.yaml").read_text() == earlier, "still those of the first step"
    (tmp_path / "run" / "config.yaml").write_text("max_steps: [")  # mended by hand
    assert run({}, "--resume")[0] == main(["report", str(tmp_path / "run")]) == 2
    (error,) = set(capsys.readouterr().err.splitlines())
    assert error.startswith(f"error: {tmp_path / 'run' / 'config.yaml'} is not valid YAML: ")


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file/run", "file is a file"),
        ("n" * 300, "File name too long"),
        ("unwritable", "is not writable"),
        ("locked", "Is a directory"),
    ],
)
def test_output_dir_that_cannot_be_made(run, tmp_path, monkeypatch, folder, reason):
    (tmp_path / "file").write_text("")
    if folder == "unwritable":
        monkeypatch.setattr(os, "access", lambda *_: False)
    if folder == "locked":  # stands for the lock of another user, which cannot be opened either
        (tmp_path / folder / ".lock").mkdir(parents=True)
    message = f"--output-dir must be a folder that can be written, got {tmp_path / folder}"
    one_clear_line(run(folder=folder), tmp_path, message, reason)


def test_output_dir_that_fails_only_when_it_is_written(make_config, tmp_path):
    trainer = Trainer(make_config(), tmp_path / "run", console=QUIET)
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="--output-dir must be a folder that can be written, got .*run: File exists"):
        trainer.run()


def test_compare_learns_what_its_variants_need_before_one_trains(run, tmp_path):
    code, error = run({}, "--variants", "baseline,alpha", command="compare")
    assert code == 2 and "alpha needs prompts that training has not seen" in error and not (tmp_path / "run").exists()


def test_compare_skips_what_is_finished_and_reports(run, tmp_path, monkeypatch):
    arguments = ("--variants", "baseline,all", "--seeds", "2")
    changes = {"max_steps": 2, "evaluation": {"target_accuracy": 0.9}, "task": {"gate_size": 2}}
    code, error = run(changes, *arguments, command="compare")
    assert code == 0, error
    folders = sorted(str(p.parent.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("summary.json"))
    assert folders == [f"{v}/seed-{s}" for v in ("all", "baseline") for s in (0, 1)]
    assert (tmp_path / "run" / "accuracy.png").stat().st_size > 5000
    assert yaml.safe_load((tmp_path / "run" / "all" / "seed-1" / "config.yaml").read_text())["seed"] == 1
    starts = [read_evaluations(tmp_path / "run" / folder)["start"] for folder in folders]
    assert starts[0] == starts[2] and starts[1] == starts[3]
    monkeypatch.setattr("python_trainer.trainer.Trainer", None)  # nothing is trained again
    assert run({}, *arguments, command="compare")[0] == 0
    code, error = run({"max_steps": 3}, *arguments, command="compare")
    assert code == 2 and "holds a run with other settings (max_steps: 2 -> 3)" in error
    with (tmp_path / "run" / "all" / "seed-1" / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 3, "rpo/given_tokens": 3000.0}\n')
    rows = summary_rows(find_runs([tmp_path / "run"]))
    assert ("tokens given, not generated (rpo)", "0", "1,500") in rows, "sums over steps, means over seeds"
    console = Console(file=io.StringIO(), width=100)
    report([tmp_path / "run"], console)
    text = console.file.getvalue()
    for words in ("baseline", "all", "accuracy before", "generated tokens", "share of training", "minus baseline"):
        assert words in text
    assert "earlier runs" not in text, "a counter that is 0 everywhere is left out"
    (tmp_path / "run" / "accuracy.png").unlink()
    assert main(["report", str(tmp_path / "run" / "all"), str(tmp_path / "run" / "baseline")]) == 0
    assert (tmp_path / "run" / "accuracy.png").exists()


def test_as_a_program(settings, tmp_path):
    """The same in a process of its own: progress on standard error, the table on standard output, no traceback."""
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings | {"max_steps": 1}))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/python_trainer:{ROOT}/tests"}
    command = [sys.executable, "-m", "python_trainer", "train", "--config", str(path), "--output-dir", "run"]
    process = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    note, *lines = process.stderr.splitlines()
    assert "an answer got a reward that is neither 0 nor 1" in note
    assert [line.split("  ")[0] for line in lines] == ["train 0/1", "train 1/1"] and "accuracy after" in process.stdout


@pytest.mark.parametrize("program", ["python_trainer", "rlkernels"])
def test_a_deleted_current_folder_is_named(tmp_path, program):
    """Otherwise MKL ends the process and says that libtorch_cpu.so cannot be loaded."""
    command = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m {program} report {tmp_path}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, shell=True, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 2 and process.stderr.count("\n") == 1, process.stderr
    assert "the current folder no longer exists: change to one that does, by cd" in process.stderr


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "python_trainer.command_line.commands", None)  # as where one of its imports fails
    assert main(["train", "--help-settings"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "python_trainer.command_line.commands" in errors
    assert "pip install --no-build-isolation -e '.[train]'" in errors


def test_messages_need_a_chat_template(run, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "AB"}]}))
    one_clear_line(run({"task": {"train_path": str(path)}}), tmp_path, "no chat template")
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
    assert line.startswith("note: an answer got a reward that is neither 0 nor 1: no answer is right or wrong, ")
    cut = {"prompts_per_step": 1, "num_generations": 2, "max_completion_length": 1}
    code, error = run({"rollout": cut, "max_steps": 2}, folder="cut")
    assert code == 0
    assert error.count("note: no answer of the first step ended within rollout.max_completion_length\n") == 1


def sleepy(completions, **_):
    sleepy.calls += 1
    if sleepy.calls in (1, 3):
        raise RuntimeError("the judge is asleep")
    return [float(len(text)) for text in completions]


def test_a_reward_function_that_raises_is_named_with_its_line(run, tmp_path):
    """It raises in the first evaluation, then in the first step; neither run keeps its folder locked."""
    sleepy.calls = 0
    line = sleepy.__code__.co_firstlineno + 3
    changes = {"task": {"reward": "test_cli:sleepy"}, "max_steps": 1, "save": {"save_steps": 1}}
    one_clear_line(run(changes), tmp_path, "RuntimeError: the judge is asleep (", f"test_cli.py:{line})")
    code, error = run()
    assert code == 2 and "error: reward function sleepy raised RuntimeError: the judge is asleep (" in error
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0]
    code, error = run()
    assert code == 0, error
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1]
