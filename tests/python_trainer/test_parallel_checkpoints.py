"""Checkpoints written by any number of processes are read by any other; what fails in one process ends all."""

import itertools
import shutil
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import QUIET, merged, run_settings
from gloo import run_on_ranks, train
from safetensors.torch import load_file
from support import assert_equal
from torch.distributed.fsdp import FSDPModule

from bench.faults.training import differences, load_whole
from python_trainer.config import load_config
from python_trainer.distributed import start
from python_trainer.errors import NotFinite, UserError, is_shared
from python_trainer.loop.batch import Minibatch
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.paged.engine import PagedEngine
from python_trainer.run.checkpoint import SHARDS, list_checkpoints, load_checkpoint, read_shards, write_shards
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # two processes train a minute

SETTINGS = {
    "max_steps": 4,
    # as in test_parallel: Adam must not divide rounding errors by their size
    "optimizer": {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "micro_batch_tokens": 40},
    "algorithm": {"advantage": "gae"},
    "accelerators": {"enabled": ["rpo"]},
}
HALF = {"max_steps": 2}
LOW_PRECISION = {"model": {"dtype": "bfloat16"}, "critic": {"separate": True}, "max_steps": 2}
OFFLOAD = merged(LOW_PRECISION, {"optimizer": {"offload": True}})


def no_verdict(prompts, completions, completion_ids, **columns):
    """Fail in the second process; the first knows nothing of it."""
    if dist.get_rank() == 1:
        raise ValueError("no verdict")
    return [0.0] * len(prompts)


def fail(settings, folder, message):
    with pytest.raises(UserError, match=message) as caught:
        train(settings, folder, "fsdp2")
    assert is_shared(caught.value)  # the command line prints it once
    return str(caught.value)


def a_reward_or_a_loss_that_fails(settings, folder):
    rewarded = merged(settings, {"task": {"reward": f"{__name__}:no_verdict"}})
    message = fail(rewarded, folder / "reward", "reward function no_verdict raised ValueError: no verdict")
    assert dist.get_rank() == 1 or message.startswith("process 1 of 2: ")
    original = Minibatch.loss

    def loss(self, *args, **options):
        value, metrics = original(self, *args, **options)
        return value * (torch.nan if dist.get_rank() == 1 else 1.0), metrics

    with patch.object(Minibatch, "loss", loss):
        fail(settings, folder / "nan", "the loss is nan")


# what one process raises, and as what each of them sees it
ERRORS = {
    "finite": (NotFinite("no distribution"), ["UserError", "UserError"]),
    "memory": (MemoryError("no bytes"), ["MemoryError", "MemoryError"]),
    "other": (LookupError("no such token"), ["UserError", "LookupError"]),
}
FAILURES = [("fsdp2", "finite"), ("fsdp2", "memory"), ("fsdp2", "other"), ("ddp", "memory")]


def generation_that_fails(settings, folder):
    """Fail in the second process, in the second step of a run; all save together, and all end in one line.

    But for a bug: it does in the process where it came up.
    """
    changes = {"save": {"save_steps": 0}, "callbacks": ["python_trainer.run.callbacks:Callback"], "max_steps": 2}
    original = PagedEngine._work
    settings = merged(settings, changes)
    for parallel, name in FAILURES:
        calls = itertools.count()
        (error, kinds) = ERRORS[name]

        def work(self, count, calls=calls, error=error):
            if next(calls) == 3 and dist.get_rank() == 1:  # the evaluation at the start is in two parts
                raise error
            return original(self, count)

        with patch.object(PagedEngine, "_work", work), pytest.raises(Exception) as caught:
            train(settings, folder / f"{parallel}-{name}", parallel)
        assert is_shared(caught.value) and type(caught.value).__name__ == kinds[dist.get_rank()]
        message = "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        text = f"{error}: optimizer.learning_rate 0.001 may be too high" if name == "finite" else str(error)
        assert text in message and "step 1 is saved: --resume continues from it" in message
        if dist.get_rank() == 0:
            assert "process 1 of 2: " in message
            checkpoints = list_checkpoints(folder / f"{parallel}-{name}" / "checkpoints")
            assert [path.name for path in checkpoints] == ["step-000001"]


def failing_runs(settings, folder):
    a_reward_or_a_loss_that_fails(settings, folder)
    generation_that_fails(settings, folder)


def several(settings, folder):
    """Train in two processes every case that ends well."""
    train(settings | HALF, folder / "sharded half", "fsdp2")
    if dist.get_rank() == 0:
        shutil.copytree(folder / "sharded half", folder / "sharded to ddp")
        shutil.copytree(folder / "sharded half", folder / "sharded to sharded")
    dist.barrier()
    if dist.get_rank() == 0:  # within the group of another program, the second process of which does something else
        shutil.copytree(folder / "sharded half", folder / "sharded to one of a group")
        train(settings, folder / "sharded to one of a group", resume=True)
    dist.barrier()
    train(settings, folder / "sharded to ddp", "ddp", resume=True)
    train(settings, folder / "sharded to sharded", "fsdp2", resume=True)
    train(settings, folder / "one to sharded", "fsdp2", resume=True)
    train(settings, folder / "sharded", "fsdp2")
    plain = merged(settings, LOW_PRECISION)
    moved = merged(settings, OFFLOAD)
    train(plain, folder / "plain", "fsdp2")
    for name, first, second in (("plain to offloaded", plain, moved), ("offloaded to plain", moved, plain)):
        train(first | {"max_steps": 1}, folder / name, "fsdp2")
        train(second, folder / name, "fsdp2", resume=True)


@pytest.fixture(scope="module")
def settings(tiny_policy, jsonl_files):
    return merged(run_settings(tiny_policy, jsonl_files), SETTINGS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, settings):
    folder = tmp_path_factory.mktemp("runs")
    train(settings, folder / "one")
    train(settings | HALF, folder / "one to sharded")
    run_on_ranks(folder, several, settings, folder)
    shutil.copytree(folder / "sharded half", folder / "sharded to one")
    train(settings, folder / "sharded to one", resume=True)
    return folder


@pytest.mark.parametrize(
    "name", ["one to sharded", "sharded to one", "sharded to one of a group", "sharded to ddp", "sharded to sharded"]
)
def test_a_run_goes_on_with_another_number_of_processes(runs, name):
    assert [row["step"] for row in read_metrics(runs / name)] == list(range(5))
    expected, weights = (load_file(runs / folder / "weights.safetensors") for folder in ("one", name))
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    saved = [load_whole(list_checkpoints(runs / folder / "checkpoints")[-1]) for folder in ("one", name)]
    for section in ("model", "optimizer"):
        assert (
            saved[0][section].keys() == saved[1][section].keys()
            and saved[0]["critic"].keys() == saved[1]["critic"].keys()
        )


@pytest.mark.parametrize(
    ("uninterrupted", "resumed"),
    [("sharded", "sharded to sharded"), ("plain", "plain to offloaded"), ("plain", "offloaded to plain")],
)
def test_resume_is_exact_in_the_same_processes_offloaded_or_not(runs, uninterrupted, resumed):
    sections = [text.split()[0] for text in differences(runs / uninterrupted, runs / resumed)]
    assert sections == ["evaluations", "rows"], "the one at the end of the first part"


def test_only_shards_of_the_weights_are_written(runs):
    newest = list_checkpoints(runs / "sharded" / "checkpoints")[-1]
    assert sorted(path.name for path in (newest / SHARDS).glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert "model" not in load_checkpoint(newest)
    sizes = [path.stat().st_size for path in (newest / SHARDS).glob("*.distcp")]
    assert max(sizes) < 1.2 * min(sizes)


def test_low_precision_models_resume_from_float32_shards(runs, settings):
    """One process keeps a bfloat16 model and float32 masters; shards are float32 only."""
    config = load_config(merged(settings, LOW_PRECISION))
    saved = load_whole(list_checkpoints(runs / "plain" / "checkpoints")[-1])
    trainer = Trainer(config, runs / "plain", resume=True, console=QUIET)
    optimizer = trainer.learner.optimizer
    for name, master in optimizer.masters.items():
        assert torch.equal(master, saved["model"][name]) and master.dtype == torch.float32
        assert torch.equal(optimizer.params[name], master.bfloat16()), name
        assert torch.equal(optimizer.adamw.state[master]["exp_avg"], saved["optimizer"][name]["exp_avg"])
    exported = load_file(runs / "plain" / "weights.safetensors")
    assert all(torch.equal(exported[name], p) for name, p in optimizer.params.items())
    assert any(not torch.equal(master, master.bfloat16().float()) for master in optimizer.masters.values())
    written = load_file(runs / "plain" / "model" / "model.safetensors")  # as it computes
    assert all(w.dtype == torch.bfloat16 and torch.equal(w, exported[name]) for name, w in written.items())


@pytest.mark.parametrize("offload", [False, True])
def test_what_trains_is_offloaded_and_a_reference_is_not(tiny_policy, offload):
    with start("fsdp2", "cpu") as ranks:
        policy = ranks.load(ModelConfig(path=str(tiny_policy), device="cpu"), offload=offload)
        reference = ranks.copy(policy.inference_model, trains=False)
        for model, moved in ((policy.model, offload), (reference, False)):
            groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
            policies = {type(group.offload_policy).__name__ for group in groups if group}
            assert policies == {"CPUOffloadPolicy" if moved else "OffloadPolicy"}


def test_shards_that_were_written_before_the_first_optimizer_step(settings, tmp_path):
    """There are no moments yet; of some parameters there may never be any."""
    first, second = (Trainer(load_config(settings), tmp_path / name) for name in ("a", "b"))
    with torch.no_grad():
        for p in (*first.policy.model.parameters(), *first.learner.critic.parameters()):
            p.add_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        write_shards(tmp_path, first.learner.state_dict())
    second.learner.load_state_dict(read_shards(tmp_path, second.learner.state_dict()))
    for modules in zip((first.policy.model, first.learner.critic), (second.policy.model, second.learner.critic)):
        assert_equal(*(list(module.parameters()) for module in modules))


def test_damaged_shards_are_named(runs, settings, tmp_path):
    shutil.copytree(runs / "sharded half", tmp_path / "run")
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    (newest / SHARDS / "__1_0.distcp").unlink()
    with pytest.raises(UserError, match="step-000002 is damaged"):
        load_whole(newest)


def test_what_fails_in_one_process_ends_all_of_them(settings, tmp_path):
    run_on_ranks(tmp_path, failing_runs, settings, tmp_path)


def test_processes_must_be_shared_as_the_settings_say(settings, tmp_path):
    """A Trainer that is given none would train in one process, each of several the same run."""
    config = load_config(settings | {"parallel": "ddp"})
    with pytest.raises(UserError, match=r"kind that config.parallel names \(ddp\), got none: use .*distributed.start"):
        Trainer(config, tmp_path / "run")
    config = load_config(settings)
    message = r"kind that config.parallel names \(none\), got ddp"
    with start("ddp") as ranks, pytest.raises(UserError, match=message):
        Trainer(config, tmp_path / "run", ranks=ranks)
    assert not (tmp_path / "run").exists()
