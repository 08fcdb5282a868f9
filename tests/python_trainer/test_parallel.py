"""Two processes train as one does."""

from unittest.mock import patch

import pytest
import torch
from conftest import merged, run_settings
from gloo import KINDS, run_on_ranks, train
from safetensors.torch import load_file

from python_trainer.model import policy
from python_trainer.run.directory import read_metrics

pytestmark = pytest.mark.slow  # sets up two processes for a minute
TWICE = {"num_iterations": 2, "num_minibatches": 2}
ALPHA = {"track_steps": 1, "first_step": 4, "refuse": False}
TRACKED = {"max_steps": 5}  # as many as alpha follows before it jumps
# sections of settings by name of the case
CASES = {
    "token-mean, recomputed activations": {
        "algorithm": {"loss_type": "token-mean"}, "model": {"gradient_checkpointing": True},
    },
    "seq-mean-token-mean, offloaded": {"algorithm": {"loss_type": "grpo", "mask_truncated_completions": True}},
    "seq-mean-token-sum": {
        "algorithm": {"loss_type": "seq-mean-token-sum", "advantage": "rloo", "beta": 0.05} | TWICE,
    },
    "constant, logits in blocks": {"algorithm": {"loss_type": "dr_grpo", "scale_rewards": "none"}},
    "an empty part": {
        "rollout": {"prompts_per_step": 3, "num_generations": 1},
        "algorithm": {"advantage": "reinforce++", "num_minibatches": 3, "beta": 0.05, "use_kl_in_reward": True},
    },
    "critic": {"algorithm": {"advantage": "gae", "num_minibatches": 2, "vf_coef": 0.5}},
    "separate critic": {"algorithm": {"advantage": "gae"}, "critic": {"separate": True}},
    "dynamic sampling": {
        "rollout": {"dynamic_sampling": True, "prompts_per_step": 3, "schedule": "history"},
        "task": {"reward": "conftest:even"},
    },
    "rhyme": {"accelerators": {"enabled": ["rhyme"], "rhyme": {"rare_share": 0}}, "task": {"reward": "conftest:even"}},
    "rpo and drafts": {"accelerators": {"enabled": ["rpo", "drafts"], "rpo": {"preset": "paper"}}},
    "alpha, paper": {**TRACKED, "accelerators": {"enabled": ["alpha"], "alpha": ALPHA | {"preset": "paper"}}},
    "alpha, gated": {**TRACKED, "accelerators": {"enabled": ["alpha"], "alpha": ALPHA}, "task": {"gate_size": 2}},
    "adapters": {"model": {"lora": {"r": 4, "alpha": 16}}, "algorithm": {"beta": 0.05}},
    "some answers teach nothing": {
        "task": {"reward": "conftest:even"}, "algorithm": {"num_minibatches": 2}, "rollout": {"num_generations": 2},
    },
    "all cut off": {
        "rollout": {"max_completion_length": 2},
        "algorithm": {"mask_truncated_completions": True, "num_iterations": 2},
    },
}  # fmt: skip
# not with fsdp2: alpha needs all weights, to the others shards are nothing else (test_earlier_runs has rhyme)
WHOLE = [name for name in CASES if name.startswith(("alpha", "seq-mean-token-sum", "rhyme", "rpo", "some"))]
SHARDED = {"seq-mean-token-mean, offloaded": {"optimizer": {"offload": True}}}  # further settings of fsdp2 alone


def train_case(name, *args):
    largest = 0 if "logits in blocks" in name else policy.LARGEST_LOGITS
    with patch.object(policy, "LARGEST_LOGITS", largest):
        trainer = train(*args)
    weights = [] if trainer.ranks.sharded else [p.detach() for p in trainer.policy.model.parameters()]
    for rank_weights in trainer.ranks.gather(weights):
        assert all(map(torch.equal, weights, rank_weights)), "every rank has the same weights, to the bit"


def train_all(settings, folder):
    for name, changes in CASES.items():
        for parallel in ["ddp"] if name in WHOLE else KINDS:
            further_settings = SHARDED.get(name, {}) if parallel == "fsdp2" else {}
            train_case(name, merged(merged(settings, changes), further_settings), folder / parallel / name, parallel)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_policy, jsonl_files):
    """Run directories: KIND/CASE, of one process and of two."""
    folder = tmp_path_factory.mktemp("runs")
    settings = merged(run_settings(tiny_policy, jsonl_files), {"max_steps": 2, "task": {"test_size": 3}})
    # Adam divides by the size of a gradient, of rounding errors too where there is nothing else; not far below epsilon
    settings["optimizer"] = {"learning_rate": 1e-3, "adam_epsilon": 1e-4}
    settings["optimizer"]["micro_batch_tokens"] = 30  # several for each process, and not the same number
    run_on_ranks(folder, train_all, settings, folder)
    for name, changes in CASES.items():
        train_case(name, merged(settings, changes), folder / "none" / name)
    return folder


@pytest.mark.parametrize(
    ("name", "parallel"),
    [(name, parallel) for name in CASES for parallel in KINDS if parallel == "ddp" or name not in WHOLE],
)
def test_same_weights_and_metrics_as_one_process(runs, name, parallel):
    """Up to the order in which gradients are added: two processes add their parts first."""
    expected, weights = (load_file(runs / kind / name / "weights.safetensors") for kind in ("none", parallel))
    atol = 1e-5 if name.startswith("alpha") else 1e-6  # a jump takes differences further
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=atol)
    rows = [read_metrics(runs / kind / name) for kind in ("none", parallel)]
    assert len(rows[0]) == len(rows[1]) == CASES[name].get("max_steps", 2) + 1
    for first, second in zip(*rows):
        clock = "time/", "_s", "per_second", "drafts/"
        keys = {k for k in first if not (k.startswith(clock) or k.endswith(clock))}
        assert keys <= set(second)
        for key in keys - {"tokens/trained", "tokens/prefill", "tokens/cached"}:  # of prompts that both compute
            # the first is a largest difference of log-probabilities: rounding of both is all that it is
            rounding = 5e-6 if key == "sampling/logp_difference/max" else 2e-6
            assert second[key] == pytest.approx(first[key], rel=1e-5, abs=rounding), key


def test_cases_are_what_their_names_say(runs):
    truncated, partial = (
        read_metrics(runs / "none" / name)[1:] for name in ("all cut off", "some answers teach nothing")
    )
    assert any(row["completions/clipped_ratio"] == 1 and "grad_norm" not in row for row in truncated)
    assert all(0 < row["frac_reward_zero_std"] < 1 for row in partial)
    for name, accepted in (("alpha, paper", 1), ("alpha, gated", 0)):  # two prompts show nothing
        assert read_metrics(runs / "none" / name)[4]["alpha/accepted"] == accepted
