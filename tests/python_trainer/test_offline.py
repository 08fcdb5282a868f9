"""Extrapolation of checkpoints on disk, by the command line."""

import shutil

import pytest
import torch
import yaml
from conftest import save_tiny_policy
from rich.console import Console
from safetensors.torch import load_file, save_file

from python_trainer.__main__ import main
from python_trainer.checkpoint import list_checkpoints
from python_trainer.run import Trainer
from rlkernels.extrapolation import Comparison, Gate

ANYTHING = ["accelerators.alpha.gate_prompts=6", "accelerators.alpha.min_rise=-1", "accelerators.alpha.min_cosine=0",
            "accelerators.alpha.min_skill=-1e9", "accelerators.alpha.predictor=full"]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(base, three folders): projections that move in a line, an embedding that moves too."""
    home = tmp_path_factory.mktemp("checkpoints")
    base = save_tiny_policy(home / "base")
    folders = []
    for step in (10, 20, 30):
        folder = save_tiny_policy(home / f"checkpoint-{step}")
        weights = load_file(folder / "model.safetensors")
        for i, value in enumerate(weights[name] for name in sorted(weights)):
            if value.ndim == 2:
                torch.manual_seed(i)
                value += 1e-4 * step * torch.outer(torch.randn(len(value)), torch.randn(value.shape[1]))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    return base, folders


def call(capsys, *arguments):
    code = main(["extrapolate", *map(str, arguments)])
    return code, capsys.readouterr()


def test_folders_in_hugging_face_format(checkpoints, tmp_path, capsys):
    base, folders = checkpoints
    out = tmp_path / "out"
    code, said = call(capsys, *folders, "--base", base, "--output-dir", out, "--no-gate", "--set",
                      "accelerators.alpha.horizon=2", "accelerators.alpha.predictor=secant")  # fmt: skip
    assert code == 0, said.err
    assert "3 checkpoints, 14 of 14 modules, predictor secant, back-test skill 1.00" in said.out
    start, last, found = (load_file(f / "model.safetensors") for f in (base, folders[-1], out))
    for name, value in found.items():
        moves = value.ndim == 2 and "embed" not in name
        expected = start[name] + 2 * (last[name] - start[name]) if moves else last[name]
        assert torch.allclose(value, expected, atol=1e-5), name
    assert (out / "tokenizer.json").exists()
    code, said = call(capsys, *folders, "--base", base, "--output-dir", out, "--no-gate")
    assert code == 2 and "already holds files" in said.err
    code, said = call(capsys, *folders, "--base", base, "--output-dir", out / "config.json", "--no-gate")
    assert code == 2 and f"--output-dir must be a folder that can be written, got {out / 'config.json'}" in said.err


@pytest.fixture
def run(make_config, jsonl_files, tmp_path):
    """A finished run with all its checkpoints."""
    task = make_config().task.model_dump(mode="json") | {"gate_path": str(jsonl_files[1])}
    config = make_config(max_steps=4, task=task, save={"save_steps": 1, "save_total_limit": 9})
    Trainer(config, tmp_path / "run", console=Console(quiet=True)).run()
    return tmp_path / "run"


@pytest.mark.parametrize("accepted", [True, False])
def test_a_run_directory_knows_its_task(run, capsys, monkeypatch, accepted):
    found = Comparison(0.25, 0.75, 6, 100.0, 40.0, accepted)
    monkeypatch.setattr(Gate, "compare_in_parts", lambda self, after, before, prompts: after(prompts) and found)
    out = run / "extrapolated"
    # what the run was shared among does not matter: this is one process
    code, said = call(capsys, run, "--output-dir", out, "--set", *ANYTHING, "parallel=ddp")
    assert "factor 1: 0.2500 -> 0.7500 on 6 gate prompts, evidence 100 (needs 40)" in said.out
    if accepted:
        assert code == 0, said.err
        config = yaml.safe_load((run / "config.yaml").read_text())
        start = load_file(f"{config['model']['path']}/model.safetensors")
        found = load_file(out / "model.safetensors")
        assert any(not torch.equal(found[name], start[name]) for name in found)
    else:
        assert code == 2 and "the gate rejected all 3 candidates" in said.err and not out.exists()


def test_a_run_without_gate_prompts_or_with_few_checkpoints_names_the_settings(run, capsys):
    asked = run, "--output-dir", run / "extrapolated", "--set", *ANYTHING, "task.gate_path=null"
    code, said = call(capsys, *asked)
    assert code == 2 and "the task has 0; name a file of them in task.gate_path" in said.err
    for path in list_checkpoints(run / "checkpoints")[:2]:
        shutil.rmtree(path)
    code, said = call(capsys, *asked, "--no-gate")
    assert code == 2 and "few points (full needs 3 tracked steps, there are 2); to keep more" in said.err
    assert "save.save_total_limit" in said.err and "save.save_steps" in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--no-gate"], "--base is needed"),
        (["--base", "BASE"], "the gate needs the task: give --config"),
        (["--base", "BASE", "--no-gate", "--accuracy", "0.5"], "one number for each of 3 checkpoints"),
        (["--base", "BASE", "--no-gate", "--set", "accelerators.alpha.predictor=pls"], "give --accuracy"),
        (["--base", "BASE", "--no-gate", "--accuracy", "0.5", "0.5", "0.5"], "refused: flat accuracy"),
        (["--base", "/nowhere", "--no-gate"], "/nowhere is not a folder"),
    ],
)
def test_what_is_missing_is_named(checkpoints, tmp_path, capsys, change, words):
    base, folders = checkpoints
    change = [str(base) if word == "BASE" else word for word in change]
    code, said = call(capsys, *folders, "--output-dir", tmp_path / "out", *change)
    assert code == 2 and said.err.startswith("error: ") and words in said.err and said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_one_checkpoint_is_not_enough(checkpoints, tmp_path, capsys):
    base, folders = checkpoints
    code, said = call(capsys, folders[0], "--base", base, "--no-gate", "--output-dir", tmp_path / "out")
    assert code == 2 and "refused: few points (full needs 3 tracked steps, there are 1)\n" in said.err
