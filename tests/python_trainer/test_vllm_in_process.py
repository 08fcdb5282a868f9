"""An engine of vLLM in each process of a run, by one that stands in for it; tests/with_vllm has the real one."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from conftest import merged, run_settings
from fake_llm import FakeLLM, install
from gloo import KINDS, run_on_ranks, train
from safetensors.torch import load_file

from python_trainer.learner import Learner
from python_trainer.rollout.vllm.in_process import _can_sleep, checkpoint_weights
from python_trainer.run_directory import read_metrics


def train_and_tell(settings, folder, parallel, sleeps):
    """Trains; every process writes what it was given to train on, and what became of its engine."""
    given, update = [], Learner.update

    def recorded(self, rollouts, number):
        FakeLLM.last.events.append("update")
        given.append([(r.prompt_ids, r.response_ids, r.logprobs, r.finish_reason) for r in rollouts])
        return update(self, rollouts, number)

    with patch.object(Learner, "update", recorded), pytest.MonkeyPatch.context() as patches:
        install(patches, sleeps=sleeps)
        trainer = train(settings, folder, parallel)
        llm, stats = FakeLLM.last, {k: v for k, v in trainer.engine.stats.items() if k != "weight_bytes"}
        saved = dict(checkpoint_weights(trainer.policy.whole))
        assert llm.loaded.keys() == saved.keys() and all(torch.equal(llm.loaded[name], saved[name]) for name in saved)
    told = {
        "given": given,
        "stats": stats,
        "events": llm.events,
        "backend": llm.options.get("distributed_executor_backend"),
    }
    (folder / f"rank-{trainer.ranks.rank}.json").write_text(json.dumps(told))


def train_all(settings, folder):
    for parallel in KINDS:
        train_and_tell(settings, folder / parallel, parallel, True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_policy, jsonl_files):
    """Run directories: of one process that cannot sleep, and of two, under both kinds, that can."""
    folder = tmp_path_factory.mktemp("runs")
    settings = run_settings(tiny_policy, jsonl_files) | {"max_steps": 2}
    settings["optimizer"] = {"learning_rate": 1e-3, "adam_epsilon": 1e-4}  # as in test_parallel.py
    settings = merged(settings, {"rollout": {"engine": "vllm", "schedule": "history"}})
    run_on_ranks(folder, train_all, settings, folder)
    train_and_tell(settings, folder / "none", None, False)
    return folder


def told(runs, kind, rank=0):
    return json.loads((runs / kind / f"rank-{rank}.json").read_text())


@pytest.mark.parametrize("parallel", KINDS)
def test_each_process_has_an_engine_and_all_end_as_one_does(runs, parallel):
    one, first, second = told(runs, "none"), told(runs, parallel), told(runs, parallel, 1)
    assert one["given"] == first["given"] == second["given"] and len(one["given"]) == 2
    assert one["stats"] == first["stats"] == second["stats"]
    assert one["backend"] is None and first["backend"] == second["backend"] == "external_launcher"
    single, several = (load_file(runs / kind / "weights.safetensors") for kind in ("none", parallel))
    for key, value in single.items():
        torch.testing.assert_close(several[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("parallel", KINDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_engine_sleeps_through_the_update(runs, parallel, rank):
    """And wakes in parts: there is no cache yet while weights are gathered."""
    woken = ["wake weights", "load without a cache", "wake kv_cache", "generate"]
    step = ["sleep 2", "update", *woken]
    assert told(runs, parallel, rank)["events"] == ["load", "generate", *step, *step]
    assert told(runs, "none")["events"] == ["load", "generate", *["update", "load", "generate"] * 2]


def test_the_weights_that_went_to_vllm_are_counted(runs):
    weights = sum(w.nbytes for w in load_file(runs / "none" / "weights.safetensors").values())
    for kind, engines in (("none", 1), ("ddp", 2), ("fsdp2", 2)):
        rows = read_metrics(runs / kind)
        assert [row["total/weight_bytes"] for row in rows] == [engines * n * weights for n in (1, 1, 3)], kind


@pytest.mark.parametrize("setting", [True, False])
def test_it_need_not_sleep(make_config, tmp_path, setting, monkeypatch):
    install(monkeypatch, sleeps=True)
    config = make_config(max_steps=1, rollout={"engine": "vllm", "vllm_enable_sleep_mode": setting})
    train(config.model_dump(), tmp_path / "run")
    assert FakeLLM.last.options["enable_sleep_mode"] == setting == ("sleep 2" in FakeLLM.last.events)


def test_where_vllm_can_sleep(monkeypatch):
    platform = SimpleNamespace(is_sleep_mode_available=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    assert _can_sleep(torch.device("cuda", 1)) and not _can_sleep(torch.device("cpu"))
    platform.is_sleep_mode_available = lambda: False
    assert not _can_sleep(torch.device("cuda", 1))
