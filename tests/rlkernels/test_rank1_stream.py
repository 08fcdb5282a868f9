"""Streaming of safetensors folders, and the LoRA export."""

import json
import math
import re
import sys
import warnings
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from rank1_cases import planted
from support import run_python

import rlkernels
from rlkernels.rank1.projections import Projections, is_projection, matrix_names
from rlkernels.weights import checkpoints

safetensors = pytest.importorskip("safetensors.torch", reason="this machine lacks safetensors")
save_file, load_file = safetensors.save_file, safetensors.load_file
transformers = pytest.importorskip("transformers", reason="this machine lacks transformers")
peft = pytest.importorskip("peft", reason="this machine lacks peft")


def write(folder: Path, shards: list[dict[str, torch.Tensor]], stem: str = "model", index: bool = True) -> Path:
    """Write one file, or several and their index."""
    folder.mkdir(exist_ok=True)
    if len(shards) == 1:
        save_file(shards[0], folder / f"{stem}.safetensors")
        return folder
    files = {}
    for i, shard in enumerate(shards):
        name = f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name)
        files |= dict.fromkeys(shard, name)
    if index:
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.fixture
def model():
    """Return base and checkpoint: two projections, an untouched one, an embedding, a norm."""
    base = {}
    checkpoint = {}
    for i, name in enumerate(["layers.0.q_proj.weight", "layers.0.up_proj.weight", "layers.1.q_proj.weight"]):
        checkpoint[name], base[name] = planted(40 + i, 60, 1e-3, seed=i)
    checkpoint["layers.1.q_proj.weight"] = base["layers.1.q_proj.weight"].clone()
    for name, shape in [("embed_tokens.weight", (100, 60)), ("layers.0.norm.weight", (60,)), ("layers.0.bias", (40,))]:
        base[name] = torch.randn(shape).bfloat16()
        checkpoint[name] = torch.randn(shape).bfloat16()
    return base, checkpoint


def split(state, parts):
    names = sorted(state)
    return [{name: state[name] for name in names[i::parts]} for i in range(parts)]


@pytest.mark.parametrize(("base_parts", "parts"), [(1, 1), (3, 1), (1, 2), (2, 4)])
def test_shards_do_not_matter(tmp_path, model, base_parts, parts):
    base, checkpoint = model
    folders = write(tmp_path / "a", split(base, base_parts)), write(tmp_path / "b", split(checkpoint, parts))
    modules = list(rlkernels.stream_top1(*folders))
    assert [f.name for f in modules] == ["layers.0.q_proj.weight", "layers.0.up_proj.weight", "layers.1.q_proj.weight"]
    for module in modules:
        direct = rlkernels.top1_delta(checkpoint[module.name], base[module.name])
        assert torch.equal(module.update.v, direct.v) and module.shape == tuple(base[module.name].shape)
    assert modules[2].update.status == "zero"


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
    fails({**checkpoint, name: checkpoint[name].double()}, f"tensor '{name}': weight .* torch.float64", TypeError)
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
    with pytest.raises(ValueError, match=re.escape(f"{file} is missing, truncated or not a safetensors file")):
        list(rlkernels.stream_top1(*folders))


def test_missing_shard_and_broken_index(tmp_path, model):
    good = write(tmp_path / "a", [model[0]])
    broken = write(tmp_path / "b", split(model[1], 3))
    (broken / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors is missing, truncated or not"):
        list(rlkernels.stream_top1(good, broken))
    for name in ("../a/model.safetensors", "/a/model.safetensors", "..", "", 3):
        index = json.dumps({"weight_map": {"layers.0.q_proj.weight": name}})
        (broken / "model.safetensors.index.json").write_text(index)
        refusal = f"b/{checkpoints.INDEX} must name weight files of its own folder, got {name!r}"
        with pytest.raises(ValueError, match=refusal):
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
import os, threading, time, torch, rlkernels
torch.set_num_threads(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
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
    grown = float(run_python("-c", code))
    assert 8 < grown < 16 + 20  # one pair is 16 MiB; the rest is the solver's vectors and the loader


def merged_by_peft(updates, base, folder):
    """Export updates as an adapter; return the base model, into which PEFT has merged it."""
    rlkernels.export_peft(updates, folder, base_model="tiny", scale=1.0, model=base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of keys that it misses
        return peft.PeftModel.from_pretrained(base, folder).merge_and_unload()


def tiny_llama(size=32):
    sizes = {"hidden_size": size, "intermediate_size": size + 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))


@pytest.mark.parametrize("scale", [1.0, "alpha", -0.5])
def test_peft_reproduces_the_update(tmp_path, scale):
    model = tiny_llama()
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = [name for name in base if "_proj" in name]
    trained = {name: base[name] + 1e-3 * torch.randn_like(base[name]) for name in names}
    updates = rlkernels.top1_deltas({name: (trained[name], base[name]) for name in names})
    rlkernels.export_peft(updates, tmp_path, base_model="tiny", scale=scale)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path)
    merged = dict(adapted.merge_and_unload().named_parameters())
    for name in base:
        expected = base[name].clone()
        if name in updates:
            update = updates[name]
            factor = update.alpha if scale == "alpha" else scale
            rlkernels.add_rank1_(expected, update.u, update.v, factor * update.sigma)
        assert torch.allclose(merged[name], expected, atol=1e-7), name


@pytest.mark.parametrize("by_model", [False, True])
def test_peft_of_weights_that_are_stored_the_other_way_round(tmp_path, by_model):
    sizes = {"n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, tie_word_embeddings=False, **sizes))
    names = ["transformer.h.0.attn.c_proj.weight"]  # Conv1D, and square
    names += ["transformer.wte.weight", "lm_head.weight"] * by_model  # of modules of all three kinds
    base = {name: dict(model.named_parameters())[name].detach().clone() for name in names}
    updates = rlkernels.top1_deltas({name: (w + 1e-3 * torch.randn_like(w), w) for name, w in base.items()})
    layout_options = {"model": model} if by_model else {"fan_in_fan_out": True}
    rlkernels.export_peft(updates, tmp_path, base_model="tiny", scale=1.0, **layout_options)
    merged = dict(peft.PeftModel.from_pretrained(model, tmp_path).merge_and_unload().named_parameters())
    for name, update in updates.items():
        expected = rlkernels.add_rank1_(base[name], update.u, update.v, update.sigma)
        assert torch.allclose(merged[name], expected, atol=1e-7), name


# kind of files -> the beginning of their names, and how many there are
LAYOUTS = {
    "model": ("model", 1), "index": ("model", 2), "shards": ("model", 2), "consolidated": ("consolidated", 1),
    "variant": ("model.fp16", 1), "optimizer": ("optimizer", 1), "other index": ("model.fp16", 2),
    "named file": ("mine", 1), "named index": ("mine", 2),
}  # fmt: skip


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.lists(st.sampled_from([*LAYOUTS]), unique=True))
def test_the_files_are_those_that_from_pretrained_reads(tmp_path_factory, kinds):
    model = tiny_llama(8)
    config, state = model.config, model.state_dict()
    folder = tmp_path_factory.mktemp("layout")
    for number, kind in enumerate(kinds):  # all hold the same names with values of their own
        stem, num_parts = LAYOUTS[kind]
        values = {name: torch.full_like(tensor, number + 1) for name, tensor in state.items()}
        write(folder, split(values, num_parts), stem, kind != "shards")
    named = {"named file": "mine.safetensors", "named index": "mine.safetensors.index.json"}
    config.transformers_weights = next((named[kind] for kind in kinds if kind in named), None)
    config.save_pretrained(folder)
    try:
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder, use_safetensors=True).state_dict()
    except OSError:
        with pytest.raises(ValueError, match="holds no .safetensors file of a model"):
            checkpoints.Folder(folder)
        return
    files = checkpoints.Folder(folder)
    assert set(files) == set(loaded)
    for name, tensor in loaded.items():
        assert torch.equal(files[name], tensor), name


def test_an_index_beside_a_newer_file_and_an_adapter(tmp_path, model):
    base, checkpoint = model
    write(tmp_path / "a", [base])
    write(tmp_path / "b", split(base, 2))  # what was there before
    write(tmp_path / "b", [checkpoint])
    assert [m.update.status for m in rlkernels.stream_top1(tmp_path / "a", tmp_path / "b")] == ["ok", "ok", "zero"]
    for shard in (tmp_path / "b").glob("model-*"):
        shard.unlink()
    assert len(list(rlkernels.stream_top1(tmp_path / "a", tmp_path / "b"))) == 3
    (tmp_path / "b" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b holds an adapter .adapter_config.json.: merge it"):
        list(rlkernels.stream_top1(tmp_path / "a", tmp_path / "b"))


def tiny_qwen2_vl():
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}  # fmt: skip
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    tokens = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen2VLForConditionalGeneration(config)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2_vl])
def test_peft_reads_every_key_of_a_whole_checkpoint(tmp_path, build):
    """Embeddings and vision-language parts too, whose files have other names than the modules."""
    base = build()
    trained = build()
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for weight, trained_weight in zip(base.parameters(), trained.parameters()):
            trained_weight.copy_(weight)
            if weight.ndim == 2:
                trained_weight.add_(torch.outer(torch.randn(weight.shape[0]), torch.randn(weight.shape[1])), alpha=1e-3)
    trained.save_pretrained(tmp_path / "trained")
    modules = rlkernels.stream_top1(tmp_path / "base", tmp_path / "trained", wanted=lambda name: True)
    updates = {module.name: module.update for module in modules}
    with pytest.raises(ValueError, match="model must be given for '.*embed_tokens'"):
        rlkernels.export_peft(updates, tmp_path / "adapter", base_model="tiny", scale=1.0)
    merged = merged_by_peft(updates, base, tmp_path / "adapter")
    for (name, merged_weight), expected in zip(merged.named_parameters(), trained.parameters()):
        assert torch.allclose(merged_weight, expected, atol=1e-6), name
    with pytest.raises(ValueError, match="updates must have names of modules of the model, got 'layers.0.nothing'"):
        rlkernels.export_peft({"layers.0.nothing": next(iter(updates.values()))}, tmp_path, base_model="x", model=base)


def mixture(kind):
    """Return a small mixture of experts; files of the first two hold a tensor an expert, of the others one a layer."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    if kind == "qwen3":
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=24)
        return transformers.Qwen3MoeForCausalLM(config)
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))
    if kind == "llama4":
        config = transformers.Llama4TextConfig(**sizes, num_local_experts=4, intermediate_size_mlp=24)
        return transformers.Llama4ForCausalLM(config)
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, num_local_experts=4))


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "llama4", "gpt-oss"])
def test_experts_are_streamed_and_exported_each_by_itself(tmp_path, kind):
    torch.manual_seed(0)
    base = mixture(kind)
    trained = mixture(kind)
    trained.load_state_dict(base.state_dict())
    with torch.no_grad():
        for matrix in Projections.of(dict(trained.named_parameters())).values():
            matrix.add_(torch.outer(torch.randn(matrix.shape[0]), torch.randn(matrix.shape[1])), alpha=1e-3)
    for model, name in ((base, "base"), (trained, "trained")):
        model.save_pretrained(tmp_path / name)
    updates = {module.name: module.update for module in rlkernels.stream_top1(tmp_path / "base", tmp_path / "trained")}
    experts = [name for name in updates if ".experts" in name]
    assert len(experts) == 2 * 4 * (3 if kind in ("qwen3", "mixtral") else 2)  # layers, experts, projections
    with pytest.raises(ValueError, match="model must be given for '.*experts.*: only the base model tells how PEFT"):
        rlkernels.export_peft({experts[0]: updates[experts[0]]}, tmp_path / "adapter", base_model="tiny")
    merged = merged_by_peft(updates, base, tmp_path / "adapter")
    expected = dict(trained.named_parameters())
    for name, weight in merged.named_parameters():
        assert torch.allclose(weight, expected[name], atol=1e-6), name


def test_factors_of_experts_are_float32_whatever_is_the_default(tmp_path, request):
    update = rlkernels.top1_delta(torch.randn(32, 24), torch.zeros(32, 24))
    model = mixture("qwen3")
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    name = "model.layers.0.mlp.experts.down_proj[0]"
    rlkernels.export_peft({name: update}, tmp_path, base_model="tiny", scale=1.0, model=model)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("expert", ["down_proj[4]", "4.down_proj.weight", "other[0]"])
def test_an_expert_that_the_model_lacks_is_refused(tmp_path, expert):
    name = f"model.layers.0.mlp.experts.{expert}"
    update = rlkernels.top1_delta(torch.randn(32, 24), torch.zeros(32, 24))
    updates = {"model.layers.0.mlp.experts.down_proj[0]": update, name: update}
    with pytest.raises(ValueError, match=f"names of modules of the model, got '{re.escape(name)}', which fits none"):
        rlkernels.export_peft(updates, tmp_path, base_model="tiny", model=mixture("qwen3"))


@pytest.mark.parametrize(
    ("name", "shape", "matrices"),
    [("model.layers.0.mlp.experts.gate_up_proj", (3, 8, 4), 3), ("layers.0.mlp.experts.gate_up_proj_bias", (3, 8), 0),
     ("shared.weight", (9, 4), 0), ("layers.0.mlp.shared_expert.up_proj.weight", (9, 4), 1),
     ("block.0.layer.0.SelfAttention.relative_attention_bias.weight", (9, 4), 0), ("score.weight", (1, 4), 0),
     ("output.weight", (9, 4), 0), ("encoder.layer.0.attention.output.dense.weight", (4, 4), 1),
     ("backbone.layers.0.mixer.A_log", (8, 4), 0), ("backbone.layers.0.mixer.conv1d.weight", (8, 1, 4), 0),
     ("model.layers.0.conv.in_proj.weight", (8, 4), 1), ("transformer.wte.weight", (9, 4), 0),
     ("transformer.h.0.attn.c_attn.weight", (4, 8), 1), ("model.layers.0.self_attn.q_norm.weight", (4,), 0),
     ("lm_head.weight", (9, 4), 0), ("model.embed_tokens.weight", (9, 4), 0), ("visual.patch.weight", (8, 3, 2, 2), 0),
     ("model.layers.0.self_attn.q_proj.bias", (4,), 0), ("model.layers.0.q_proj.weight", (0, 4), 0)],
)  # fmt: skip
def test_projections_by_name_and_shape(name, shape, matrices):
    """Heads, biases, tables and convolutions as Transformers names them are no projections."""
    assert len(matrix_names(name, shape) if is_projection(name) else []) == matrices


def test_what_no_projection_holds_is_named_with_its_share():
    weights = {"embed.weight": torch.zeros(6, 4), "up": torch.zeros(2, 9, 4), "norm.weight": torch.zeros(4)}
    projections = Projections.of(weights)
    assert list(projections) == ["up[0]", "up[1]"] and "embed.weight" not in projections
    projections["up[1]"].fill_(1)
    assert weights["up"].sum() == 36 and not weights["up"][0].any(), "matrices are views"
    message = "28.0% of the parameters are no projections and stay as trained: embed.weight, norm.weight"
    assert projections.describe_left_out() == message


def test_export_refuses_what_it_cannot_write(tmp_path):
    zero = rlkernels.top1_delta(torch.zeros(3, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="updates must hold at least one that is not zero, got 1"):
        rlkernels.export_peft({"w": zero}, tmp_path, base_model="x")
    with pytest.raises(ValueError, match="scale must be 'alpha' or a finite number, got nan"):
        rlkernels.export_peft({"w": zero}, tmp_path, base_model="x", scale=math.nan)
    update = rlkernels.top1_delta(torch.ones(3, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="updates must hold each weight once, got 'w' and 'w.weight'"):
        rlkernels.export_peft({"w": update, "w.weight": update}, tmp_path, base_model="x")
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 3), "head": torch.nn.Linear(3, 3)})
    model["head"].weight = model["embed"].weight  # PEFT would add both updates to it
    with pytest.raises(ValueError, match="each weight once, got 'embed' and 'head.weight'"):
        rlkernels.export_peft({"embed.weight": update, "head.weight": update}, tmp_path, base_model="x", model=model)
