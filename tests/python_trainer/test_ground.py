"""The tasks of mixed difficulty: their base policies are as right as docs/tasks.md says."""

from pathlib import Path

import pytest

from python_trainer.config import load_config
from python_trainer.model.policy import load_policy
from python_trainer.model.shipped import policy_folder
from python_trainer.rollout import PagedEngine, Request, SamplingParams
from python_trainer.tasks.rewards import score

CONFIGS = Path(__file__).parents[2] / "configs"
# of 64 test prompts with 8 answers each: mean p, share of groups without a spread
PROMISED = {"sums": (0.40, 0.61), "lattice_paths": (0.33, 0.69), "countdown": (0.31, 0.54)}


@pytest.mark.parametrize("name", PROMISED)
def test_policies_are_as_right_as_promised(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    task, policy = config.task.load(), load_policy(config.model)
    examples = task.test[:64]
    requests = [
        Request(ids, num_samples=8, sample_id=8 * i, max_new_tokens=config.rollout.max_completion_length)
        for i, ids in enumerate(policy.encode([example.prompt for example in examples]))
    ]
    engine = PagedEngine(policy.whole, eos_token_ids=policy.eos_token_ids)
    ids = [rollout.response_ids for rollout in engine.generate(requests, SamplingParams(seed=1))]
    owners = [example for example in examples for _ in range(8)]
    right = score(task, owners, [policy.decode(row) for row in ids], ids).accuracy
    groups = [sum(right[8 * i : 8 * i + 8]) for i in range(64)]
    p, alike = PROMISED[name]
    assert sum(right) / 512 == pytest.approx(p, abs=0.07)
    assert sum(count in (0, 8) for count in groups) / 64 == pytest.approx(alike, abs=0.1)
    assert {0, 8} <= set(groups)  # some are never right, some always
    assert sum(file.stat().st_size for file in policy_folder(config.model.path).iterdir()) < 8_000_000
