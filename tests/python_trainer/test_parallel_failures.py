"""What fails in one of several processes: all end, and the error is told once."""

import io
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
import torch.distributed as dist
from conftest import QUIET, full_disk, merged, run_settings
from gloo import KINDS, run_on_ranks, train
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bench.faults.training import load_whole
from python_trainer import distributed
from python_trainer.config import load_config
from python_trainer.distributed import start
from python_trainer.distributed.ranked_engine import RankedEngine
from python_trainer.environment import Environment
from python_trainer.errors import Interrupted, UserError, is_shared, mark_shared
from python_trainer.rollout.engine import SamplingParams
from python_trainer.run.checkpoint import list_checkpoints, save_checkpoint
from python_trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # two processes set up many times

# what of a set-up fails in the second process, by what it is called there
PLACES = {
    "task": "python_trainer.tasks.files.FileTaskSettings.load",
    "tokenizer": "python_trainer.model.policy.Policy.encode",
    "engine": "python_trainer.rollout.paged.engine.PagedEngine.__init__",
    "learner": "python_trainer.trainer.Learner",
    "checkpoint": "python_trainer.loop.learner.Learner.load_state_dict",
    "whole model": "python_trainer.distributed.group.load_policy",
    "shards": "python_trainer.distributed.sharded.ShardedGroup._sharded_copy",
    "policy": "python_trainer.model.policy.Policy.__init__",
}
OF_A_KIND = {"whole model": "ddp", "shards": "fsdp2"}


def set_ups_that_fail(settings, folder):
    for parallel, ranks in KINDS.items():
        train(settings, folder / parallel, parallel)
        config = load_config(settings | {"parallel": parallel})
        for name, place in PLACES.items():
            if OF_A_KIND.get(name, parallel) != parallel:
                continue
            fails = patch(place, Mock(side_effect=UserError(f"no {name} here")))
            with fails if dist.get_rank() == 1 else nullcontext(), pytest.raises(UserError) as caught:
                Trainer(config, folder / parallel, console=QUIET, ranks=ranks(), resume=True)
            first = "process 1 of 2: " if dist.get_rank() == 0 else ""
            assert is_shared(caught.value) and str(caught.value) == f"{first}no {name} here", (parallel, name)


def test_a_set_up_that_fails_in_one_process_ends_all(tmp_path, tiny_policy, jsonl_files):
    settings = run_settings(tiny_policy, jsonl_files) | {"max_steps": 1}
    run_on_ranks(tmp_path, set_ups_that_fail, settings, tmp_path)


FULL = [(0, 10), (0, 10_000), (1, 10_000)]  # before the shards, while they are written


def unwritten_checkpoints(folder):
    """Save a second checkpoint where a process can write files of so many bytes at most."""
    for parallel, kind in KINDS.items():
        ranks = kind()
        full_weight = torch.ones(64, 1024)
        weight = (
            distribute_tensor(full_weight, init_device_mesh("cpu", (2,)), [Shard(0)]) if ranks.sharded else full_weight
        )
        learned = {"model": {"w": weight}, "optimizer": {}, "critic": None}
        contents = {"shards": learned, "state": {}} if ranks.sharded else {"state": learned}
        save = partial(save_checkpoint, **contents, keep=2, ranks=ranks)
        for rank, size in FULL:
            place = folder / f"{parallel}-{rank}-{size}"
            save(place, 1)
            full = full_disk(size) if ranks.rank == rank else nullcontext()
            if parallel == "ddp" and rank == 1:  # it writes nothing
                with full:
                    save(place, 2)
            else:
                with full, pytest.raises(UserError) as caught:
                    save(place, 2)
                message = str(caught.value)
                assert is_shared(caught.value) and f"checkpoint {place}/step-000002 cannot be written: " in message
                assert "too large" in message or size == 10_000, "torch's own words are others"
                assert "the newest there is step-000001: make room there" in message
                assert message.count("cannot be written") == 1 and "\n" not in message
        save(folder / f"{parallel}-after", 3)  # all still go together


def test_a_checkpoint_that_one_process_cannot_write_is_told_by_all(tmp_path):
    run_on_ranks(tmp_path, unwritten_checkpoints, tmp_path)
    for parallel in KINDS:
        for rank, size in FULL:
            if (parallel, rank) != ("ddp", 1):
                (checkpoint,) = (tmp_path / f"{parallel}-{rank}-{size}").iterdir()
                assert checkpoint.name == "step-000001" and load_whole(checkpoint)["model"]["w"].shape == (64, 1024)
        assert list_checkpoints(tmp_path / f"{parallel}-after")


@pytest.mark.parametrize("streams", [True, False])
def test_weights_are_gathered_for_the_engine_by_all_ranks_at_once(streams):
    """Ranks without requests gather too, and none gathers where one may have failed already."""
    mocks = MagicMock()
    mocks.ranks.configure_mock(rank=1, size=2)
    mocks.ranks.gather.side_effect = lambda value: [([], {}), value]
    mocks.inner.configure_mock(stats={}, lengths=None, on_first_rank=False, policy_version=0)
    mocks.inner.generate.return_value = []
    engine = RankedEngine(mocks.inner, SimpleNamespace(streams_weights=streams), mocks.ranks)
    engine.submit([], SamplingParams())
    engine.poll()
    answer_calls = [
        "ranks.fail_together",
        "ranks.fail_together().__enter__",
        "inner.generate",
        "ranks.fail_together().__exit__",
    ]
    assert [name for name, *_ in mocks.mock_calls] == ["inner.load_weights"] * streams + [*answer_calls, "ranks.gather"]


class OnFirst(Environment):
    """Work on the first rank alone, as where a tool is missing on another host."""

    def step(self, text):
        if dist.get_rank():
            raise OSError("no tool here")
        return "", 1.0, True


def answers_whose_environment_fails(settings, folder):
    config = load_config(settings)
    output = io.StringIO()
    trainer = Trainer(config, folder, console=Console(file=output, width=200), ranks=KINDS["ddp"]())
    trainer.run()
    message = (
        "the environment test_parallel_failures:OnFirst failed in turn 1 of an answer, which ends there: OSError: "
    )
    assert output.getvalue().count(f"{message}no tool here; ") == (1 if dist.get_rank() == 0 else 0)


def test_an_environment_that_fails_in_another_process_is_told(tmp_path, tiny_policy, jsonl_files):
    task = {"environment": "test_parallel_failures:OnFirst", "reward": "environment"}
    settings = merged(run_settings(tiny_policy, jsonl_files), {"task": task, "parallel": "ddp", "max_steps": 2})
    run_on_ranks(tmp_path, answers_whose_environment_fails, settings, tmp_path / "run")


SHARED = UserError("told to all")
mark_shared(SHARED)


@pytest.mark.parametrize(("error", "size", "leaves"), [
    (MemoryError("of one process"), "2", True),
    (KeyboardInterrupt(), "2", True),
    (MemoryError("of one process"), "1", False),
    (SHARED, "2", False),
    (Interrupted("SIGTERM"), "2", False),
    (None, "2", False),
])  # fmt: skip
def test_no_process_waits_in_the_end_for_others_that_wait_for_it(monkeypatch, error, size, leaves):
    """NCCL would wait where only one of them ends its group."""
    calls = []
    monkeypatch.setattr(distributed, "_join", lambda *_: calls.append("joined"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda values, value, group: values.__setitem__(0, value))
    monkeypatch.setenv("WORLD_SIZE", size)
    with nullcontext() if error is None else pytest.raises(type(error)), start("ddp", "cpu"):
        if error is not None:
            raise error
    assert calls == (["joined"] if leaves else ["joined", "left"])
