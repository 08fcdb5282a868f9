"""Accelerators with everything else: all of them in one run, and each with every way to train and to generate."""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import QUIET
from fake_llm import install
from fake_vllm import draw, serving

from python_trainer.accelerators import ACCELERATORS
from python_trainer.config import load_config
from python_trainer.errors import UserError
from python_trainer.report.runs import find_runs
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
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
    ("rpo", "turns"): "rpo needs task.environment=null",
    ("rhyme", "turns"): "rhyme needs task.environment=null",
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


def test_all_accelerators_take_part(tmp_path):
    Trainer(load_config(SMOKE), tmp_path / "run", console=QUIET).run()
    (run,) = find_runs([tmp_path])
    # no task for them, no earlier run
    chance = ("alpha/accepted", "rhyme/replayed_answers", "rhyme/rehearsed_answers", "rhyme/earlier_tokens")
    idle = [name for name, count in run.counters.items() if not count and name not in chance]
    assert not idle, run.counters
    assert set(run.summary["accelerator_s"]) == {"rhyme", "rpo", "drafts", "alpha"}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ACCELERATORS.names())
def test_each_works_or_says_why_not(make_config, gate_task, tmp_path, monkeypatch, name, other):
    accelerators = {"enabled": [name]} | ({name: SETTINGS[name]} if name in SETTINGS else {})
    changes = {key: dict(values) for key, values in OTHERS[other].items()}
    changes["task"] = gate_task | changes.get("task", {})
    if name == "rpo":  # which remembers answers that have room to end
        changes["rollout"] = {"max_completion_length": 40} | changes.get("rollout", {})
    with ExitStack() as running:
        if other == "vLLM servers":
            server = running.enter_context(serving())
            server.answers["/v1/completions"] = draw
            changes["rollout"]["vllm_server"] = server.url
        elif other == "vLLM in process":
            install(monkeypatch, sleeps=False)
            shared = SimpleNamespace(share_history=lambda *args, **options: None)
            monkeypatch.setitem(sys.modules, "rlkernels.integrations.vllm", shared)
        if (name, other) in REFUSED:
            with pytest.raises(UserError, match=REFUSED[name, other]):
                make_config(accelerators=accelerators, **changes)
            return
        config = make_config(max_steps=6, accelerators=accelerators, **changes)
        Trainer(config, tmp_path / "run", console=QUIET).run()
    rows = read_metrics(tmp_path / "run")[1:]
    metric = WORK.get(f"{name}, {other}", WORK[name])
    assert max(row.get(metric, 0) for row in rows) > 0, metric
