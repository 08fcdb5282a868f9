"""Models and adapters from checkpoints, and which checkpoints are kept."""

import json
import shutil

import pytest
import torch
import yaml
from huggingface_hub.errors import HFValidationError
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import python_trainer.export
from python_trainer import Callback
from python_trainer.__main__ import main
from python_trainer.checkpoint import list_checkpoints, load_checkpoint
from python_trainer.errors import UserError
from python_trainer.export import export
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.run_state import best_evaluated
from python_trainer.trainer import Trainer

QUIET = Console(quiet=True)


class Graded(Trainer):
    """Evaluations that find what they are told."""

    def _evaluate_all(self, rows):
        accuracy = [0.1, 0.2, 0.6, 0.3, 0.4][self.state.step]
        return {"eval/accuracy": accuracy, "eval/reward": -accuracy}, [accuracy] * 6


class Stops(Callback):
    def on_step(self, trainer, step, metrics):
        if step == 3:
            raise RuntimeError("enough")


@pytest.fixture
def finished(make_config, tmp_path):
    save = {"save_steps": 1, "save_total_limit": 1}
    config = make_config(task={"accuracy": "digits"}, evaluation={"eval_steps": 1}, save=save)
    trainer = Graded(config, tmp_path / "run", console=QUIET)
    trainer.run()
    return trainer


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_best_of_those_that_are_there():
    rows = [[0, 0.9, 0.9], [2, 0.5, 0.5], [4, 0.5, 0.5], [6, 0.8, 0.1]]
    assert best_evaluated(rows, [2, 4, 5, 6]) == 4 and best_evaluated(rows, [5]) is None


def test_the_best_checkpoint_is_kept_and_exported(finished, tmp_path, capsys):
    kept = list_checkpoints(finished.checkpoints)
    assert [path.name for path in kept] == ["step-000002", "step-000004"]
    assert main(["export", str(finished.folder), "--checkpoint", "best", "--output-dir", str(tmp_path / "best")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'best'}\n"
    newest = export(finished.folder)
    for folder, checkpoint in ((tmp_path / "best", kept[0]), (newest, kept[1])):
        saved, got = load_checkpoint(checkpoint)["model"], weights(folder)
        assert all(torch.equal(got[name], value) for name, value in saved.items())
        assert AutoTokenizer.from_pretrained(folder)("AB")["input_ids"] == finished.policy.encode(["AB"])[0]
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
            (folder / "README.md").stat().st_mode & 0o777
        }
    card = (tmp_path / "best" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "transformers" and "# run, step 2" in card and "| 3 |" not in card
    assert "| 2 | 0.6000 | -0.6000 |" in card and "optimizer.learning_rate: 0.01" in card
    with pytest.raises(UserError, match="--output-dir must be a new folder"):
        export(finished.folder)


def test_without_save_best_only_the_newest_are_kept(make_config, tmp_path):
    save = {"save_steps": 1, "save_total_limit": 1, "save_best": False}
    Graded(make_config(evaluation={"eval_steps": 1}, save=save), tmp_path / "run", console=QUIET).run()
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000004"]


def test_an_interrupted_run_can_be_exported(make_config, tmp_path):
    with pytest.raises(UserError, match="enough"):
        Trainer(make_config(), tmp_path / "run", console=QUIET, callbacks=[Stops]).run()
    assert not (tmp_path / "run" / "summary.json").exists()
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000003")["model"]
    assert all(
        torch.equal(value, saved[name]) for name, value in weights(export(tmp_path / "run")).items() if name in saved
    )


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3, 40, 5]])).logits


def test_an_adapter_is_that_of_the_merged_model_and_can_be_trained_from(make_config, tmp_path, tiny_policy):
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    config = make_config(max_steps=2, model={"lora": lora}, optimizer={"learning_rate": 0.05})
    Trainer(config, tmp_path / "run", console=QUIET).run()
    merged = AutoModelForCausalLM.from_pretrained(export(tmp_path / "run"))
    adapter = export(tmp_path / "run", output=tmp_path / "adapter", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(tiny_policy)
    assert (logits(merged) - logits(base)).abs().max() > 1e-2
    shutil.copytree(adapter, tmp_path / "other")
    wanted = json.loads((adapter / "adapter_config.json").read_text())
    assert sorted(wanted["target_modules"]) == ["down_proj", "q_proj"] and wanted["base_model_name_or_path"] == str(
        tiny_policy
    )
    assert "library_name: peft" in (adapter / "README.md").read_text()
    policy = load_policy(ModelConfig(path=str(adapter), device="cpu"))
    torch.testing.assert_close(logits(policy.model), logits(merged), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        logits(peft.PeftModel.from_pretrained(base, adapter)), logits(merged), rtol=1e-4, atol=1e-4
    )
    again = make_config(max_steps=1, model={"path": str(adapter), "lora": lora})
    save_file(
        {"base_model.model.other.lora_A.weight": torch.zeros(4, 4)}, tmp_path / "other" / "adapter_model.safetensors"
    )
    with pytest.raises(UserError, match="does not fit its model: Found missing adapter keys"):
        load_policy(ModelConfig(path=str(tmp_path / "other"), device="cpu"))
    Trainer(again, tmp_path / "again", console=QUIET).run()
    assert not all(
        torch.equal(a, b)
        for a, b in zip(weights(export(tmp_path / "again")).values(), weights(tmp_path / "run" / "export").values())
    )


def test_an_adapter_without_its_base_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gone"}')
    with pytest.raises(UserError, match=r"the base of the adapter .*there is no folder gone"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "small"}')
    with pytest.raises(UserError, match="lacks adapter_model.safetensors"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="names no base model"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))


def test_what_cannot_be_exported_is_named(finished, tmp_path):
    for options, words in (
        ({"checkpoint": "3"}, "--checkpoint must be best or one of 2, 4, got 3"),
        ({"adapter": True}, "--adapter needs a run with model.lora"),
    ):
        with pytest.raises(UserError, match=words):
            export(finished.folder, **options)
    with pytest.raises(UserError, match="is no run directory"):
        export(tmp_path)
    assert not (finished.folder / "export").exists()


def test_push_makes_a_private_repository(finished, monkeypatch, capsys):
    calls = []

    class Hub:
        def create_repo(self, *arguments, **options):
            calls.append((arguments, options))
            if "bad" in arguments[0]:
                raise HFValidationError("no such name")

        def upload_folder(self, **options):
            calls.append(options)
            return "https://hub/commit"

    monkeypatch.setattr(python_trainer.export, "HfApi", Hub)
    assert main(["export", str(finished.folder), "--push", "me/sums"]) == 0
    folder = finished.folder / "export"
    assert calls == [(("me/sums",), {"private": True, "exist_ok": True}), {"repo_id": "me/sums", "folder_path": folder}]
    assert capsys.readouterr().out.endswith("https://hub/commit\n")
    with pytest.raises(UserError, match="--push bad//name: no such name; .*export is complete"):
        python_trainer.export.push(folder, "bad//name")
