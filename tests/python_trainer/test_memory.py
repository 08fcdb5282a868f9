"""Memory told before a run: against hand-worked numbers, against a process, and what is said where it does not fit."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import QUIET, merged, save_tiny_policy
from support import ROOT
from transformers import Qwen2Config

import python_trainer.loop.memory
import python_trainer.loop.parts
from bench import memory as bench
from python_trainer.__main__ import main
from python_trainer.config import load_config
from python_trainer.errors import UserError
from python_trainer.loop.memory import Device, device_here, needs_recomputing, parse_gpus, plan_memory
from python_trainer.model.policy import recomputes
from python_trainer.trainer import Trainer

# hidden, layers, heads, KV heads, intermediate, vocabulary, whether the output layer is the embeddings
QWEN = {
    "0.5b": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151_936, True),
    "3b": (2048, 36, 16, 2, 11_008, 151_936, True),
    "7b": (3584, 28, 28, 4, 18_944, 152_064, False),
}


def qwen(size, folder):
    """Save a config.json and nothing else, and return the folder."""
    hidden, layers, heads, kv_heads, inner, vocab, tied = QWEN[size]
    Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=inner, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=32_768,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.mark.slow
def test_what_is_told_is_what_a_process_takes(tmp_path):
    """One process for both kinds, which loads its libraries once. Larger models: bench/memory.py."""
    bench.make_folder(bench.TINY, tmp_path)
    runs = [bench.settings(bench.TINY, tmp_path, kind) for kind in ("bfloat16, masters", "LoRA, recomputed")]
    assert [bench.plan_bytes(run) for run in runs] == pytest.approx(bench.measure_bytes(runs), rel=0.2)


# gigabytes, worked out by hand
@pytest.mark.parametrize(("size", "gpus", "parallel", "expected"), [
    ("0.5b", "24", "none", {"weights": 0.99, "moments and masters": 5.93, "gradients": 1.98}),
    ("7b", "8x80", "fsdp2",
     {"copy for generation": 15.23, "weights": 3.81, "moments and masters": 7.62, "gradients": 3.81}),
])  # fmt: skip
def test_parts_worked_out_by_hand(tmp_path, size, gpus, parallel, expected):
    values = {"model": {"path": str(qwen(size, tmp_path))}, "parallel": parallel}
    values |= {"rollout": {"memory_bytes": 1 << 32}, "optimizer": {"micro_batch_tokens": 512}}
    memory = plan_memory(load_config(values), parse_gpus(gpus))
    assert {name: round(memory.parts[name] / 1e9, 2) for name in expected} == expected
    token = {"0.5b": 12_288, "7b": 57_344}[size]
    assert memory.cache_tokens == (1 << 32) // token and memory.parts["KV cache"] == 1 << 32


def test_activations_worked_out_by_hand(tmp_path):
    """0.5b in bfloat16, a micro-batch of one answer of 256 tokens behind a prompt of 256, without recomputing."""
    values = {"model": {"path": str(qwen("0.5b", tmp_path))}, "optimizer": {"micro_batch_tokens": 512}}
    memory = plan_memory(load_config(values), parse_gpus("24"))
    layer = 2 * (4 * 896 + 2 * (896 + 128) + 4 * 4864) + 8 * 896  # bytes for each token
    logits = 256 * 151_936
    head = 151_936 * 896
    assert memory.parts["activations"] == 24 * layer * 512 + 24 * logits + 2 * head


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("gpu_*.yaml")), ids=lambda path: path.stem)
def test_presets_pass_their_own_plan(tmp_path, path):
    _, size, *_, gpus = path.stem.split("_")
    config = load_config(path, [f"model.path={qwen(size, tmp_path)}"])
    memory = plan_memory(config, parse_gpus(gpus.removesuffix("gb")))
    assert memory.trouble is None, memory
    assert memory.cache_tokens >= 16 * memory.longest


@pytest.fixture
def small(tmp_path):
    """Return settings whose weights are small beside the memory of a pass."""
    folder = save_tiny_policy(tmp_path / "policy", hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    return {
        "model": {"path": str(folder), "dtype": "float32", "gradient_checkpointing": False},
        "rollout": {"max_completion_length": 100, "memory_bytes": 1 << 22},
        "optimizer": {"micro_batch_tokens": 4096},
    }  # fmt: skip


def plan_of(values, gpus, **changes):
    return plan_memory(load_config(merged(values, changes)), parse_gpus(gpus), prompt=20)


def test_vllm_within_the_trainer_sleeps_during_updates(small):
    for parallel in ("none", "ddp", "fsdp2"):
        vllm, paged = (plan_of(small, "2x24", parallel=parallel, rollout={"engine": e}) for e in ("vllm", "paged"))
        assert ("copy for generation" in paged.parts) == (parallel == "fsdp2")
        assert "copy for generation" not in vllm.parts and vllm.parts["weights of vLLM"] > 0
        awake = sum(vllm.parts[name] for name in vllm.parts if name not in ("KV cache", "weights of vLLM"))
        assert vllm.phases["the update"] == awake and vllm.phases["generation"] > vllm.parts["KV cache"]
    servers = {"engine": "vllm", "vllm_server": ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]}
    elsewhere = plan_of(small, "2x24", parallel="fsdp2", rollout=servers)
    assert "weights of vLLM" not in elsewhere.parts and elsewhere.cache_tokens is None


def test_copies_of_the_weights_for_deltas(small):
    """On a CPU, one for the history of a run and one for servers; on a GPU the host has them."""
    pytest.importorskip("zstandard", reason="this machine lacks zstandard")
    servers = {"rollout": {"engine": "vllm", "vllm_server": "http://127.0.0.1:8000"}}
    cpu = replace(parse_gpus("24"), kind="cpu")
    name = "weights before, for deltas"
    history = {"save": {"weight_history": 1}}
    for changes, copies in ({}, 0), (history, 1), (servers, 1), (history | servers, 2):
        values = merged(small, {"model": {"dtype": "float32"}} | changes)
        parts = plan_memory(load_config(values), cpu, prompt=20).parts
        assert parts.get(name, 0) == copies * parts["weights"]
        assert name not in plan_of(values, "24").parts


def dry_run(values, tmp_path, capsys, *arguments):
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(values))
    capsys.readouterr()
    return main(["train", "--config", str(path), "--dry-run", *arguments]), capsys.readouterr()


def test_a_dry_run_prints_settings_and_memory_and_writes_nothing(small, tmp_path, capsys):
    (tmp_path / "policy" / "model.safetensors").unlink()  # weights are not read
    files = sorted(tmp_path.rglob("*"))
    code, output = dry_run(small, tmp_path, capsys, "--gpus", "24", "--set", "max_steps=7")
    assert code == 0 and not output.err
    assert "\nmax_steps: 7\n" in output.out and "  micro_batch_tokens: 4096\n" in output.out
    for words in ("24.0 GB", "moments and masters", "most in the update", "answers of full length in the KV cache: "):
        assert words in " ".join(output.out.split()), output.out
    assert sorted(tmp_path.rglob("*")) == sorted([*files, tmp_path / "settings.yaml"])
    assert main(["train", "--config", str(tmp_path / "settings.yaml")]) == 2
    assert "train needs --output-dir DIR, or --dry-run" in capsys.readouterr().err


def test_a_run_that_does_not_fit_ends_with_code_2(small, tmp_path, capsys):
    small["model"]["gradient_checkpointing"] = "auto"
    peak_gb = max(plan_of(small, "24").phases.values()) / 1e9
    code, output = dry_run(small, tmp_path, capsys, "--gpus", f"{0.8 * peak_gb:.6f}")
    assert code == 0 and "gradient_checkpointing: auto recomputes" in output.out
    code, output = dry_run(small, tmp_path, capsys, "--gpus", f"{0.01 * peak_gb:.6f}")
    assert code == 2 and "gradient_checkpointing: true" in output.out
    assert output.err.count("\n") == 1 and "smaller optimizer.micro_batch_tokens" in output.err


@pytest.mark.parametrize(("engine", "weights"), [("auto", False), ("vllm", True)])
def test_the_engine_is_the_one_that_a_run_would_take(small, tmp_path, capsys, engine, weights):
    small["rollout"] |= {"engine": engine}
    code, output = dry_run(small, tmp_path, capsys, "--gpus", "24")
    assert code == 0 and ("weights of vLLM" in output.out) == weights


@pytest.mark.parametrize("text", ["", "8x", "x80", "0x80", "80GB", "-1", "0"])
def test_gpus_that_are_none(text):
    with pytest.raises(UserError, match="--gpus must be like 80, or 8x80 for eight of 80 GB, got"):
        parse_gpus(text)


def test_the_memory_of_this_machine():
    assert device_here("cpu").kind == "cpu" and 1 << 28 < device_here("cpu").memory < 1 << 50


@pytest.mark.parametrize(("setting", "memory", "expected"), [
    ("auto", 1.1, False), ("auto", 0.9, True), (False, 0.9, False), (True, 1.1, True),
])  # fmt: skip
def test_checkpointing_by_need(make_config, tmp_path, monkeypatch, setting, memory, expected):
    """``auto`` on a device that is said to be a GPU; the run itself is on the CPU."""
    model = {"gradient_checkpointing": setting, "dtype": "float32"}
    config = make_config(max_steps=1, model=model, rollout={"memory_bytes": 1 << 20})  # else a smaller cache makes room
    without_recomputing = make_config(
        max_steps=1, model=model | {"gradient_checkpointing": False}, rollout={"memory_bytes": 1 << 20}
    )
    peak_bytes = plan_memory(without_recomputing, Device("cuda", 24 << 30)).phases["the update"]
    device = Device("cuda", int(peak_bytes * memory))
    with monkeypatch.context() as patched:
        patched.setattr(python_trainer.loop.memory, "choose_device", lambda name: torch.device("cuda"))
        patched.setattr(python_trainer.loop.parts, "device_here", lambda name, ranks: device)
        assert needs_recomputing(config, device) == (expected and setting == "auto")
        trainer = Trainer(config, tmp_path / "run", console=QUIET)
    assert recomputes(trainer.policy.model) == expected
    trainer.run()
    assert not needs_recomputing(config, device_here("cpu")), "on a CPU auto recomputes nothing"


def test_checkpointing_for_the_cache(make_config):
    """``auto`` also recomputes where activations would leave the KV cache less than an answer."""
    config = make_config(model={"dtype": "float32"})
    plan = plan_memory(config, Device("cuda", 1 << 40))
    tight = Device("cuda", plan.reserved + plan.parts["weights"] + 1000)
    assert plan_memory(config, tight).phases["the update"] <= tight.memory
    assert "the KV cache has room for" in plan_memory(config, tight).trouble
    recomputing = config.with_changes("model", gradient_checkpointing=True)
    assert needs_recomputing(config, tight) and plan_memory(recomputing, tight).trouble is None
    small = config.with_changes("rollout", memory_bytes=1)
    trouble = plan_memory(small, Device("cuda", 1 << 40)).trouble
    assert "the KV cache has room for 0 tokens" in trouble and "raise rollout.memory_bytes" in trouble
    assert not needs_recomputing(small, Device("cuda", 1 << 40)), "a cache of a given size gains nothing"
