"""Two processes train as one does."""

from unittest.mock import patch

import pytest
import torch
from conftest import merged, run_settings
from gloo import KINDS, run_on_ranks, train
from safetensors.torch import load_file

from python_trainer.model import policy
from python_trainer.run_directory import read_metrics

MANY = {"micro_batch_tokens": 30}  # several micro-batches for each process, and not the same number
# sections of settings by name of the case
CASES = {
    "token-mean, recomputed activations": {
        "algorithm": {"loss_type": "token-mean"}, "model": {"gradient_checkpointing": True}, "optimizer": MANY,
    },
    "seq-mean-token-mean, offloaded": {
        "algorithm": {"loss_type": "grpo", "mask_truncated_completions": True}, "optimizer": MANY,
    },
    "seq-mean-token-sum": {
        "algorithm": {
            "loss_type": "seq-mean-token-sum", "advantage": "rloo", "beta": 0.05, "num_iterations": 2,
            "num_minibatches": 2,
        },
        "optimizer": MANY,
    },
    "constant, logits in blocks": {
        "algorithm": {"loss_type": "dr_grpo", "scale_rewards": "none"}, "optimizer": MANY,
    },
    "an empty part": {
        "rollout": {"prompts_per_step": 3, "num_generations": 1},
        "algorithm": {"advantage": "reinforce++", "num_minibatches": 3, "beta": 0.05, "use_kl_in_reward": True},
    },
    "critic": {"algorithm": {"advantage": "gae", "num_minibatches": 2, "vf_coef": 0.5}, "optimizer": MANY},
    "separate critic": {
        "algorithm": {"advantage": "gae"}, "critic": {"separate": True}, "optimizer": MANY,
    },
    "dynamic sampling": {
        "rollout": {"dynamic_sampling": True, "prompts_per_step": 3, "schedule": "history"},
        "task": {"reward": "conftest:even"},
    },
    "rhyme": {"accelerators": {"enabled": ["rhyme"], "rhyme": {"rare_share": 0}}, "task": {"reward": "conftest:even"}},
    "rpo and drafts": {"accelerators": {"enabled": ["rpo", "drafts"], "rpo": {"preset": "paper"}}},
    "adapters": {"model": {"lora": {"r": 4, "alpha": 16}}, "algorithm": {"beta": 0.05}, "optimizer": MANY},
    "some answers teach nothing": {
        "task": {"reward": "conftest:even"}, "algorithm": {"num_minibatches": 2}, "optimizer": MANY,
        "rollout": {"num_generations": 2},
    },
    "all cut off": {
        "rollout": {"max_completion_length": 2},
        "algorithm": {"mask_truncated_completions": True, "num_iterations": 2},
    },
}  # fmt: skip
SHARDED = {"seq-mean-token-mean, offloaded": {"optimizer": {"offload": True}}}  # further settings of fsdp2 alone


def train_case(name, *args):
    largest = 0 if "logits in blocks" in name else policy.LARGEST_LOGITS
    with patch.object(policy, "LARGEST_LOGITS", largest):
        train(*args)


def train_all(settings, folder):
    for name, changes in CASES.items():
        for parallel in KINDS:
            own = SHARDED.get(name, {}) if parallel == "fsdp2" else {}
            train_case(name, merged(merged(settings, changes), own), folder / parallel / name, parallel)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_policy, jsonl_files):
    """Run directories: KIND/CASE, of one process and of two."""
    folder = tmp_path_factory.mktemp("runs")
    settings = run_settings(tiny_policy, jsonl_files) | {"max_steps": 2}
    # Adam divides by the size of a gradient, of rounding errors too where there is nothing else; not far below epsilon
    settings["optimizer"] = {"learning_rate": 1e-3, "adam_epsilon": 1e-4}
    run_on_ranks(folder, train_all, settings, folder)
    for name, changes in CASES.items():
        train_case(name, merged(settings, changes), folder / "none" / name)
    return folder


@pytest.mark.parametrize("parallel", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_same_weights_and_metrics_as_one_process(runs, name, parallel):
    """Up to the order in which gradients are added: two processes add their parts first."""
    one, several = (load_file(runs / kind / name / "weights.safetensors") for kind in ("none", parallel))
    for key, value in one.items():
        torch.testing.assert_close(several[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    rows = [read_metrics(runs / kind / name) for kind in ("none", parallel)]
    assert len(rows[0]) == len(rows[1]) == 3
    for first, second in zip(*rows):
        known = {k for k in first if "time" not in k and "per_second" not in k and not k.startswith("drafts/")}
        assert known <= set(second)
        for key in known - {"tokens/trained", "tokens/prefill", "tokens/cached"}:  # of prompts that both compute
            # the first is a largest difference of log-probabilities: rounding of both is all that it is
            rounding = 5e-6 if key == "sampling/logp_difference/max" else 2e-6
            assert second[key] == pytest.approx(first[key], rel=1e-5, abs=rounding), key


def test_all_answers_of_a_step_are_cut_off(runs):
    rows = read_metrics(runs / "none" / "all cut off")[1:]
    assert any(row["completions/clipped_ratio"] == 1 and "grad_norm" not in row for row in rows)


def test_some_answers_have_no_advantage(runs):
    rows = read_metrics(runs / "none" / "some answers teach nothing")[1:]
    assert all(0 < row["frac_reward_zero_std"] < 1 for row in rows)
