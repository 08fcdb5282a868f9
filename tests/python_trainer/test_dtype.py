"""The type of weights: by the setting, the device, the processor and the size of the model."""

import json

import pytest
import torch
from conftest import QUIET, train
from tiny import save_tiny_policy
from transformers import AutoModelForCausalLM

from python_trainer.checkpoint import list_checkpoints, load_checkpoint
from python_trainer.errors import UserError
from python_trainer.model.loading import described_model, find_dtype, run_dtype
from python_trainer.model.settings import ModelConfig
from python_trainer.trainer import Trainer


def test_type_of_the_weights_suits_the_device():
    for setting, on_cpu, on_gpu in (
        ("auto", torch.float32, torch.bfloat16),
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
    ):
        assert find_dtype(ModelConfig(dtype=setting), torch.device("cpu")) == on_cpu, setting
        assert find_dtype(ModelConfig(dtype=setting), torch.device("cuda")) == on_gpu, setting


@pytest.mark.parametrize("products", [{"amx_bf16": True}, {"avx512_bf16": True}, {"bf16": True}])
def test_large_models_are_bfloat16_where_the_processor_has_its_products(monkeypatch, products):
    def found(weights, setting="auto"):
        model = torch.nn.Linear(1, weights, bias=False, device="meta")
        monkeypatch.setattr("python_trainer.model.loading.described_model", lambda config: model)
        return find_dtype(ModelConfig(dtype=setting), torch.device("cpu"))

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: products, raising=False)
    assert found(1 << 26) == torch.float32  # 256 MB, which is fused
    assert found((1 << 26) + 1) == torch.bfloat16
    assert found(1 << 30, "float32") == torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    assert found(1 << 30) == torch.float32


def test_sizes_of_weights_are_known_without_weights(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    config = ModelConfig(path=str(folder))
    assert [p.shape for p in described_model(config).parameters()] == [p.shape for p in model.parameters()]
    with pytest.raises(UserError, match="holds no causal language model"):
        described_model(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("wanted", ["auto", "bfloat16", "float32"])
def test_a_run_goes_on_in_its_type_where_auto_has_become_another(make_config, tmp_path, monkeypatch, wanted):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    train(make_config(max_steps=1), tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["dtype"] == "float32"
    monkeypatch.setattr("python_trainer.model.loading.MAX_BYTES", 1000)  # the model is large now
    config = make_config(max_steps=2, model={"dtype": wanted})
    resumed, kept = train(config, tmp_path / "run", resume=True), "bfloat16" if wanted == "bfloat16" else "float32"
    assert resumed.policy.model.dtype == getattr(torch, kept)
    assert load_checkpoint(list_checkpoints(tmp_path / "run/checkpoints")[-1])["dtype"] == kept
    assert f"dtype: {wanted}" in (tmp_path / "run/config.yaml").read_text(), "what was asked for"
    fresh = Trainer(make_config(), tmp_path / "fresh", console=QUIET)
    assert fresh.policy.model.dtype == torch.bfloat16


def test_a_checkpoint_that_names_no_type_changes_nothing():
    config = ModelConfig(device="cpu")
    assert all(run_dtype(config, saved) == "float32" for saved in ({"dtype": "float16"}, {}, [], None))
    assert run_dtype(config, {"dtype": "bfloat16"}) == "bfloat16"
