"""Accelerators with everything else: each with every way to train and to generate."""

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from conftest import merged, train
from fake_vllm import draw, install, serving

from python_trainer.accelerators import ACCELERATORS
from python_trainer.errors import UserError
from python_trainer.run.directory import read_metrics

# what else a run does, as sections of its settings; several processes are in test_parallel.py and test_alpha.py
OTHERS = {
    "PPO": {"algorithm": {"advantage": "gae", "num_iterations": 2}},
    "LoRA": {"model": {"lora": {"r": 4, "alpha": 16}}},
    "dynamic sampling": {"rollout": {"dynamic_sampling": True, "max_sampling_rounds": 3}},
    "turns": {"task": {"environment": "test_parallel_vllm:Twice", "max_turns": 2, "reward": "environment"}},
    "vLLM in process": {"rollout": {"engine": "vllm"}},
    "vLLM servers": {"rollout": {"engine": "vllm"}},
}
REFUSED = {
    ("rpo", "turns"): "rpo needs task.environment=null, got test_parallel_vllm:Twice",
    ("rhyme", "turns"): "rhyme needs task.environment=null, got .*:Twice",
    ("drafts", "vLLM servers"): "drafts needs rollout.vllm_server null",
    ("alpha", "LoRA"): "alpha follows whole weight matrices, model.lora must be null",
}
SETTINGS = {
    "rpo": {"whole_share": 0.0, "fill": 4},
    "rhyme": {"rare_share": 0.0},
    "alpha": {"track_steps": 1, "first_step": 3, "refuse": False},
}
# a metric that is above 0 in some step once the accelerator has done its work; the stand-ins for vLLM verify nothing
WORK = {
    "rpo": "rpo/given_tokens",
    "rhyme": "rhyme/stored_answers",
    "drafts": "drafts/accepted_tokens",
    "drafts, vLLM in process": "drafts/history_tokens",
    "alpha": "alpha/tried",
}


@pytest.mark.parametrize("combination", OTHERS)
@pytest.mark.parametrize("name", ACCELERATORS.names)
def test_each_works_or_says_why_not(make_config, gate_task, tmp_path, monkeypatch, name, combination):
    accelerators = SETTINGS | {"enabled": [name]}
    changes = merged(OTHERS[combination], {"task": gate_task})
    if name == "rpo":  # which remembers answers that have room to end
        changes = merged(changes, {"rollout": {"max_completion_length": 40}})
    with ExitStack() as running:
        if combination == "vLLM servers":
            server = running.enter_context(serving())
            server.answers["/v1/completions"] = draw
            changes = merged(changes, {"rollout": {"vllm_server": server.url}})
        elif combination == "vLLM in process":
            install(monkeypatch, sleeps=False)
            shared = SimpleNamespace(share_history=lambda *args, **options: None)
            monkeypatch.setitem(sys.modules, "rlkernels.integrations.vllm", shared)
        if (name, combination) in REFUSED:
            with pytest.raises(UserError, match=REFUSED[name, combination]):
                make_config(accelerators=accelerators, **changes)
            return
        config = make_config(max_steps=6, accelerators=accelerators, **changes)
        train(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    metric = WORK.get(f"{name}, {combination}", WORK[name])
    assert max(row.get(metric, 0) for row in rows) > 0, metric
