"""Streaming of safetensors folders, the command line, and the LoRA export."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank1_cases import planted

import rlkernels
from rlkernels.__main__ import main

safetensors_torch = pytest.importorskip("safetensors.torch", reason="this machine lacks safetensors")
save = safetensors_torch.save_file
ROOT = Path(__file__).parents[2]


def write(folder: Path, shards: list[dict[str, torch.Tensor]], index: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    if len(shards) == 1:
        save(shards[0], folder / "model.safetensors")
        return folder
    files = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save(shard, folder / name)
        files |= dict.fromkeys(shard, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.fixture
def model():
    """(base, checkpoint) state: two projections, an untouched one, an embedding, a norm."""
    base, checkpoint = {}, {}
    for i, name in enumerate(["layers.0.q_proj.weight", "layers.0.up_proj.weight", "layers.1.q_proj.weight"]):
        checkpoint[name], base[name] = planted(40 + i, 60, 1e-3, seed=i)
    checkpoint["layers.1.q_proj.weight"] = base["layers.1.q_proj.weight"].clone()
    for name, shape in [("embed_tokens.weight", (100, 60)), ("layers.0.norm.weight", (60,)), ("layers.0.bias", (40,))]:
        base[name], checkpoint[name] = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    return base, checkpoint


def split(state, parts):
    names = sorted(state)
    return [{name: state[name] for name in names[i::parts]} for i in range(parts)]


@pytest.mark.parametrize(("base_parts", "parts", "index"), [(1, 1, True), (3, 1, True), (1, 2, False), (2, 4, True)])
def test_shards_do_not_matter(tmp_path, model, base_parts, parts, index):
    base, checkpoint = model
    folders = write(tmp_path / "a", split(base, base_parts)), write(tmp_path / "b", split(checkpoint, parts), index)
    found = list(rlkernels.stream_top1(*folders))
    assert [f.name for f in found] == ["layers.0.q_proj.weight", "layers.0.up_proj.weight", "layers.1.q_proj.weight"]
    for module in found:
        direct = rlkernels.top1_delta(checkpoint[module.name], base[module.name])
        assert torch.equal(module.update.v, direct.v) and module.shape == tuple(base[module.name].shape)
        assert module.row()["sigma"] == direct.sigma
    assert found[2].update.status == "zero"


def test_dtypes_may_differ_and_filters_and_starts_apply(tmp_path, model):
    base, checkpoint = model
    wide = {name: tensor.float() for name, tensor in base.items()}
    folders = write(tmp_path / "a", [wide]), write(tmp_path / "b", [checkpoint])
    name = "layers.0.q_proj.weight"
    (cold,) = rlkernels.stream_top1(*folders, wanted=lambda n: n == name)
    (warm,) = rlkernels.stream_top1(*folders, wanted=lambda n: n == name, starts={name: cold.update.v})
    assert warm.update.passes < cold.update.passes
    embedding = list(rlkernels.stream_top1(*folders, wanted=lambda n: "embed" in n))
    assert len(embedding) == 1


def test_tied_weights_are_stored_once(tmp_path, model):
    base, checkpoint = model  # a tied head is missing in both files, and no concern of ours
    folders = write(tmp_path / "a", [base]), write(tmp_path / "b", [checkpoint])
    assert len(list(rlkernels.stream_top1(*folders, wanted=lambda n: n != "layers.0.bias"))) == 4
    checkpoint["lm_head.weight"] = checkpoint["embed_tokens.weight"].clone()
    write(tmp_path / "b", [checkpoint])
    assert len(list(rlkernels.stream_top1(*folders))) == 3


def test_errors_name_the_tensor_or_the_file(tmp_path, model):
    base, checkpoint = model
    name = "layers.0.up_proj.weight"
    good = write(tmp_path / "a", [base])

    def fails(state, message, error=ValueError):
        folder = write(tmp_path / "b", [state])
        with pytest.raises(error, match=message):
            list(rlkernels.stream_top1(good, folder))

    fails({**checkpoint, name: checkpoint[name][:, :-1].contiguous()}, rf"'{name}' has shape \[41, 60\].* \[41, 59\]")
    fails({k: v for k, v in checkpoint.items() if k != name}, f"tensor '{name}' is missing in .*b")
    fails({**checkpoint, "layers.9.w": torch.zeros(2, 2)}, "tensor 'layers.9.w' is missing in .*a")
    fails({**checkpoint, name: torch.full((41, 60), math.nan)}, f"tensor '{name}': weight must be finite, got nan")
    fails({**checkpoint, name: checkpoint[name].double()}, f"tensor '{name}' .* torch.float64", TypeError)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        list(rlkernels.stream_top1(good, tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no .safetensors file"):
        list(rlkernels.stream_top1(good, tmp_path / "empty"))
    with pytest.raises(ValueError, match="starts must be keyed by names .* got 'x'"):
        list(rlkernels.stream_top1(good, good, starts={"x": torch.ones(3)}))


@pytest.mark.parametrize("keep", [0, 5, 300, -100])
def test_truncated_files(tmp_path, model, keep):
    folders = write(tmp_path / "a", [model[0]]), write(tmp_path / "b", [model[1]])
    file = folders[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=re.escape(f"{file} is truncated or not a safetensors file")):
        list(rlkernels.stream_top1(*folders))


def test_missing_shard_and_broken_index(tmp_path, model):
    good = write(tmp_path / "a", [model[0]])
    broken = write(tmp_path / "b", split(model[1], 3))
    (broken / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="names model-00002-of-00003.safetensors, which is missing"):
        list(rlkernels.stream_top1(good, broken))
    (broken / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="is not a safetensors index"):
        list(rlkernels.stream_top1(good, broken))


@pytest.mark.skipif(sys.platform != "linux", reason="this machine lacks /proc")
def test_peak_memory_is_the_largest_pair(tmp_path):
    """Resident memory, file maps included, of a process that streams eight pairs of 8 MiB tensors."""
    n = 2048
    base = {f"w{i}": torch.randn(n, n).bfloat16() for i in range(8)}
    folders = write(tmp_path / "a", [base]), write(tmp_path / "b", [{k: v * 1.01 for k, v in base.items()}])
    code = f"""
import threading, time, torch, rlkernels
torch.set_num_threads(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
w = torch.randn(64, 64)
rlkernels.top1_delta(w, torch.zeros(64, 64))  # whatever is loaded on first use
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
names = [m.name for m in rlkernels.stream_top1({str(folders[0])!r}, {str(folders[1])!r}, max_passes=4)]
done = True
watcher.join()
assert len(names) == 8
print((peak - before) / 2**20)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert 8 < float(out.stdout) < 16 + 20  # one pair is 16 MiB; the rest is the solver's vectors and the loader


def test_command_line(tmp_path, model, capsys):
    base, checkpoint = model
    a, b = write(tmp_path / "a", [base]), write(tmp_path / "b", [checkpoint])
    report = tmp_path / "out.json"
    assert main(["rank1", str(a), str(b), str(b), "--json", str(report)]) == 0
    text = capsys.readouterr().out
    assert "layers.0.q_proj.weight" in text and "40x60" in text and "zero" in text
    runs = json.loads(report.read_text())["checkpoints"]
    assert [r["checkpoint"] for r in runs] == [str(b)] * 2
    first, second = (r["modules"][0] for r in runs)
    assert second["passes"] <= first["passes"] and first["status"] == "ok"
    assert first["cosine_to_previous"] is None and second["cosine_to_previous"] > 0.999
    assert " cos " in text and "1.000 ok" in text
    assert {"name", "shape", "sigma", "share", "gap", "angle_bound", "changed"} <= set(first)
    assert main(["rank1", str(a), str(tmp_path / "nowhere")]) == 1
    assert "nowhere is not a folder" in capsys.readouterr().err


def tiny_llama():
    transformers = pytest.importorskip("transformers", reason="this machine lacks transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("scale", [1.0, "alpha", -0.5])
def test_peft_reproduces_the_update(tmp_path, scale):
    peft = pytest.importorskip("peft", reason="this machine lacks peft")
    model = tiny_llama()
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = [name for name in base if "_proj" in name]
    trained = {name: base[name] + 1e-3 * torch.randn_like(base[name]) for name in names}
    updates = rlkernels.top1_deltas({name: (trained[name], base[name]) for name in names})
    rlkernels.export_peft(updates, tmp_path, base_model="tiny", scale=scale)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path)
    merged = dict(adapted.merge_and_unload().named_parameters())
    for name in base:
        wanted = base[name].clone()
        if name in updates:
            update = updates[name]
            factor = update.alpha if scale == "alpha" else scale
            rlkernels.add_rank1_(wanted, update.u, update.v, factor * update.sigma)
        assert torch.allclose(merged[name], wanted, atol=1e-7), name


def test_peft_of_weights_that_are_stored_the_other_way_round(tmp_path):
    peft = pytest.importorskip("peft", reason="this machine lacks peft")
    transformers = pytest.importorskip("transformers", reason="this machine lacks transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=32, n_layer=1, n_head=2)
    )
    name = "transformer.h.0.attn.c_proj.weight"  # Conv1D, and square
    base = dict(model.named_parameters())[name].detach().clone()
    update = rlkernels.top1_delta(base + 1e-3 * torch.randn_like(base), base)
    rlkernels.export_peft({name: update}, tmp_path, base_model="tiny", scale=1.0, fan_in_fan_out=True)
    merged = peft.PeftModel.from_pretrained(model, tmp_path).merge_and_unload()
    wanted = rlkernels.add_rank1_(base, update.u, update.v, update.sigma)
    assert torch.allclose(dict(merged.named_parameters())[name], wanted, atol=1e-7)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    for number, file in enumerate(("model.safetensors", "ema.safetensors")):
        save_file({"w": torch.full((2, 2), float(number))}, tmp_path / file)
    with pytest.raises(ValueError, match=r"'w' is in ema.safetensors and in model.safetensors of "):
        list(rlkernels.stream_top1(tmp_path, tmp_path))


def test_export_refuses_what_it_cannot_write(tmp_path):
    zero = rlkernels.top1_delta(torch.zeros(3, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="updates must hold at least one that is not zero, got 1"):
        rlkernels.export_peft({"w": zero}, tmp_path, base_model="x")
    with pytest.raises(ValueError, match="scale must be 'alpha' or a finite number, got nan"):
        rlkernels.export_peft({"w": zero}, tmp_path, base_model="x", scale=math.nan)
