"""The tasks of mixed difficulty: frozen once tuned, their base policies as right as docs/quickstart.md says."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from python_trainer.config import load_config
from python_trainer.hub import policy_folder
from python_trainer.model.policy import load_policy
from python_trainer.rollout import PagedEngine, Request, SamplingParams
from python_trainer.tasks.rewards import score

CONFIGS = Path(__file__).parents[2] / "configs"
# of 64 test prompts with 8 answers each: mean p, share of groups without a spread
FROZEN = {
    "sums": "35010d092609260e35a6afaab75e59f87bd1f25110e38172bcecf43471e9a94f",
    "lattice_paths": "671bc08129e4c654be275616fe5986edce9c8659da89e2cc029b3408a97c9f84",
}
PROMISED = {"sums": (0.49, 0.63), "lattice_paths": (0.32, 0.74)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISED)
def test_policies_are_as_right_as_promised(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    task, policy = config.task.load(), load_policy(config.model)
    examples = task.test[:64]
    requests = [
        Request(ids, num_samples=8, sample_id=8 * i, max_new_tokens=config.rollout.max_completion_length)
        for i, ids in enumerate(policy.encode([example.prompt for example in examples]))
    ]
    engine = PagedEngine(policy.inference_model, eos_token_ids=policy.eos_token_ids)
    ids = [rollout.response_ids for rollout in engine.generate(requests, SamplingParams(seed=1))]
    owners = [example for example in examples for _ in range(8)]
    right = score(task, owners, [policy.decode(row) for row in ids], ids).accuracy
    groups = [sum(right[8 * i : 8 * i + 8]) for i in range(64)]
    p, alike = PROMISED[name]
    assert sum(right) / 512 == pytest.approx(p, abs=0.07)
    assert sum(count in (0, 8) for count in groups) / 64 == pytest.approx(alike, abs=0.1)
    assert {0, 8} <= set(groups)  # some are never right, some always


@pytest.mark.parametrize("name", FROZEN)
def test_tuned_tasks_are_frozen(name):
    """Prompts, policy and configuration: whoever changes one makes another task, and the records of this one void."""
    config = load_config(CONFIGS / f"{name}.yaml")
    task, settings = config.task.load(), yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    splits = [[[x.prompt, x.columns.get("answer")] for x in split] for split in (task.train, task.gate, task.test)]
    digest = hashlib.sha256(json.dumps([splits, settings], sort_keys=True).encode())
    digest.update((policy_folder(name) / "model.safetensors").read_bytes())
    assert digest.hexdigest() == FROZEN[name]
