"""Memory told before a run: against hand-worked numbers, against a process, and what is said where it does not fit."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_policy
from rich.console import Console
from transformers import Qwen2Config

from bench import memory as bench
from python_trainer.__main__ import main
from python_trainer.config import check_config, load_config
from python_trainer.errors import UserError
from python_trainer.plan import command
from python_trainer.plan.advice import changed
from python_trainer.plan.command import device_here, needs_recomputing, parse_gpus
from python_trainer.plan.memory import Memory
from python_trainer.plan.passes import Device, PlannedPolicy, Step, first_layers, training_bytes
from python_trainer.plan.peak import Peak
from python_trainer.trainer import Trainer
from rlkernels import linear_token_logprobs

ROOT = Path(__file__).parents[2]
QUIET = Console(quiet=True)
# hidden, layers, heads, KV heads, intermediate, vocabulary, whether the output layer is the embeddings
QWEN = {
    "0.5b": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151_936, True),
    "3b": (2048, 36, 16, 2, 11_008, 151_936, True),
    "7b": (3584, 28, 28, 4, 18_944, 152_064, False),
}
CPU = Device("cpu", 1 << 40)


def qwen(size, folder):
    """A folder with a config.json and nothing else."""
    hidden, layers, heads, kv_heads, inner, vocab, tied = QWEN[size]
    Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=inner, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=32_768,
    ).save_pretrained(folder)  # fmt: skip
    return folder


KINDS = ["float32", "bfloat16, masters", "LoRA, recomputed", "bfloat16, recomputed, offloaded"]


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """What is told and what a process takes, by kind: one process for all, which loads its libraries once."""
    folder = tmp_path_factory.mktemp("taken") / "policy"
    bench.make_folder(bench.TINY, folder)
    runs = [bench.settings(bench.TINY, folder, kind) for kind in KINDS]
    return dict(zip(KINDS, zip(map(bench.planned, runs), bench.measured(runs))))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_told_is_what_a_process_takes(taken, kind):
    """Larger models: bench/memory.py."""
    told, found = taken[kind]
    assert told == pytest.approx(found, rel=0.15)


def test_tensors_alive_are_counted():
    weight, bias = torch.empty(50, 20, device="meta", requires_grad=True), torch.empty(50, device="meta")
    with Peak([weight, bias]) as peak:
        x = torch.empty(10, 20, device="meta")
        assert peak.now == 800, "10 x 20 floats"
        y = torch.nn.functional.linear(x, weight, bias)
        view = y.t()[3:]
        assert peak.now == 800 + 2000, "views hold nothing, nor does what was there before"
        z = y.exp()  # kept for its own gradient
        del y
        assert peak.now == 800 + 2000 + 2000
        del view
        assert peak.now == 800 + 2000, "the sum is not needed for a gradient"
        z.sum().backward()
        del x, z
        assert peak.now == weight.grad.nbytes and peak.most > peak.now + 2000


@pytest.mark.parametrize(("gpu_memory", "columns"), [(None, 1 << 10), (24 << 30, 1 << 12)])
def test_blocks_of_logits_count(gpu_memory, columns):
    hidden, weight = (torch.empty(n, 8, device="meta") for n in (4096, 50_000))
    with Peak([hidden, weight], gpu_memory) as peak:
        linear_token_logprobs(hidden, weight, torch.empty(4096, dtype=torch.int64, device="meta"))
    assert 4096 * columns * 4 < peak.most < 4096 * columns * 4 * 8 < 4096 * 50_000 * 4


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_few_layers_tell_of_all(tmp_path, kind, recompute, monkeypatch):
    folder = save_tiny_policy(tmp_path, num_hidden_layers=9, vocab=200)
    config = check_config({"model": {"path": str(folder), "dtype": "bfloat16"}}, source="test").model
    policy, device = PlannedPolicy(config, Device(kind, 24 << 30)), Device(kind, 24 << 30)
    step = Step(4, 4, prompt=9, answer=30, tokens=400, share=True, entropy=True)
    with first_layers(policy.model) as (layers, left):
        assert len(layers) == len(policy.model.model.layers) == 3 and left == 6
    assert len(policy.model.model.layers) == 9
    found = training_bytes(policy, device, step, recompute=recompute)
    assert not policy.model.is_gradient_checkpointing and not policy.model.training
    monkeypatch.setattr("python_trainer.plan.passes.LAYERS", 9)
    assert found == training_bytes(policy, device, step, recompute=recompute)


# gigabytes by hand, in docs/scale.md
@pytest.mark.parametrize(
    ("size", "gpus", "parallel", "parts"),
    [
        ("0.5b", "24", "none", {"weights": 0.99, "float32 masters": 1.98, "moments": 3.95, "gradients": 1.98}),
        ("7b", "8x80", "fsdp2",
         {"copy for generation": 15.23, "float32 weights": 3.81, "moments": 7.62, "gradients": 3.81}),
    ],
)  # fmt: skip
def test_parts_worked_out_by_hand(tmp_path, size, gpus, parallel, parts):
    values = {"model": {"path": str(qwen(size, tmp_path))}, "parallel": parallel}
    values |= {"rollout": {"memory_bytes": 1 << 32}, "optimizer": {"micro_batch_tokens": 512}}
    plan = Memory(check_config(values, source="test"), parse_gpus(gpus)).plan(parallel)
    assert {name: round(plan.parts[name] / 1e9, 2) for name in parts} == parts
    token = {"0.5b": 12_288, "7b": 57_344}[size]
    assert plan.room == (1 << 32) // token and plan.parts["KV cache"] == 1 << 32
    if parallel == "fsdp2":
        # the output layer, 1.09 GB, is the largest weight to be gathered
        assert plan.phases["loading"] / 1e9 == pytest.approx(15.23 + 3.81 + 2.125 * 1.09, abs=0.01)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("gpu_*.yaml")), ids=lambda path: path.stem)
def test_presets_pass_their_own_plan(tmp_path, path):
    _, size, *_, gpus = path.stem.split("_")
    config = load_config(path, [f"model.path={qwen(size, tmp_path)}"])
    plan = Memory(config, parse_gpus(gpus.removesuffix("gb"))).plan(config.parallel)
    assert plan.trouble is None, plan
    assert plan.answers >= 16


@pytest.fixture
def small(tmp_path):
    """Settings whose weights are small beside what passes take."""
    folder = save_tiny_policy(tmp_path / "policy", hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    return {
        "model": {"path": str(folder), "dtype": "float32", "gradient_checkpointing": False},
        "rollout": {"max_completion_length": 100, "memory_bytes": 1 << 22},
        "optimizer": {"micro_batch_tokens": 4096},
    }  # fmt: skip


def plan_of(values, gpus, **changes):
    config = check_config(values, source="test")
    for name, value in changes.items():
        config = changed(config, [{name.replace("__", "."): value}])
    return Memory(config, parse_gpus(gpus), 20).plan(config.parallel)


def test_settings_that_take_less(small):
    whole = plan_of(small, "24")
    fewer = plan_of(small, "24", optimizer__micro_batch_tokens=1024)
    again = plan_of(small, "24", model__gradient_checkpointing=True)
    adapted = check_config(small | {"model": small["model"] | {"lora": {"r": 4}}}, source="test")
    lora = Memory(adapted, parse_gpus("24"), 20).plan("none")
    assert fewer.parts["activations"] < whole.parts["activations"] / 3
    assert again.parts["activations"] < whole.parts["activations"] / 3
    assert lora.parts["moments"] < whole.parts["moments"] / 5 and "copy for generation" in lora.parts
    assert "reference" not in whole.parts
    reference = plan_of(small | {"algorithm": {"beta": 0.1}}, "24")
    assert reference.parts["reference"] == whole.parts["weights"]
    sharded = plan_of(small, "4x24", parallel="fsdp2")
    assert sharded.parts["moments"] == whole.parts["moments"] // 4


def run_plan(values, tmp_path, capsys, *arguments):
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(values))
    capsys.readouterr()
    code = main(["plan", "--config", str(path), "--prompt-tokens", "20", *arguments])
    return code, capsys.readouterr()


def test_what_fits_is_told(small, tmp_path, capsys):
    code, said = run_plan(small, tmp_path, capsys, "--gpus", "2x24", "--json", str(tmp_path / "plan.json"))
    assert code == 0 and not said.err
    for words in ("none, 1 of 24.0", "fsdp2, 2 of 24.0", "moments", "most in the update", "micro-batches of 4096"):
        assert words in " ".join(said.out.split()), said.out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["plans"].keys() == {"none", "ddp", "fsdp2"} and found["would_fit"] is None
    assert found["plans"]["none"]["phases"]["the update"] > sum(found["plans"]["none"]["parts"].values()) * 0.99


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (0.6, ["--set optimizer.micro_batch_tokens=2048\n"]),
        (0.14, [" optimizer.offload=true\n"]),
        (0.1, ["model.dtype=bfloat16"]),  # the optimizer step alone takes more in float32
        (0.02, ["no change of the settings that this command knows would make it fit"]),
    ],
)
def test_what_would_fit_is_told_and_does(small, tmp_path, capsys, gpus, said):
    whole = plan_of(small, "24").peak / 1e9
    gpus = f"{whole * gpus:.6f}"
    code, told = run_plan(small, tmp_path, capsys, "--gpus", gpus)
    assert code == 2 and told.err.count("\n") == 1 and told.err.startswith("error: "), told.err
    assert all(words in told.err for words in said), told.err
    if " --set " in told.err:
        changes = shlex.split(told.err.strip().partition(" --set ")[2])
        assert run_plan(small, tmp_path, capsys, "--gpus", gpus, "--set", *changes)[0] == 0


def test_vllm_within_the_trainer_sleeps_during_updates(small, tmp_path, capsys):
    small["rollout"] |= {"engine": "vllm"}
    code, said = run_plan(small, tmp_path, capsys, "--gpus", "2x24")
    assert code == 0 and "fsdp2, 2 of 24.0" in said.out and "weights of vLLM" in said.out
    for parallel in ("none", "ddp", "fsdp2"):
        asleep, awake = (
            plan_of(small, "2x24", parallel=parallel, rollout__vllm_enable_sleep_mode=s) for s in (True, False)
        )
        given_up = asleep.parts["weights of vLLM"] + asleep.parts["KV cache"]
        assert asleep.parts == awake.parts and asleep.phases["generation"] == awake.phases["generation"]
        for phase in ("the update", "the optimizer step"):
            assert awake.phases[phase] - asleep.phases[phase] == given_up > 0
        paged = plan_of(small, "2x24", parallel=parallel, rollout__engine="paged")
        copies = [plan.parts.get("copy for generation", 0) for plan in (paged, asleep)]
        assert (copies[0] > copies[1] == 0) == (parallel == "fsdp2"), copies
    servers = "rollout.vllm_server=[http://a:8000, http://b:8000]"
    elsewhere = [servers, "rollout.allow_remote=true", "parallel=fsdp2"]
    code, said = run_plan(small, tmp_path, capsys, "--gpus", "2x24", "--set", *elsewhere)
    assert code == 0 and "fsdp2, 2 of 24.0" in said.out and "weights of vLLM" not in said.out


@pytest.mark.parametrize("installed", [True, False])
def test_the_engine_is_the_one_that_a_run_would_take(small, tmp_path, capsys, monkeypatch, installed):
    """On GPUs, which this machine has none of; whether vLLM is there too, it cannot know."""
    monkeypatch.setattr("python_trainer.engine_choice.has_vllm", lambda: installed)
    monkeypatch.setattr("python_trainer.plan.command.has_vllm", lambda: installed)
    small["rollout"] |= {"engine": "auto"}
    code, said = run_plan(small, tmp_path, capsys, "--gpus", "24")
    assert code == 0 and ("weights of vLLM" in said.out) == installed
    assert ("auto generates with vLLM" in said.out) == installed
    assert ("auto is paged here; where vLLM is installed a run takes that" in said.out) != installed
    said = run_plan(small, tmp_path, capsys, "--gpus", "24", "--set", "rollout.engine=paged")[1]
    assert "weights of vLLM" not in said.out
    assert "rollout.engine: auto" not in run_plan(small, tmp_path, capsys)[1].out


def test_of_changes_only_those_that_are_needed_are_told(small, tmp_path, capsys):
    """Where weights are all there is, smaller passes do not help, and are tried before what does."""
    folder = save_tiny_policy(tmp_path / "wide", hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    small |= {"model": {"path": str(folder)}, "optimizer": {"micro_batch_tokens": 256}}
    gpus = f"8x{0.8 * plan_of(small, '24', model__gradient_checkpointing=True).peak / 1e9:.6f}"
    code, told = run_plan(small, tmp_path, capsys, "--gpus", gpus)
    assert code == 2 and "gradient_checkpointing: auto is true here" in told.out
    _, _, changes = told.err.strip().partition(" --set ")
    assert shlex.split(changes) == ["model.lora={alpha: 32.0, r: 16, target_modules: all-linear}"]
    assert run_plan(small, tmp_path, capsys, "--gpus", gpus, "--set", *shlex.split(changes))[0] == 0
    assert run_plan(small, tmp_path, capsys, "--gpus", gpus, "--set", "parallel=fsdp2")[0] == 0


@pytest.mark.parametrize("text", ["", "8x", "x80", "0x80", "80GB", "-1", "0"])
def test_gpus_that_are_none(text):
    with pytest.raises(UserError, match="--gpus must be like 80, or 8x80 for eight of 80 GB, got"):
        parse_gpus(text)


def test_a_folder_without_model(small, tmp_path, capsys):
    (tmp_path / "hollow").mkdir()
    small["model"]["path"] = str(tmp_path / "hollow")
    code, said = run_plan(small, tmp_path, capsys, "--gpus", "24")
    assert code == 2 and "hollow does not say what model it is" in said.err


def test_weights_are_not_read(small, tmp_path, capsys):
    for path in Path(small["model"]["path"]).glob("*.safetensors"):
        path.unlink()
    assert run_plan(small, tmp_path, capsys, "--gpus", "24")[0] == 0


def test_the_memory_of_this_machine(monkeypatch):
    assert device_here("cpu").kind == "cpu" and 1 << 28 < device_here("cpu").memory < 1 << 50


@pytest.mark.parametrize(("setting", "memory", "expected"), [
    ("auto", 1.1, False), ("auto", 0.9, True), (False, 0.9, False), (True, 1.1, True),
])  # fmt: skip
def test_checkpointing_by_need(make_config, tmp_path, monkeypatch, setting, memory, expected):
    """``auto`` on a device that is said to be a GPU; the run itself is on the CPU."""
    model = {"gradient_checkpointing": setting, "dtype": "float32"}
    config = make_config(max_steps=1, model=model, rollout={"memory_bytes": 1 << 20})  # else a smaller cache makes room
    kept = changed(config, [{"model.gradient_checkpointing": False}])
    bytes_kept = Memory(kept, Device("cuda", 24 << 30)).plan("none").phases["the update"]
    chosen = command.choose_device
    monkeypatch.setattr(command, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(command, "device_here", lambda name: Device("cuda", int(bytes_kept * memory)))
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    assert trainer.policy.model.is_gradient_checkpointing == expected
    trainer.run()
    monkeypatch.setattr(command, "choose_device", chosen)
    assert not needs_recomputing(config, 1), "on a CPU auto recomputes nothing"
