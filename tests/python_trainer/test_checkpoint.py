"""Checkpoints: exact resume, and nothing that a kill can damage."""

import io

import pytest
import torch
from conftest import QUIET, train
from rich.console import Console

from bench.faults.training import differences
from python_trainer.accelerators import drafts
from python_trainer.checkpoint import decode, encode, list_checkpoints, load_checkpoint, save_checkpoint
from python_trainer.errors import UserError
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer


def test_round_trip():
    state = {
        "a": [1, 2.5, None, True, "text", float("inf")],
        3: {"nested": torch.arange(6).view(2, 3), "empty": torch.zeros(0)},
        "tensor": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "items": [],
    }
    tensors = {}
    back = decode(encode(state, tensors), tensors)
    assert list(back) == list(state) and back["a"] == state["a"] and back["items"] == []
    assert torch.equal(back[3]["nested"], state[3]["nested"]) and back[3]["empty"].shape == (0,)
    assert back["tensor"].dtype == torch.bfloat16 and back["tensor"][0] == 1.5 and back["tensor"][1].isnan()
    with pytest.raises(TypeError, match="a checkpoint holds tensors.* got set"):
        encode({"x": {1}}, {})


def test_keeps_the_newest_and_clears_leftovers(tmp_path):
    (tmp_path / ".step-000001.tmp").mkdir()
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, {"step": step}, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000002", "step-000010"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000010"]
    assert load_checkpoint(tmp_path / "step-000010") == {"step": 10}


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "checksums.json", "another"])
@pytest.mark.parametrize("damage", ["missing", "short", "other"])
def test_a_damaged_checkpoint_is_named(tmp_path, name, damage):
    """Checksums are of all files and of no other."""
    path = save_checkpoint(tmp_path, 1, {"w": torch.ones(4)}, keep=1) / name
    if damage == "missing":
        path.unlink(missing_ok=True)
    if damage != "missing" or name == "another":
        path.write_bytes(path.read_bytes()[:9] if damage == "short" and path.exists() else b"{}")
    with pytest.raises(UserError, match="step-000001 is damaged"):
        load_checkpoint(path.parent)


GRPO = {"num_iterations": 2, "beta": 0.1}
PPO = GRPO | {"advantage": "gae", "use_kl_in_reward": True}
ROUNDS = {"dynamic_sampling": True, "schedule": "history"}
ADAPTED = {"lora": {"r": 4, "alpha": 16}, "gradient_checkpointing": True}
ROOM = {"max_completion_length": 40}  # to end, as answers that are remembered do


@pytest.mark.parametrize(("changes", "preset"), [
    ({"algorithm": GRPO, "rollout": ROUNDS}, "paper"),
    ({"algorithm": PPO, "rollout": ROOM}, "ours"),
    ({"algorithm": PPO, "critic": {"separate": True}}, "paper"),
    ({"algorithm": GRPO, "model": ADAPTED, "rollout": ROOM}, "paper"),
    ({"algorithm": PPO, "model": ADAPTED, "rollout": ROOM}, "paper"),
])  # fmt: skip
def test_resume_equals_the_uninterrupted_run(make_config, tmp_path, monkeypatch, changes, preset):
    """With suffix rollouts and drafts, whose bounded history and cost, measured once, come back too."""
    monkeypatch.setattr(drafts, "HISTORY_TOKENS", 500)
    costs = iter([200.0, 200.0, 1.0])
    monkeypatch.setattr(drafts, "measure_overhead", lambda engine: next(costs))
    options = {
        "accelerators": {"enabled": ["rpo", "drafts"], "rpo": {"preset": preset}}, "evaluation": {"eval_steps": 3},
        "optimizer": {"lr_scheduler_type": "cosine", "warmup_steps": 2}, "save": {"save_steps": 2},
    }  # fmt: skip
    config = make_config(max_steps=6, **options, **changes)
    Trainer(config, tmp_path / "whole", console=QUIET).run()
    part = Trainer(config, tmp_path / "parts", console=QUIET)
    original = part.step

    def stop_after_three(number):
        if number == 4:  # the newest checkpoint is that of step 2; the row of step 3 has been written
            raise KeyboardInterrupt
        return original(number)

    part.step = stop_after_three
    with pytest.raises(KeyboardInterrupt):
        part.run()
    assert len(read_metrics(tmp_path / "parts")) == 4
    resumed = Trainer(config, tmp_path / "parts", resume=True, console=QUIET)
    assert resumed.state.step == 2
    resumed.run()
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    assert max(row["rpo/hit_rate"] for row in read_metrics(tmp_path / "parts")[1:]) > 0


CRITIC, ADAPTERS = {"algorithm": {"advantage": "gae"}}, {"model": {"lora": {"r": 4, "target_modules": ["q_proj"]}}}
OTHER_MODEL = "is of another model than the settings"


@pytest.mark.parametrize(("begun", "resumed", "message"), [
    ({}, {"accelerators": {"enabled": ["rpo"]}}, r"run with the accelerators \[\], not \['rpo'\]"),
    ({"max_steps": 2}, {}, "run has done 2 steps, and these settings make 1: raise max_steps, or"),
    (CRITIC, {}, "was run with a critic: algorithm.advantage must be gae, got group"),
    ({}, CRITIC, "was run without a critic: algorithm.advantage must not be gae, got gae"),
    (CRITIC, CRITIC | {"critic": {"separate": True}}, "is of another model than"),
    ({}, ADAPTERS, OTHER_MODEL),
    (ADAPTERS, {}, OTHER_MODEL),
    (ADAPTERS, {"model": {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}}, OTHER_MODEL),
    (ADAPTERS, {"model": {"lora": {"r": 2, "target_modules": ["q_proj"]}}}, OTHER_MODEL),
])  # fmt: skip
def test_a_run_does_not_go_on_as_another(make_config, tmp_path, begun, resumed, message):
    train(make_config(**{"max_steps": 1} | begun), tmp_path / "run")
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(UserError, match=message):
        Trainer(make_config(**{"max_steps": 1} | resumed), tmp_path / "run", resume=True, console=QUIET)
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_what_accelerators_know_is_of_their_prompts(make_config, jsonl_files, tmp_path):
    """Kept by the numbers of prompts, it would be taken for knowledge of others; plain training has none of it."""
    lines = jsonl_files[0].read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(lines[::-1]))
    rpo, said = {"accelerators": {"enabled": ["rpo"]}}, Console(file=io.StringIO())
    train(make_config(max_steps=2), tmp_path / "plain")
    train(make_config(max_steps=2, **rpo), tmp_path / "rpo")
    changed = {"max_steps": 3, "task": {"train_path": str(tmp_path / "other.jsonl")}}
    assert Trainer(make_config(**changed), tmp_path / "plain", resume=True, console=said).run()["steps"] == 3
    assert "prompts are others than before" in said.file.getvalue()
    with pytest.raises(UserError, match="other training prompts.*'rpo'.*model.path="):
        Trainer(make_config(**changed, **rpo), tmp_path / "rpo", resume=True, console=QUIET)
