"""The type of weights: by the setting, the device, the processor and the size of the model."""

import pytest
import torch
from tiny import save_tiny_policy
from transformers import AutoModelForCausalLM

from python_trainer.errors import UserError
from python_trainer.model.dtype import choose_dtype, count_weights
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda", "bfloat16"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_type_of_the_weights_suits_the_device(name, device, dtype):
    assert choose_dtype(name, torch.device(device), lambda: 1 << 20) == getattr(torch, dtype)


@pytest.mark.parametrize("products", [{"amx_bf16": True}, {"avx512_bf16": True}, {"bf16": True}])
def test_large_models_are_bfloat16_where_the_processor_has_its_products(monkeypatch, products):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: products, raising=False)
    assert choose_dtype("auto", cpu, lambda: 1 << 26) == torch.float32  # 256 MB, which is fused
    assert choose_dtype("auto", cpu, lambda: (1 << 26) + 1) == torch.bfloat16
    assert choose_dtype("float32", cpu, lambda: 1 << 30) == torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    assert choose_dtype("auto", cpu, lambda: 1 << 30) == torch.float32


def test_weights_are_counted_without_being_read(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    config = ModelConfig(path=str(folder))
    assert count_weights(folder, config) == sum(p.numel() for p in model.parameters())
    with pytest.raises(UserError, match="holds no causal language model"):
        count_weights(tmp_path, config)


def test_the_type_follows_the_size_of_the_model_that_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    config = ModelConfig(path=str(save_tiny_policy(tmp_path / "policy")), device="cpu")
    assert load_policy(config).model.dtype == torch.float32
    monkeypatch.setattr("python_trainer.model.dtype.MAX_BYTES", 1000)
    assert load_policy(config).model.dtype == torch.bfloat16
