"""The files from which vLLM's worker reads a policy; inside vLLM: ``tests/with_vllm``."""

import json

import pytest
import torch

from rlkernels.integrations.vllm_worker import read_policy

save_file = pytest.importorskip("safetensors.torch", reason="this machine lacks safetensors").save_file


def test_it_reads_what_from_pretrained_reads(tmp_path):
    def names():
        return [name for name, _ in read_policy(tmp_path, None, torch.device("cpu"))]

    save_file({"b": torch.ones(2)}, tmp_path / "b.safetensors")
    save_file({"c": torch.ones(2)}, tmp_path / "c.safetensors")
    assert names() == ["b", "c"]  # nothing tells which are the model's
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"c": "c.safetensors"}}))
    assert names() == ["c"]
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert names() == ["a"]
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds an adapter \(adapter_config.json\): merge it into the weights first"):
        names()
