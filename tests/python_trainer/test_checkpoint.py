"""Checkpoints and run directories: exact resume, kills, full disks, several trainers, and the best checkpoint."""

import io
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from conftest import QUIET, assert_goes_on, full_disk, kill_in_the_fourth_step, merged, run_settings, train
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.faults.training import differences
from python_trainer.accelerators import drafts
from python_trainer.config import load_config
from python_trainer.errors import UserError
from python_trainer.loop.evaluation import Evaluator
from python_trainer.run.callbacks import Callback
from python_trainer.run.checkpoint import decode, encode, list_checkpoints, load_checkpoint, save_checkpoint
from python_trainer.run.directory import locked, read_metrics
from python_trainer.run.logger import Logger
from python_trainer.run.run_state import RunState, best_evaluated
from python_trainer.tasks.rewards import Scores
from python_trainer.trainer import Trainer


def test_round_trip():
    state = {
        "a": [1, 2.5, None, True, "text", float("inf")],
        3: {"nested": torch.arange(6).view(2, 3), "empty": torch.zeros(0)},
        "tensor": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "items": [],
    }
    tensors = {}
    decoded = decode(encode(state, tensors), tensors)
    assert list(decoded) == list(state) and decoded["a"] == state["a"] and decoded["items"] == []
    assert torch.equal(decoded[3]["nested"], state[3]["nested"]) and decoded[3]["empty"].shape == (0,)
    assert decoded["tensor"].dtype == torch.bfloat16 and decoded["tensor"][0] == 1.5 and decoded["tensor"][1].isnan()
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
    """Resume with suffix rollouts and drafts: their bounded history and measured cost come back too."""
    monkeypatch.setattr(drafts, "HISTORY_TOKENS", 500)
    costs = iter([200.0, 200.0, 1.0])
    monkeypatch.setattr(drafts, "measure_overhead", lambda engine: next(costs))
    options = {
        "accelerators": {"enabled": ["rpo", "drafts"], "rpo": {"preset": preset}}, "evaluation": {"eval_steps": 3},
        "optimizer": {"lr_scheduler_type": "cosine", "warmup_steps": 2}, "save": {"save_steps": 2},
    }  # fmt: skip
    config = make_config(max_steps=6, **options, **changes)
    train(config, tmp_path / "whole")
    kill_in_the_fourth_step(Trainer(config, tmp_path / "parts", console=QUIET))
    assert len(read_metrics(tmp_path / "parts")) == 4
    resumed = Trainer(config, tmp_path / "parts", resume=True, console=QUIET)
    assert resumed.state.step == 2
    resumed.run()
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    assert max(row["rpo/hit_rate"] for row in read_metrics(tmp_path / "parts")[1:]) > 0


CRITIC = {"algorithm": {"advantage": "gae"}}
ADAPTERS = {"model": {"lora": {"r": 4, "target_modules": ["q_proj"]}}}
OTHER_MODEL = "is of another model than the settings"


@pytest.mark.parametrize(("first_settings", "resumed", "message"), [
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
def test_a_run_does_not_go_on_as_another(make_config, tmp_path, first_settings, resumed, message):
    train(make_config(**{"max_steps": 1} | first_settings), tmp_path / "run")
    settings_text = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(UserError, match=message):
        Trainer(make_config(**{"max_steps": 1} | resumed), tmp_path / "run", resume=True, console=QUIET)
    assert (tmp_path / "run" / "config.yaml").read_text() == settings_text


def test_what_accelerators_know_is_of_their_prompts(make_config, jsonl_files, tmp_path):
    """Kept by the numbers of prompts, it would be taken for knowledge of others; plain training has none of it."""
    lines = jsonl_files[0].read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(lines[::-1]))
    rpo = {"accelerators": {"enabled": ["rpo"]}}
    console = Console(file=io.StringIO())
    train(make_config(max_steps=2), tmp_path / "plain")
    train(make_config(max_steps=2, **rpo), tmp_path / "rpo")
    changed = {"max_steps": 3, "task": {"train_path": str(tmp_path / "other.jsonl")}}
    assert Trainer(make_config(**changed), tmp_path / "plain", resume=True, console=console).run()["steps"] == 3
    assert "prompts are others than before" in console.file.getvalue()
    with pytest.raises(UserError, match="other training prompts.*'rpo'.*model.path="):
        Trainer(make_config(**changed, **rpo), tmp_path / "rpo", resume=True, console=QUIET)


def test_the_first_run_of_a_process_does_not_count_the_import_of_tensorboard(tmp_path, monkeypatch):
    """It takes a second, after the clock has started: in a comparison it would be the baseline's alone."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # an import fails now
    with Logger(tmp_path, 1, console=QUIET).recording():
        pass
    assert list(tmp_path.glob("tensorboard/events.*"))


@pytest.mark.parametrize("size", [100, 40_000])
def test_a_checkpoint_that_does_not_fit_on_the_disk(tmp_path, size):
    save_checkpoint(tmp_path, 1, {"w": torch.ones(4)}, keep=2)
    message = "step-000002 cannot be written: .*too large.*; the newest there is step-000001"
    with full_disk(size), pytest.raises(UserError, match=message):
        save_checkpoint(tmp_path, 2, {"w": torch.ones(40_000)}, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert torch.equal(load_checkpoint(tmp_path / "step-000001")["w"], torch.ones(4))


def test_metrics_that_do_not_fit_on_the_disk(run, tmp_path, monkeypatch):
    original = Trainer.step

    def step(self, number):
        size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
        with full_disk(size + 10) if number == 3 else nullcontext():
            return original(self, number)

    monkeypatch.setattr(Trainer, "step", step)
    code, errors = run({"save": {"save_steps": 1}})
    assert code == 2 and "error: " in errors and "metrics.jsonl" in errors
    assert "step 2 is saved" in errors and "Traceback" not in errors
    monkeypatch.setattr(Trainer, "step", original)
    assert run({}, "--resume")[0] == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_events_of_tensorboard_that_do_not_fit_on_the_disk(run, tmp_path, monkeypatch):
    """TensorBoard writes in a thread, whose error has neither a path nor a place on the screen."""
    events = tmp_path / "run" / "tensorboard"
    original = Logger.log

    def log(self, step, row):
        sizes = [path.stat().st_size for path in events.iterdir()]
        with full_disk(max(sizes) + 10) if step == 3 else nullcontext():
            original(self, step, row)

    monkeypatch.setattr(Logger, "log", log)
    code, errors = run({"save": {"save_steps": 1}})
    assert code == 2 and f"too large: '{events}'; step 3 is saved: --resume continues from it\n" in errors
    assert "Traceback" not in errors
    monkeypatch.setattr(Logger, "log", original)
    assert_goes_on(run, tmp_path)


def test_a_summary_that_does_not_fit_on_the_disk_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Logger, "write_summary", full_disk(10)(Logger.write_summary))
    code, errors = run({"max_steps": 1})
    assert code == 2 and f"too large: '{tmp_path / 'run' / 'summary.json'}'\n" in errors


def test_a_model_that_does_not_fit_on_the_disk(make_config, tmp_path):
    config = make_config(max_steps=2)
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    trainer.policy.save = full_disk(20_000)(trainer.policy.save)
    with pytest.raises(UserError, match="run/model cannot be written: .*too large.*: make room .*; step 2 is saved"):
        trainer.run()
    assert not [*(tmp_path / "run").glob(".*.tmp")], "what was written of it is in the way"
    train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size > 20_000


HOLD = """
import pathlib, sys
from python_trainer.run.directory import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_folder_has_one_trainer(make_config, tmp_path):
    folder = tmp_path / "run"
    trainer = Trainer(make_config(max_steps=1), folder, console=QUIET)  # both were started before either wrote
    folder.mkdir()
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by another run, process {holder.pid} on "):
            trainer.run()
        for resume in (False, True):
            with pytest.raises(UserError, match="in use by another run"):
                Trainer(make_config(max_steps=1), folder, resume=resume, console=QUIET)
        assert [p.name for p in folder.iterdir()] == [".lock"]
        holder.kill()  # the lock goes with it
    train(make_config(max_steps=1), folder)
    with locked(folder):
        pass


def test_a_run_that_another_one_took_further_meanwhile_is_refused(make_config, tmp_path):
    config = make_config(max_steps=1)
    first, second = (Trainer(config, tmp_path / "run", console=QUIET) for _ in range(2))
    first.run()
    with pytest.raises(UserError, match="another run has written to .*checkpoints in the meantime"):
        second.run()


def test_what_a_kill_left_of_the_model_is_not_published(make_config, tmp_path):
    config = make_config(max_steps=1, model={"lora": {"r": 2}})
    train(config, tmp_path / "run")
    temporary = tmp_path / "run" / ".model.tmp"
    temporary.mkdir()
    (temporary / "model-00001-of-00009.safetensors").write_bytes(b"half of one")
    old_adapter = (tmp_path / "run" / "adapter").rename(
        tmp_path / "run" / ".old-adapter"
    )  # the new one was not in place yet
    umask = os.umask(0o022)
    try:
        train(config, tmp_path / "run", resume=True)
    finally:
        os.umask(umask)
    written = [path for folder in ("model", "adapter") for path in (tmp_path / "run" / folder).iterdir()]
    assert not old_adapter.exists() and not temporary.exists()
    assert "model-00001-of-00009.safetensors" not in [path.name for path in written]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o644}


def test_folders_of_a_run_may_lie_elsewhere(make_config, tmp_path):
    """Checkpoints and the model on another disk: links stay, a checkpoint that is moved is not in the way."""
    run = tmp_path / "run"
    disk = tmp_path / "disk"
    run.mkdir()
    disk.mkdir()
    for name in ("checkpoints", "model", "config.yaml"):  # which lead nowhere yet
        (run / name).symlink_to(disk / name)
    config = make_config(max_steps=2, save={"save_steps": 1, "save_total_limit": 2})
    train(config, run)
    moved = (disk / "checkpoints" / "step-000001").rename(disk / "moved")
    (disk / "checkpoints" / "step-000001").symlink_to(moved)
    longer = make_config(max_steps=3, save={"save_steps": 1, "save_total_limit": 2})
    train(longer, run, resume=True)
    assert sorted(path.name for path in (disk / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert (moved / "state.json").exists()  # not ours to remove
    assert all((run / name).is_symlink() for name in ("checkpoints", "model", "config.yaml"))
    assert sorted(path.name for path in disk.iterdir()) == ["checkpoints", "config.yaml", "model", "moved"]
    assert (disk / "model" / "config.json").exists() and len(read_metrics(run)) == 4


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(make_config, tmp_path, capsys):
    config = make_config(max_steps=4, save={"save_steps": 2})
    train(config, tmp_path / "whole")
    train(config, tmp_path / "parts")
    folder = tmp_path / "parts" / "checkpoints"
    flip(folder / "step-000004" / "tensors.safetensors")
    trainer = Trainer(config, tmp_path / "parts", resume=True)
    assert trainer.state.step == 2
    message = "step-000004 is damaged (tensors.safetensors is other than it was written): continuing from step-000002"
    assert message in capsys.readouterr().err
    trainer.run()
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    assert sorted(p.name for p in folder.iterdir()) == ["damaged-step-000004", "step-000002", "step-000004"]
    for path in list_checkpoints(folder):
        flip(path / "state.json")
    message = "no checkpoint in .* can be used: .*step-000004 is damaged.*step-000002 is damaged"
    with pytest.raises(UserError, match=message):
        Trainer(config, tmp_path / "parts", resume=True, console=QUIET)


def test_a_checkpoint_of_something_else_is_refused(make_config, tmp_path):
    """Its checksums are right, and what it holds is not this trainer's."""
    save_checkpoint(tmp_path / "run" / "checkpoints", 1, {"step": 1, "accelerators": {}, "model": {}}, keep=1)
    with pytest.raises(UserError, match="written by another version of the trainer or something else"):
        Trainer(make_config(), tmp_path / "run", resume=True, console=QUIET)


@pytest.fixture(scope="module")
def sealed(tiny_policy, jsonl_files, tmp_path_factory):
    """Return settings of three steps, and the checkpoint of the first two."""
    rollout = {"schedule": "history"}
    critic = {"algorithm": {"advantage": "gae"}}
    settings = merged(run_settings(tiny_policy, jsonl_files), {"max_steps": 2, "rollout": rollout} | critic)
    folder = tmp_path_factory.mktemp("sealed")
    train(load_config(settings), folder)
    return load_config(settings | {"max_steps": 3}), list_checkpoints(folder / "checkpoints")[-1]


def in_state(**values):
    return lambda saved: saved["state"].update(values)


def in_optimizer(**values):
    return lambda saved: [moments.update(values) for moments in saved["optimizer"].values()]


def in_all(**values):
    return lambda saved: saved.update(values)


NAN = float("nan")
NO_STEP = "step of model.embed_tokens.weight must be a whole number of at least 0"


@pytest.mark.parametrize(("change", "message"), [
    (in_state(step=-5), "state.step: input should be greater than or equal to 0, got -5"),
    (in_state(step=1.5), "state.step: input should be a valid integer, got 1.5"),
    (in_state(step=NAN), "state.step: input should be a valid integer, got nan"),
    (in_state(step="2"), "state.step: input should be a valid integer, got '2'"),
    (in_state(step=True), "state.step: input should be a valid integer, got True"),
    (in_state(step=10**400), "state.step: input should be less than 9223372036854775808, got 1000"),
    (in_state(step=1), "it is named step-000002 and holds step 1"),
    (in_state(prompts=-3), "state.prompts: .* got -3"),
    (in_state(policy_version=-1), "state.policy_version: .* got -1"),
    (in_state(wall_s=NAN), "state.wall_s: input should be a finite number, got nan"),
    (in_state(seconds={"rollout": "x"}), "state.seconds.rollout: .* got 'x'"),
    (in_state(counts={"generated_tokens": -1}), "state.counts.generated_tokens: .* got -1"),
    (in_state(evaluations=[[0]]), r"state.evaluations.0: list should have at least 3 items .* got \[0\]"),
    (in_state(costs=[1]), "state.costs.0: .* got 1"),
    (in_state(unknown=1), "state.unknown: .* got 1"),
    (in_all(lengths={"means": 3}), "lengths.means: .* got 3"),
    (in_all(kernels=3), "kernels: .* got 3"),
    (in_all(accelerators={"rpo": 3}), "accelerators.rpo: .* got 3"),
    (in_optimizer(step=torch.tensor(-5.0)), NO_STEP),
    (in_optimizer(step=torch.tensor(1.5)), NO_STEP),
    (in_optimizer(step=torch.tensor(NAN)), NO_STEP),
    (in_optimizer(exp_avg=torch.zeros(3)), r"exp_avg of model.embed_tokens.weight has shape \[3\], not \[64, 32\]"),
    (in_optimizer(exp_avg=None), "exp_avg of model.embed_tokens.weight is no tensor but None"),
    (lambda saved: [x.pop("step") for x in saved["optimizer"].values()], "must have exp_avg, exp_avg_sq, step, got"),
])  # fmt: skip
def test_what_no_run_can_have_written_is_named(sealed, tmp_path, change, message):
    """Its checksums are right, so somebody has made it so."""
    config, checkpoint = sealed
    saved = load_checkpoint(checkpoint)
    change(saved)
    save_checkpoint(tmp_path / "run" / "checkpoints", 2, saved, keep=1)
    with pytest.raises(UserError, match=f"written by another version of the trainer or something else: .*{message}"):
        Trainer(config, tmp_path / "run", resume=True, console=QUIET)


JUDGED = {"reward": ["tiny:mostly_digits", "conftest:digits"], "reward_weights": [0, 1]}


@pytest.fixture
def grades(monkeypatch):
    """Return the accuracies that evaluations find, by step."""
    accuracies = [0.1, 0.2, 0.6, 0.3, 0.4]

    def answer(evaluator, split, rows):
        accuracy = accuracies[evaluator.prompts.state.step]
        return Scores({}, [-accuracy] * 6, [accuracy] * 6), []

    monkeypatch.setattr(Evaluator, "answer", answer)
    return accuracies


def test_best_of_those_that_are_there():
    state = RunState(evaluations=[[0, 0.9, -1], [2, 0.5, 0.5], [4, 0.5, 0.4], [6, 0.1, 0.8]])
    assert best_evaluated(state, [2, 4, 5, 6]) == 4 and best_evaluated(state, [5]) is None


class Unjudged(Callback):
    def on_step(self, trainer, step, metrics):
        trainer.state.judged = step == 1


def test_rewards_decide_between_all_checkpoints_once_nothing_is_right_or_wrong(make_config, tmp_path, grades):
    """They decide also between checkpoints that were evaluated before a reward showed it."""
    grades[1] = 0.9  # the fewer right, the higher the reward here
    options = {"task": JUDGED, "evaluation": {"eval_steps": 1}, "save": {"save_steps": 1, "save_total_limit": 9}}
    config = make_config(max_steps=3, **options)
    train(config, tmp_path / "run", callbacks=[Unjudged])
    assert not (tmp_path / "run" / "best").exists()  # the last is


def test_the_best_checkpoint_is_kept_and_written_as_a_model(make_config, tmp_path, grades):
    save = {"save_steps": 1, "save_total_limit": 1}
    finished = train(make_config(task=JUDGED, evaluation={"eval_steps": 1}, save=save), tmp_path / "run")
    checkpoints = list_checkpoints(finished.checkpointer.checkpoints)
    assert [path.name for path in checkpoints] == ["step-000002", "step-000004"]
    for name, checkpoint in (("best", checkpoints[0]), ("model", checkpoints[1])):
        folder = finished.folder / name
        saved = load_checkpoint(checkpoint)["model"]
        weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(weights[name], value) for name, value in saved.items())
        assert AutoTokenizer.from_pretrained(folder)("AB")["input_ids"] == finished.policy.encode(["AB"])[0]
    last = load_checkpoint(checkpoints[1])["model"]
    assert all(torch.equal(p, last[name]) for name, p in finished.policy.model.named_parameters() if name in last)


def test_a_last_step_that_is_the_best_is_the_model_alone(make_config, tmp_path, grades):
    options = {"task": JUDGED, "evaluation": {"eval_steps": 1}, "save": {"save_steps": 1}}
    train(make_config(**options), tmp_path / "run")
    assert (tmp_path / "run" / "best").is_dir()
    grades.append(0.9)
    train(make_config(max_steps=5, **options), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model").is_dir() and not (tmp_path / "run" / "best").exists()
