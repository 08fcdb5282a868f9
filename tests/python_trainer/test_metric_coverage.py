"""Which answers a metric covers, and where it has no meaning and is missing."""

import math
from statistics import fmean

import pytest
import torch
from conftest import QUIET, graded, train
from sampling_cases import compute_logprobs
from test_ppo import step_batch

from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.loop.batch import Minibatch, mean_metrics
from python_trainer.model.packing import pack_rollouts
from python_trainer.rollout.engine import SamplingParams
from python_trainer.run.directory import read_metrics
from python_trainer.run.logger import rollout_statistics
from python_trainer.trainer import Trainer

SPREAD = {"reward_std", "frac_reward_zero_std"}
OF_THE_UPDATE = {"importance_ratio/mean", "importance_ratio/max", "sampling/logp_difference/mean",
                 "sampling/logp_difference/max", "sampling/importance_sampling_ratio/mean"}  # fmt: skip


def last_is_even(prompts, completions, completion_ids, **columns):
    """Return 1 for prompts of odd length, else whether the last token but the end is even."""
    return [float(len(p) % 2 or ids[-2:][0] % 2 == 0) for p, ids in zip(prompts, completion_ids)]


def test_entropy_counts_every_generated_token_once():
    """Answers without advantage count; prefixes, replies of an environment and stored answers do not."""
    answers = [
        Rollout([1], [2, 3], 0, [-2.0, -1.0], "stop", group=0, reward=1.0),
        Rollout([1], [9, 2, 3], 2, [-1.5], "stop", group=0),
        Rollout([1], [2] * 5, 0, [-0.1] * 5, "stop", group=1),
        Rollout([1], [2, 4, 4, 2], 0, [-0.2, 0.0, 0.0, -0.3], "stop", [True, False, False, True], group=1),
        Rollout([1], [2] * 3, 0, [-50.0] * 3, "stop", group=1, importance_cap=1.0),
    ]
    assert rollout_statistics(answers)["entropy"] == pytest.approx((2 + 1 + 1.5 + 0.5 + 0.2 + 0.3) / 10)
    unknown = [Rollout([1], [2], 0, [math.nan], "stop")]
    assert "entropy" not in rollout_statistics(unknown)


def test_entropy_of_a_run_estimates_that_of_all_answers(make_config, model, tmp_path):
    trainer = train(make_config(max_steps=1, task={"reward": "test_metric_coverage:last_is_even"}), tmp_path / "run")
    row = read_metrics(tmp_path / "run")[1]
    (rollouts,) = trainer.updates
    assert 0 < row["frac_reward_zero_std"] < 1
    surprisals = list[float]()
    entropies = list[float]()
    for answer in rollouts:
        surprisals += [-x for x in compute_logprobs(model, answer.prompt_ids, answer.ids, SamplingParams())]
        with torch.no_grad():
            logits = model(torch.tensor([[*answer.prompt_ids, *answer.ids]])).logits[0, len(answer.prompt_ids) - 1 : -1]
        entropies += torch.distributions.Categorical(logits=logits.double()).entropy().tolist()
    assert row["entropy"] == pytest.approx(fmean(surprisals), abs=1e-4)
    assert row["entropy"] == pytest.approx(fmean(entropies), rel=0.05)


def test_dropped_groups_count_in_what_was_generated(make_config, tmp_path):
    """Groups that dynamic sampling keeps have right and wrong answers, whatever the policy is like."""
    rollout = {"num_generations": 2, "prompts_per_step": 3, "dynamic_sampling": True, "max_sampling_rounds": 8}
    config = make_config(max_steps=1, rollout=rollout, task={"reward": "test_metric_coverage:last_is_even"})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    generate = trainer.generate
    answers = list[Rollout]()

    def record(*arguments):
        rollouts = generate(*arguments)
        answers.extend(rollouts)
        return rollouts

    trainer.generate = record
    trainer.run()
    row = read_metrics(tmp_path / "run")[1]
    assert row["sampling/kept_groups"] < 1 and row["frac_reward_zero_std"] == 0
    assert row["accuracy"] == row["reward"] == pytest.approx(fmean(r.accuracy for r in answers)) != 0.5
    assert row["completions/mean_length"] == pytest.approx(fmean(len(r.response_ids) for r in answers))
    assert row["entropy"] == pytest.approx(-fmean(x for r in answers for x in r.logprobs))


def test_one_answer_has_no_spread(make_config, tmp_path):
    rollout = {"prompts_per_step": 12, "num_generations": 1}
    train(make_config(max_steps=1, rollout=rollout, algorithm={"advantage": "gae"}), tmp_path / "run")
    row = read_metrics(tmp_path / "run")[1]
    assert not SPREAD & row.keys() and row["explained_variance"] == 0.0 and "values/mean" in row


def test_a_step_that_teaches_nothing_has_no_ratios(make_config, tmp_path):
    task = {"reward": "test_dynamic_sampling:always"}
    algorithm = {"importance_sampling": "token_mask"}
    train(make_config(max_steps=1, task=task, algorithm=algorithm), tmp_path / "run")
    row = read_metrics(tmp_path / "run")[1]
    assert row["frac_reward_zero_std"] == 1 and row["loss"] == row["grad_norm"] == row["clip_ratio/low_mean"] == 0
    assert not OF_THE_UPDATE & row.keys() and row["entropy"] > 0


@pytest.mark.parametrize(("algorithm", "missing"), [
    ({}, {"kl", "value_loss", "explained_variance", "sampling/importance_sampling_ratio/mean"}),
    ({"beta": 0.1}, {"sampling/importance_sampling_ratio/mean"}),
    ({"beta": 0.1, "use_kl_in_reward": True, "importance_sampling": "sequence_mask"}, set()),
])  # fmt: skip
def test_what_is_not_computed_is_missing(make_config, tmp_path, algorithm, missing):
    train(make_config(max_steps=1, algorithm=algorithm), tmp_path / "run")
    row = read_metrics(tmp_path / "run")[1]
    assert not missing & row.keys()
    assert {"kl", "sampling/importance_sampling_ratio/mean"} - missing <= row.keys() and OF_THE_UPDATE - missing <= {
        *row
    }


def test_clipped_tokens_are_a_share_of_all(make_config, tmp_path):
    """As in TRL, tokens of answers without advantage are never clipped, and count in the denominator."""
    config = make_config(algorithm={"num_iterations": 3, "epsilon": 0.01})
    learner, reference = (Trainer(config, tmp_path / name, console=QUIET).learner for name in ("ours", "other"))
    reference._have_gradient = lambda batch: [True] * len(batch.rollouts)
    row = learner.update(graded([1, 0, 0, 1] + [1] * 12), 1)
    expected = reference.update(graded([1, 0, 0, 1] + [1] * 12), 1)
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert 0 < row[name] < 0.2 and row[name] == pytest.approx(expected[name], rel=1e-3)


def half(logprobs, ratio, advantages, settings):
    """A policy loss of a user, which clips nothing."""
    return -0.5 * ratio * advantages


@pytest.mark.parametrize(("policy_loss", "bounds"), [
    ("clip", {"low", "high"}), ("cispo", {"high"}), ("test_metric_coverage:half", set()),
])  # fmt: skip
@pytest.mark.parametrize("rewards", [[1, 0, 0, 1] + [1] * 12, [1] * 16])
def test_a_loss_reports_the_bounds_that_it_has(make_config, tmp_path, policy_loss, bounds, rewards):
    """Also in a step that teaches nothing."""
    algorithm = {"policy_loss": policy_loss, "num_iterations": 2, "epsilon": 1e-4}
    row = Trainer(make_config(algorithm=algorithm), tmp_path, console=QUIET).learner.update(graded(rewards), 1)
    reported = {name for name in row if name.startswith("clip_ratio/")}
    assert reported == {f"clip_ratio/{bound}_mean" for bound in bounds}
    assert all((row[name] > 0) == (0 in rewards) for name in reported)


@pytest.mark.parametrize("stored", [[], [0.5, 0.5]])
def test_the_value_loss_is_a_mean_over_what_the_critic_learns_from(stored):
    """Half of the squared errors 1 and 0.5, returns less values, of two fresh answers; stored ones add nothing."""
    num_stored = len(stored)
    batch = step_batch(
        {"advantage": "gae", "scale_rewards": "none", "cliprange_value": None}, [1.0, 0.0] + [1.0] * num_stored,
        [1, 1] + [3] * num_stored, stored=enumerate(stored, start=2),
        old_logprobs=[[0.0]] * 2 + [[0.0] * 3] * num_stored,
        values=[[0.0], [0.5]] + [[0.25] * 3] * num_stored,
    )  # fmt: skip
    batch.set_advantages()
    minibatch = Minibatch(batch, range(2 + num_stored))
    packed = pack_rollouts(batch.rollouts, range(2 + num_stored))
    values = torch.tensor([[0.0], [0.5]] + [[0.25]] * num_stored).expand(packed.mask.shape)
    zeros = torch.zeros(packed.mask.shape)
    _, numbers = minibatch.loss(packed, zeros, zeros, values)
    row = mean_metrics([numbers], [minibatch], RankGroup())
    assert row["value_loss"] == pytest.approx((0.5 + 0.125) / 2) and row["clip_ratio/value"] == 0
