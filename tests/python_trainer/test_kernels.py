"""The kernels of a run on a GPU: proved for its shapes before the model is loaded, and kept with it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config

from python_trainer.config import load_config
from python_trainer.distributed import RankGroup
from python_trainer.loop import kernels
from python_trainer.run.checkpoint import load_checkpoint, save_checkpoint
from rlkernels import backend, verdicts
from rlkernels.proof import PROVABLE, Workload

GPU = {"gpu": "NVIDIA X", "capability": "9.0", "driver": "580", "torch": "2", "triton": "3"}
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Pretend a GPU, as far as these tests look at it; list what is proved, by ops and workload."""
    proofs = []
    facts = dict(GPU)

    def prove(ops, *, device, workload, say):
        proofs.append((ops, workload))
        choices = {op: {"backend": "torch"} for op in ops if op != "sample_tokens"}
        choices["verify_drafts"] = {"backend": "triton"}
        choices["paged_attention"] = {"backend": "torch", "candidates": {"triton": {"cases": {"decode": {}}}}}
        return {"verdicts": choices, "left_out": {"sample_tokens": "no time left of 60 s"}}

    monkeypatch.setenv("RLKERNELS_CACHE", str(tmp_path / "cache"))
    for name in ("RLKERNELS_BACKEND", "RLKERNELS_PROVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kernels, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    monkeypatch.setattr(backend, "unavailable", lambda op, name, device: None)
    monkeypatch.setattr(backend, "RECORDS", {})
    monkeypatch.setattr(verdicts, "device_facts", lambda index: facts)
    monkeypatch.setattr(kernels, "prove", prove)
    backend.set_run_backends({})
    yield SimpleNamespace(proofs=proofs, facts=facts)
    backend.set_run_backends({})


def settle(*overrides, saved=None, ranks=None):
    notes = []
    config = load_config("smoke", ["accelerators.enabled=[drafts]", *overrides])
    return kernels.settle_kernels(config, saved, ranks or RankGroup(), notes.append), notes


def test_a_run_proves_what_it_needs_for_its_shapes(gpu):
    saved, notes = settle()
    ((ops, workload),) = gpu.proofs
    assert "verify_drafts" in ops and "token_logprobs" in ops and not {"dtw", "top1_deltas"} & {*ops}
    assert workload == Workload("bfloat16", 3, 1, 32, 96, 259, 8, 4, 256, 32)
    assert backend.choose("paged_attention", CUDA) == "triton" and backend.choose("write_kv", CUDA) == "torch"
    assert backend.choose("dtw", CUDA) == backend.choose("sample_tokens", CUDA) == "torch"
    assert saved["backends"].keys() == {*PROVABLE} and saved["device"] == GPU
    assert "NVIDIA X" in notes[0] and "sample_tokens: no time left of 60 s; the run takes torch" in notes
    by_torch = notes[-1].partition("; of torch: ")[2].split(", ")
    assert len(by_torch) > 3 and by_torch == [op for op in ops if op in by_torch], "always in one order"


def test_shapes_may_have_other_names(gpu, tmp_path):
    GPT2Config(n_embd=96, n_head=6, vocab_size=99).save_pretrained(tmp_path)
    settle(f"model.path={tmp_path}", "model.dtype=float32")
    assert gpu.proofs[0][1] == Workload("float32", 6, 6, 16, 96, 99, 8, 4, 256, 32)


def test_a_run_that_goes_on_keeps_its_kernels(gpu, tmp_path):
    first, _ = settle()
    saved = load_checkpoint(save_checkpoint(tmp_path, 1, {"kernels": first}, keep=1))
    backend.set_run_backends({})
    resumed, notes = settle(saved=saved)
    assert resumed == first and len(gpu.proofs) == 1 and not notes
    assert backend.choose("paged_attention", CUDA) == "triton"
    gpu.facts["gpu"] = "NVIDIA Y"
    settle(saved=saved)
    assert len(gpu.proofs) == 2, "on another GPU they are proved anew"
    settle(saved={})
    assert len(gpu.proofs) == 3


def test_the_proof_can_be_skipped(gpu, monkeypatch):
    monkeypatch.setenv("RLKERNELS_PROVE", "off")
    monkeypatch.setattr(backend, "RECORDS", {"9.0": {"token_logprobs": "triton"}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backends = settle()[0]["backends"]
    assert not gpu.proofs and backends["token_logprobs"] == "triton" and backends["dtw"] == "torch"
    monkeypatch.delenv("RLKERNELS_PROVE")
    monkeypatch.setenv("RLKERNELS_BACKEND", "torch")
    settle()
    assert not gpu.proofs


def test_ranks_on_different_gpus_take_the_kernels_of_torch(gpu):
    pair = RankGroup()
    pair.gather = lambda value: [value, {**value, "gpu": "NVIDIA Y"}]
    saved, notes = settle(ranks=pair)
    assert set(saved["backends"].values()) == {"torch"} and not gpu.proofs and "different GPUs" in notes[0]
