"""The loop end to end on a tiny policy."""

import io
import json
from statistics import fmean
from unittest.mock import Mock

import pytest
import torch
from conftest import QUIET, same, save_tiny_policy, train
from rich.console import Console
from tiny import copy_weights

from python_trainer.accelerators.base import Accelerator
from python_trainer.accelerators.settings import RPOSettings
from python_trainer.loop.batch import Batch
from python_trainer.model.packing import pack_rollouts
from python_trainer.run.directory import read_evaluations, read_metrics
from python_trainer.trainer import Trainer


def test_learns_and_leaves_a_complete_run_directory(make_config, tmp_path):
    config = make_config(max_steps=12, evaluation={"eval_steps": 5})
    summary = Trainer(config, tmp_path / "run", console=QUIET).run()
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(13))
    first, last = rows[1], rows[-1]
    assert last["reward"] > first["reward"] + 0.2
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 5, 10, 12]
    assert [row["step"] for row in rows[1:] if row["time/eval_s"] > 0] == [5, 10, 12]
    assert rows[5]["time/checkpoint_s"] > rows[6]["time/checkpoint_s"], "the save after step 4 counts in the next row"
    for name in (
        "reward", "reward_std", "rewards/digits/mean", "rewards/digits/std", "frac_reward_zero_std", "accuracy",
        "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
        "loss", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "importance_ratio/mean",
        "sampling/logp_difference/mean", "grad_norm", "learning_rate", "tokens_per_second", "time/rollout_s",
        "time/train_s", "time/reward_s", "time/wall_s",
    ):  # fmt: skip
        assert all(name in row for row in rows[1:]), name
    assert first["sampling/logp_difference/max"] < 1e-4 and abs(first["importance_ratio/mean"] - 1) < 1e-6
    assert summary.keys() >= {
        "steps", "wall_s", "rollout_s", "train_s", "accelerator_s", "generated_tokens", "prefill_tokens",
        "trained_tokens", "eval_accuracy_start", "eval_accuracy_final", "seconds_to_target", "tokens_to_target",
        "device", "versions",
    }  # fmt: skip
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert summary["steps"] == 12 and summary["seconds_to_target"] is None
    assert summary["eval_accuracy_final"] > summary["eval_accuracy_start"]
    for name, correct in read_evaluations(tmp_path / "run").items():
        assert set(correct) <= {0, 1} and fmean(correct) == pytest.approx(summary[f"eval_accuracy_{name}"])
    total = sum(row["completions/generated_length"] for row in rows[1:]) * 16
    assert summary["generated_tokens"] == pytest.approx(total) == rows[-1]["total/generated_tokens"]
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert [p.name for p in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["step-000010", "step-000012"]
    next_config = make_config(model={"path": str(tmp_path / "run" / "model")}, max_steps=1)
    assert Trainer(next_config, tmp_path / "next", console=QUIET).evaluate("test") == summary["eval_accuracy_final"]


@pytest.mark.parametrize("algorithm", [
    {"loss_type": "grpo"},
    {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "seq-mean-token-sum", "advantage": "rloo", "beta": 0.05},
    {"advantage": "gae", "num_minibatches": 2, "vf_coef": 0.5},
    {"advantage": "reinforce++", "beta": 0.05, "use_kl_in_reward": True},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 3e-3},
    {"num_iterations": 2, "epsilon": 0.01, "beta": 0.1},
])  # fmt: skip
def test_neither_weights_nor_metrics_depend_on_micro_batches(make_config, tmp_path, algorithm):
    """They are of the whole batch, however it is split, not of the last micro-batch."""
    runs = []
    rows = []
    for name, tokens in (("whole", 100_000), ("split", 30)):
        optimizer = {"micro_batch_tokens": tokens, "learning_rate": 1e-3}
        config = make_config(max_steps=2, algorithm=algorithm, optimizer=optimizer)
        trainer = Trainer(config, tmp_path / name, console=QUIET)
        start = copy_weights(trainer.policy)
        trainer.run()
        rows.append(read_metrics(tmp_path / name)[1:])
        runs.append(copy_weights(trainer.policy))
    assert any(not torch.equal(start[name], value) for name, value in runs[0].items())
    torch.testing.assert_close(*runs, rtol=1e-3, atol=1e-5)
    for first, second in zip(*rows):  # all answers of a step may be truncated, and have no loss
        for name in first.keys() & {"loss", "kl", "entropy", "grad_norm", "importance_ratio/mean"}:
            assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("algorithm", "max_ratio"), [({}, 0.5), ({"advantage": "gae", "use_kl_in_reward": True, "kl_estimator": "k1"}, 0.7)]
)
def test_kl_to_the_start_holds_the_policy_back(make_config, tmp_path, algorithm, max_ratio):
    kl = {}
    for beta in (1e-6, 10.0):
        config = make_config(max_steps=8, algorithm=algorithm | {"beta": beta}, optimizer={"learning_rate": 5e-3})
        train(config, tmp_path / str(beta))
        rows = read_metrics(tmp_path / str(beta))
        assert rows[1]["kl"] == pytest.approx(0, abs=1e-6)  # nothing has moved yet
        kl[beta] = rows[-1]["kl"]
    assert 0 < kl[10.0] < max_ratio * kl[1e-6], kl


def test_several_passes_and_minibatches_clip(make_config, tmp_path):
    algorithm = {"num_iterations": 3, "num_minibatches": 2, "epsilon": 0.05}
    train(make_config(max_steps=2, algorithm=algorithm, optimizer={"learning_rate": 0.05}), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert any(row["clip_ratio/low_mean"] > 0 for row in rows) and any(row["clip_ratio/high_mean"] > 0 for row in rows)
    assert any(abs(row["importance_ratio/max"] - 1) > 0.05 for row in rows)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_temperature_is_the_same_in_sampling_and_scoring(make_config, tmp_path, mode):
    config = make_config(max_steps=1, rollout={"temperature": 0.6}, algorithm={"importance_sampling": mode})
    train(config, tmp_path / "run")
    assert read_metrics(tmp_path / "run")[1]["sampling/logp_difference/max"] < 1e-4


@pytest.mark.parametrize("gap", [0.1, 0.6])
def test_a_sampler_of_another_model_is_noted(make_config, tmp_path, gap):
    """A server samples so whose configuration does not fit the weights it gets."""
    output = io.StringIO()
    trainer = Trainer(make_config(max_steps=2), tmp_path / "run", console=Console(file=output, width=300))

    def generate_apart(*arguments, generate=trainer.engine.generate):
        rollouts = generate(*arguments)
        for rollout in rollouts:
            rollout.logprobs = [logprob - gap for logprob in rollout.logprobs]
        return rollouts

    trainer.engine.generate = generate_apart
    trainer.run()
    message = "samples from another model than the one that trains: log-probabilities differ by 0.60 on average"
    assert output.getvalue().count(message) == (1 if gap > 0.5 else 0)


def test_another_seed_gives_other_weights(make_config, tmp_path):
    """Tests of resuming check that the same seed gives the same weights."""
    assert not same(*(train(make_config(max_steps=1, seed=seed), tmp_path / str(seed)) for seed in (3, 4)))


def test_accelerators_are_called_in_order_and_may_change_the_groups(make_config, tmp_path):
    """This accelerator reverses the groups, and gives the first of them a prefix."""

    def plan(context, groups):
        groups[0].prefix_ids = [1, 2, 3]
        return groups[::-1]

    def collect(context, rollouts):
        assert [r.response_ids[: r.prefix_len] for r in rollouts] == [[]] * 12 + [[1, 2, 3]] * 4
        return rollouts

    spy = Mock(wraps=Accelerator(RPOSettings()))
    spy.configure_mock(name="spy", **{"plan.side_effect": plan, "collect.side_effect": collect})
    trainer = Trainer(make_config(max_steps=2), tmp_path / "run", console=QUIET)
    trainer.accelerators = [spy]
    trainer.run()
    step = ["before_step", "plan", "collect", "after_update", "state_dict"]
    assert [name for name, *_ in spy.method_calls] == ["begin", *step, *step, "summary"]
    assert [call.args[0].step for call in spy.after_update.call_args_list] == [1, 2]


def test_time_limit_ends_after_a_step_with_evaluation_and_checkpoint(make_config, tmp_path):
    summary = Trainer(make_config(max_steps=1000, max_seconds=1e-6), tmp_path / "run", console=QUIET).run()
    assert summary["steps"] == 1
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "eval/accuracy" in row] == [0, 1]
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()


def test_a_target_is_noted_and_another_one_is_looked_for_anew(make_config, tmp_path):
    evaluation = {"eval_steps": 1, "target_accuracy": 0.01}
    options = {"optimizer": {"learning_rate": 0.03}, "save": {"save_steps": 0}}
    config = make_config(max_steps=6, evaluation=evaluation, **options)
    summary = Trainer(config, tmp_path / "run", console=QUIET).run()
    assert 0 <= summary["seconds_to_target"] <= summary["wall_s"]
    assert 0 < summary["tokens_to_target"] < summary["generated_tokens"]
    resumed = Trainer(config, tmp_path / "run", resume=True, console=QUIET).run()
    assert [resumed[key] for key in ("steps", "seconds_to_target")] == [6, summary["seconds_to_target"]]
    higher = make_config(max_steps=7, evaluation=evaluation | {"target_accuracy": 1.0}, **options)
    higher_target = Trainer(higher, tmp_path / "run", resume=True, console=QUIET).run()
    assert higher_target["steps"] == 7
    assert (higher_target["seconds_to_target"] is None) == (higher_target["eval_accuracy_final"] < 1)


def test_several_eos_tokens_end_answers_and_count_in_the_loss(make_config, tmp_path):
    """The end token is trained on, although it is the padding token as well."""
    folder = save_tiny_policy(tmp_path / "policy", eos_token_id=[63, 5])
    trainer = Trainer(make_config(model={"path": str(folder)}), tmp_path / "run", console=QUIET)
    assert trainer.policy.eos_token_ids == [5, 63] and trainer.learner.reference is None  # beta is 0
    groups = trainer.prompts.groups(trainer.prompts.draw(4))
    rollouts = trainer.generate(groups, 0)
    trainer.scorer.score(groups, rollouts)
    ended = [r for r in rollouts if r.finish_reason == "stop"]
    assert ended and {r.response_ids[-1] for r in ended} <= {5, 63}

    batch = Batch(rollouts, trainer.config.algorithm, 12, trainer.policy.device)
    packed = pack_rollouts(rollouts, range(len(rollouts)))
    assert int(packed.mask.sum()) == int(batch.loss_tokens.sum()) == sum(len(r.response_ids) for r in rollouts)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_answers_go_beyond_a_sliding_window(make_config, tmp_path, lora):
    options = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    folder = save_tiny_policy(tmp_path / "policy", **options)
    trainer = train(make_config(max_steps=1, model={"path": str(folder), "lora": lora}), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")[1]
    assert trainer.policy.traits.window == 6 and metrics["completions/max_length"] == 12
    assert metrics["sampling/logp_difference/max"] < 1e-3  # between generating and training


def test_schedule_by_history_changes_nothing_that_is_learned(make_config, tmp_path):
    fifo = train(make_config(max_steps=5), tmp_path / "fifo")
    config = make_config(max_steps=5, rollout={"schedule": "history"})
    by_history = train(config, tmp_path / "history")
    assert len(by_history.engine.lengths.means) == 18  # of training and of test prompts
    resumed = Trainer(config, tmp_path / "history", resume=True, console=QUIET)
    assert resumed.engine.lengths.means == by_history.engine.lengths.means
    torch.testing.assert_close(copy_weights(by_history.policy), copy_weights(fifo.policy), rtol=1e-5, atol=1e-6)


def test_progress_within_an_evaluation_and_a_step(make_config, tmp_path, monkeypatch):
    """Without a terminal a line is printed now and then, here at once; the answers do not change."""
    monkeypatch.setattr("python_trainer.run.logger.LINE_SECONDS", 0.0)
    console = Console(file=io.StringIO(), width=200)
    watched = Trainer(make_config(max_steps=1), tmp_path / "watched", console=console)
    watched.run()
    lines = [line.split("  ") for line in console.file.getvalue().splitlines() if line.startswith("train")]
    progress = [(head, text[-1]) for head, *text in lines]
    assert ("train 0/1", "evaluation 1/6") in progress and ("train 0/1", "evaluation 6/6") in progress
    assert ("train 0/1", "answers 16/16") in progress
    unwatched = Trainer(make_config(max_steps=1), tmp_path / "alone", console=QUIET)
    unwatched.engine.on_progress = None
    unwatched.run()
    assert same(watched, unwatched)
