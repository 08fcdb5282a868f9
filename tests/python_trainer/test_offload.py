"""optimizer.offload: shards, gradients and moments in the memory of the host; the same weights and checkpoints."""

import shutil

import pytest
import torch
import torch.distributed as dist
from conftest import merged, run_settings
from gloo import run_on_ranks, train
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from python_trainer.checkpoint import list_checkpoints, load_whole
from python_trainer.distributed import start
from python_trainer.errors import UserError
from python_trainer.model.settings import ModelConfig

HALF = {"max_steps": 1}
OFFLOAD = {"optimizer": {"offload": True}}


def assert_equal_states(first, second):
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.keys() == second[name].keys()
        assert all(torch.equal(value, second[name][key]) for key, value in values.items()), name


def in_two(settings, folder):
    """Two processes with and without, and going on from either with the other."""
    train(settings, folder / "plain", "fsdp2")
    for first, then in ((settings, merged(settings, OFFLOAD)), (merged(settings, OFFLOAD), settings)):
        name = folder / ("to offload" if first is settings else "from offload")
        train(first | HALF, name, "fsdp2")
        if first is not settings and dist.get_rank() == 0:
            shutil.copytree(name, folder / "to one")
        dist.barrier()
        train(then, name, "fsdp2", resume=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_policy, jsonl_files):
    folder = tmp_path_factory.mktemp("runs")
    algorithm = {"advantage": "gae", "num_minibatches": 2}
    settings = merged(
        run_settings(tiny_policy, jsonl_files),
        {"max_steps": 2, "model": {"dtype": "bfloat16"}, "algorithm": algorithm, "critic": {"separate": True}},
    )
    run_on_ranks(folder, in_two, settings, folder)
    return folder, settings


@pytest.mark.parametrize("name", ["to offload", "from offload"])
def test_runs_in_shards_are_those_without(runs, name):
    folder, _ = runs
    plain, moved = (load_file(folder / place / "weights.safetensors") for place in ("plain", name))
    assert all(torch.equal(value, moved[key]) for key, value in plain.items())
    first, second = (load_whole(list_checkpoints(folder / place / "checkpoints")[-1]) for place in ("plain", name))
    assert_equal_states(first["optimizer"], second["optimizer"])
    assert_equal_states(first["critic"]["optimizer"], second["critic"]["optimizer"])


def test_a_run_in_one_process_takes_over_what_two_wrote(runs, tmp_path):
    folder, settings = runs
    shutil.copytree(folder / "to one", tmp_path / "run")
    train(settings, tmp_path / "run", resume=True)
    assert load_whole(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])["optimizer"]


@pytest.mark.parametrize("offload", [False, True])
def test_what_trains_is_offloaded_and_a_reference_is_not(tiny_policy, offload):
    with start("fsdp2", "cpu") as ranks:
        policy = ranks.load(ModelConfig(path=str(tiny_policy), device="cpu"), offload=offload)
        reference = ranks.copy(policy.inference_model, trains=False)
        for model, moved in ((policy.model, offload), (reference, False)):
            parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
            assert parts and all(
                group.offload_policy.__class__.__name__ == ("CPUOffloadPolicy" if moved else "OffloadPolicy")
                for part in parts
                if (group := part._get_fsdp_state()._fsdp_param_group)
            )


@pytest.mark.parametrize("parallel", ["none", "ddp"])
def test_weights_that_are_not_sharded_cannot_be_offloaded(make_config, parallel):
    with pytest.raises(UserError, match=f"optimizer.offload needs parallel=fsdp2, in one process too, got {parallel}"):
        make_config(parallel=parallel, **OFFLOAD)
