"""Models and adapters that a run writes, and which checkpoints are kept."""

import json
import shutil

import pytest
import torch
from conftest import QUIET, train
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from python_trainer.checkpoint import list_checkpoints, load_checkpoint
from python_trainer.errors import UserError
from python_trainer.evaluation import Evaluator
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.run_state import best_evaluated
from python_trainer.trainer import Trainer

JUDGED = {"reward": ["tiny:mostly_digits", "conftest:digits"], "reward_weights": [0, 1]}


@pytest.fixture(autouse=True)
def grades(monkeypatch):
    """Accuracies that evaluations find, by step."""
    found = [0.1, 0.2, 0.6, 0.3, 0.4]

    def evaluate_all(evaluator, rows):
        accuracy = found[evaluator.state.step]
        return {"eval/accuracy": accuracy, "eval/reward": -accuracy}, [accuracy] * 6

    monkeypatch.setattr(Evaluator, "_evaluate_all", evaluate_all)
    return found


@pytest.fixture
def finished(make_config, tmp_path):
    save = {"save_steps": 1, "save_total_limit": 1}
    config = make_config(task=JUDGED, evaluation={"eval_steps": 1}, save=save)
    return train(config, tmp_path / "run")


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_best_of_those_that_are_there():
    rows = [[0, 0.9, 0.9], [2, 0.5, 0.5], [4, 0.5, 0.5], [6, 0.8, 0.1]]
    assert best_evaluated(rows, [2, 4, 5, 6]) == 4 and best_evaluated(rows, [5]) is None


def test_the_best_checkpoint_is_kept_and_written_as_a_model(finished):
    kept = list_checkpoints(finished.checkpointer.checkpoints)
    assert [path.name for path in kept] == ["step-000002", "step-000004"]
    for name, checkpoint in (("best", kept[0]), ("model", kept[1])):
        folder = finished.folder / name
        saved, got = load_checkpoint(checkpoint)["model"], weights(folder)
        assert all(torch.equal(got[name], value) for name, value in saved.items())
        assert AutoTokenizer.from_pretrained(folder)("AB")["input_ids"] == finished.policy.encode(["AB"])[0]
    last = load_checkpoint(kept[1])["model"]
    assert all(torch.equal(p, last[name]) for name, p in finished.policy.model.named_parameters() if name in last)


def test_a_last_step_that_is_the_best_is_the_model_alone(make_config, tmp_path, grades):
    save = {"save_steps": 1}
    Trainer(make_config(task=JUDGED, evaluation={"eval_steps": 1}, save=save), tmp_path / "run", console=QUIET).run()
    assert (tmp_path / "run" / "best").is_dir()
    grades.append(0.9)
    longer = make_config(max_steps=5, task=JUDGED, evaluation={"eval_steps": 1}, save=save)
    Trainer(longer, tmp_path / "run", console=QUIET, resume=True).run()
    assert (tmp_path / "run" / "model").is_dir() and not (tmp_path / "run" / "best").exists()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3, 40, 5]])).logits


def test_an_adapter_is_that_of_the_merged_model_and_can_be_trained_from(make_config, tmp_path, tiny_policy):
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    options = {"optimizer": {"learning_rate": 0.05}}
    config = make_config(max_steps=2, model={"lora": lora}, **options)
    Trainer(config, tmp_path / "run", console=QUIET).run()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    adapter = tmp_path / "run" / "adapter"
    base = AutoModelForCausalLM.from_pretrained(tiny_policy)
    assert (logits(merged) - logits(base)).abs().max() > 1e-2
    shutil.copytree(adapter, tmp_path / "other")
    wanted = json.loads((adapter / "adapter_config.json").read_text())
    assert sorted(wanted["target_modules"]) == ["down_proj", "q_proj"] and wanted["base_model_name_or_path"] == str(
        tiny_policy
    )
    policy = load_policy(ModelConfig(path=str(adapter), device="cpu"))
    torch.testing.assert_close(logits(policy.model), logits(merged), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        logits(peft.PeftModel.from_pretrained(base, adapter)), logits(merged), rtol=1e-4, atol=1e-4
    )
    again = make_config(max_steps=1, model={"path": str(adapter), "lora": lora}, **options)
    save_file(
        {"base_model.model.other.lora_A.weight": torch.zeros(4, 4)}, tmp_path / "other" / "adapter_model.safetensors"
    )
    with pytest.raises(UserError, match="does not fit its model: Found missing adapter keys"):
        load_policy(ModelConfig(path=str(tmp_path / "other"), device="cpu"))
    Trainer(again, tmp_path / "again", console=QUIET).run()
    assert not all(
        torch.equal(a, b)
        for a, b in zip(weights(tmp_path / "again" / "model").values(), weights(tmp_path / "run" / "model").values())
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
