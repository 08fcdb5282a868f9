"""PPO and REINFORCE++ in the loop: values, advantages per token, KL in the reward, the critic's own weights."""

import copy
import math

import pytest
import torch
from conftest import QUIET, save_tiny_policy, train

from python_trainer.algorithms.advantages import explained_variance
from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.loop.batch import Batch, Minibatch, gather_rows
from python_trainer.model.critic import Critic
from python_trainer.model.packing import pack_rollouts
from python_trainer.model.settings import CriticConfig, OptimizerConfig
from python_trainer.run.checkpoint import list_checkpoints, load_checkpoint
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer

CPU = torch.device("cpu")
PPO = {"advantage": "gae", "num_iterations": 2, "num_minibatches": 2, "loss_type": "token-mean"}


def table(rows):
    """Return rows as [B, T], NaN beyond the ends."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[math.nan] * (width - len(row))] for row in rows]).reshape(len(rows), width)


def step_batch(algorithm, rewards, lengths, *, groups=None, in_loss=None, unscored=0, stored=(), **recorded):
    """Return a batch of answers with these rewards and lengths, and with recorded log-probabilities or values."""
    finished = in_loss or [True] * len(lengths)
    group_indices = groups or range(len(lengths))
    rollouts = [
        Rollout([1], [2] * n, unscored, [0.0] * (n - unscored), "stop" if k else "length", reward=reward, group=group)
        for reward, n, k, group in zip(rewards, lengths, finished, group_indices, strict=True)
    ]
    for index, success_rate in dict(stored).items():
        rollouts[index].importance_cap = 1.0
        rollouts[index].success_rate = success_rate
    batch = Batch(rollouts, AlgorithmConfig(mask_truncated_completions=True, **algorithm), 99, CPU)
    vars(batch).update({name: table(rows) for name, rows in recorded.items()})
    return batch


# what a step adds to two fresh answers: nothing, or right answers from a store, in a group (None) or by themselves
@pytest.mark.parametrize("stored", [[], [None], [0.5], [None, 0.5]])
def test_loss_and_gradients_of_ppo_known_values(stored):
    """Clipped surrogate and clipped value loss; stored answers, which are all right, are no target of the critic."""
    algorithm = {"advantage": "gae", "lam": 0.5, "scale_rewards": "none", "loss_type": "token-mean", "vf_coef": 0.5}
    num_stored = len(stored)
    lengths = [2, 1] + [1] * len(stored)
    batch = step_batch(
        algorithm, [1.0, 0.0] + [1.0] * num_stored, lengths, stored=enumerate(stored, start=2),
        old_logprobs=[[-1.0, -1.0], [-1.0]] + [[0.0]] * num_stored, values=[[0.5, 0.25], [0.5]] + [[0.75]] * num_stored,
    )  # fmt: skip
    row = batch.set_advantages()
    # first answer: last token 1 - 0.25 = 0.75; before it 0.25 - 0.5 + 0.5 * 0.75 = 0.125; second: 0 - 0.5
    torch.testing.assert_close(batch.advantages[batch.present][:3], torch.tensor([0.125, 0.75, -0.5]))
    torch.testing.assert_close(batch.returns[batch.present][:3], torch.tensor([0.625, 1.0, 0.0]))  # advantage + value
    assert row["values/mean"] == pytest.approx(1.25 / 3) and row["returns/mean"] == pytest.approx(1.625 / 3)
    # errors = advantages: mean 0.125, squares 0 + 0.625^2 + 0.625^2 = 0.78125
    returns = (0.625 - 13 / 24) ** 2 + (1 - 13 / 24) ** 2 + (13 / 24) ** 2
    assert row["explained_variance"] == pytest.approx(1 - 0.78125 / returns)
    assert batch.returns[batch.present][3:].isnan().all()
    packed = pack_rollouts(batch.rollouts, range(2 + num_stored))
    row_of = [packed.samples.index(i) for i in range(2 + num_stored)]
    ratios = torch.ones(2 + num_stored, 2)
    predicted = torch.zeros(2 + num_stored, 2)
    ratios[row_of[0]] = torch.tensor([1.5, 1.1])
    ratios[row_of[1], 0] = 0.5
    predicted[row_of[0]] = torch.tensor([0.8, 0.3])
    predicted[row_of[1], 0] = 0.1
    logprobs = (gather_rows(batch.old_logprobs, packed) + ratios.log()).requires_grad_()
    values = predicted.requires_grad_()
    loss, _ = Minibatch(batch, range(2 + num_stored)).loss(packed, logprobs, torch.zeros_like(logprobs), values)
    by_policy, by_critic = torch.autograd.grad(loss, (logprobs, values))
    # advantages 0.125, 0.75 | -0.5: -min(1.5, 1.2) x 0.125 = -0.15, -1.1 x 0.75 = -0.825 | -min(-0.25, -0.4) = 0.4.
    # returns 0.625, 1 | 0, values moved by at most 0.2: max(0.175^2, 0.075^2) / 2, 0.7^2 / 2 | max(0.1^2, 0.3^2) / 2
    critic = (0.0153125 + 0.245 + 0.045) / 3
    tokens = 3 + num_stored
    # an answer that joins a group has the advantage 1 - 0.75, one by itself that of chance 0.5, both at ratio 1
    stored_loss = sum(-0.25 if expected is None else -0.5 for expected in stored)
    assert loss.item() == pytest.approx((-0.15 - 0.825 + 0.4 + stored_loss) / tokens + 0.5 * critic, rel=1e-5)
    torch.testing.assert_close(by_policy[row_of[0]], torch.tensor([0.0, -0.825 / tokens]))
    torch.testing.assert_close(by_policy[row_of[1]], torch.zeros(2))  # clipped
    torch.testing.assert_close(by_critic[row_of[0]], 0.5 / 3 * torch.tensor([0.175, -0.7]))
    assert not by_critic[row_of[1:]].any()  # held back, and nobody's target


@pytest.mark.parametrize(("kind", "factor"), [("group", 1.0), ("rloo", 2.0)])
def test_kl_in_the_reward_of_groups_is_per_answer(kind, factor):
    algorithm = {"advantage": kind, "scale_rewards": "none", "beta": 1.0}
    algorithm |= {"kl_estimator": "k1", "use_kl_in_reward": True}
    recorded = {"old_logprobs": [[-1.0, -1.0], [-1.0]], "reference_logprobs": [[-1.25, -1.25], [-1.0]]}
    batch = step_batch(algorithm, [1.0, 0.0], [2, 1], groups=[3, 3], **recorded)
    batch.set_advantages()
    # rewards 1 - 0.25 - 0.25 = 0.5 and 0: mean 0.25
    torch.testing.assert_close(batch.advantages[batch.present], factor * torch.tensor([0.25, 0.25, -0.25]))


def test_reinforce_plus_plus_known_values():
    """Global whitening of the discounted reward to come; truncated answers that are masked do not count."""
    algorithm = {"advantage": "reinforce++", "gamma": 0.5}
    answers = ([1.0, 0.0, 99.0], [2, 1, 1])
    batch = step_batch(algorithm, *answers, in_loss=[True, True, False])
    batch.set_advantages()
    # to come: 0.5, 1, 0 -> mean 0.5, variance (0 + 0.25 + 0.25) / 2 = 0.25, deviation 0.5
    torch.testing.assert_close(batch.advantages[batch.present], torch.tensor([0.0, 1.0, -1.0, 0.0]))
    batch = step_batch(algorithm | {"scale_rewards": "none"}, *answers, in_loss=[True, True, False])
    batch.set_advantages()
    torch.testing.assert_close(batch.advantages[batch.present], torch.tensor([0.5, 1.0, 0.0, 99.0]))


def test_kl_in_the_reward_is_per_token_and_a_given_prefix_takes_no_part_in_advantages():
    """NaN is what stands where nothing was scored."""
    recorded = {"old_logprobs": [[math.nan, -1.0, -2.0]], "reference_logprobs": [[math.nan, -1.5, -1.75]]}
    for kind in ("gae", "reinforce++", "group"):
        values = {"values": [[math.nan, 0.25, 0.5]]} if kind == "gae" else {}
        algorithm = {"advantage": kind, "lam": 1.0, "scale_rewards": "none"}
        algorithm |= {"beta": 0.5, "kl_estimator": "k1", "use_kl_in_reward": True}
        batch = step_batch(algorithm, [1.0], [3], unscored=1, **recorded, **values)
        row = batch.set_advantages()
        # KL 0.5 and -0.25, times 0.5: to come 0.875 and 1.125; minus the values 0.25 and 0.5; alone in its group
        expected = {"gae": [0.0, 0.625, 0.625], "reinforce++": [0.0, 0.875, 1.125], "group": [0.0, 0.0, 0.0]}[kind]
        assert batch.advantages[batch.present].tolist() == pytest.approx(expected) and row["kl"] == pytest.approx(0.125)


def test_explained_variance():
    returns = torch.tensor([[0.0, 1.0, 2.0, math.nan]])
    mask = torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)  # a constant offset is not variance
    # errors 0, -1, -2 -> doubled values: returns - 2 returns: variance 1 = that of the returns
    assert explained_variance(2 * returns, returns, mask) == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(1, 4), mask) == 0.0
    assert explained_variance(returns, returns, torch.zeros(1, 4)) == 0.0


def test_empty_answers_and_an_empty_batch():
    for lengths in ([], [0], [0, 2]):
        values = [[0.5] * n for n in lengths]
        batch = step_batch({"advantage": "gae"}, [1.0] * len(lengths), lengths, values=values)
        batch.set_advantages()
        assert batch.advantages[batch.present].shape == batch.returns[batch.present].shape == (sum(lengths),)
        assert not batch.advantages[batch.present].isnan().any()


@pytest.mark.parametrize("separate", [False, True])
def test_values_are_those_of_the_state_before_each_token(policy, answers, separate):
    """Check their gradients as well."""
    critic = Critic(policy, CriticConfig(separate=separate), OptimizerConfig(), RankGroup())
    with torch.no_grad():
        critic.head.weight.normal_(generator=torch.Generator().manual_seed(0))
        critic.head.bias.fill_(0.3)
    calls = []
    total = 0.0
    model = critic.body if separate else policy.model.model
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    packed = pack_rollouts(answers, range(len(answers)))
    with policy.packed_attention():
        values = critic(packed, policy.token_logprobs(packed, 0.7)[2])
        weights = torch.randn(values.shape)
        grads = torch.autograd.grad((values * weights).sum(), [*model.parameters(), *critic.head.parameters()])
    hook.remove()
    assert len(calls) == 1  # one pass for all tokens; with a value head it is the policy's own
    for row, sample in enumerate(packed.samples):
        answer = answers[sample]
        n = len(answer.response_ids)
        ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
        states = policy.model.model(input_ids=ids).last_hidden_state[0, len(answer.prompt_ids) - 1 : -1]
        expected = critic.head(states)[:, 0]
        torch.testing.assert_close(values[row, :n], expected, rtol=1e-4, atol=1e-5)
        assert not values[row, n:].any()
        total = total + (expected * weights[row, :n]).sum()
    expected_grads = torch.autograd.grad(total, [*policy.model.model.parameters(), *critic.head.parameters()])
    for gradient, expected_grad in zip(grads, expected_grads, strict=True):
        assert (gradient - expected_grad).norm() < 1e-5 * expected_grad.norm()


@pytest.mark.parametrize("separate", [False, True])
def test_the_critic_learns_from_the_value_loss_alone(make_config, tmp_path, separate):
    """Two steps, as the head starts at zero. test_values_are_those_of_the_state... has the gradient in the policy.

    Its body is a copy of layers that recompute their activations, and recomputes its own.
    """
    for coef in (0.0, 1.0):
        config = make_config(
            max_steps=2, algorithm={"advantage": "gae", "vf_coef": coef, "lam": 1.0, "scale_rewards": "none"},
            critic={"separate": separate}, optimizer={"learning_rate": 1e-3}, model={"gradient_checkpointing": True},
        )  # fmt: skip
        trainer = Trainer(config, tmp_path / str(coef), console=QUIET)
        start = copy.deepcopy(trainer.learner.critic.state_dict())
        trainer.run()
        moved = {name for name, w in trainer.learner.critic.state_dict().items() if not torch.equal(start[name], w)}
        assert moved == (start.keys() if coef else set())
    assert {"head.weight", "head.bias"} <= moved and (len(moved) > 2) == separate


def test_first_step_of_the_policy_ignores_a_separate_critic(make_config, tmp_path):
    """At the first step every value is 0, so the policy's update is that of REINFORCE with lambda 1."""
    runs = {}
    for kind in ("gae", "reinforce++"):
        config = make_config(max_steps=1, algorithm={"advantage": kind, "lam": 1.0}, critic={"separate": True})
        runs[kind] = train(config, tmp_path / kind).policy.model.state_dict()
    torch.testing.assert_close(runs["reinforce++"], runs["gae"], rtol=1e-4, atol=1e-6)


REINFORCE = {"advantage": "reinforce++", "beta": 0.01, "use_kl_in_reward": True, "kl_estimator": "k1"}


@pytest.mark.parametrize(("algorithm", "critic", "dtype"), [
    (PPO, {"learning_rate": 1e-2}, "bfloat16"),  # the value head is in float32
    (PPO, {"separate": True, "learning_rate": 1e-3}, "float32"),
    (REINFORCE, {}, "float32"),
])  # fmt: skip
def test_one_answer_per_prompt_is_enough_to_learn(make_config, tmp_path, algorithm, critic, dtype):
    config = make_config(
        max_steps=12, rollout={"prompts_per_step": 12, "num_generations": 1}, algorithm=algorithm, critic=critic,
        model={"path": str(save_tiny_policy(tmp_path / "policy")), "dtype": dtype},
        optimizer={"learning_rate": 5e-3 if critic else 1e-2},
    )  # fmt: skip
    trainer = train(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert rows[-1]["reward"] > rows[0]["reward"] + (0.1 if dtype == "bfloat16" else 0.2)
    if algorithm is REINFORCE:
        assert trainer.learner.critic is None and rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl"] > 0
        return
    names = ("value_loss", "clip_ratio/value", "explained_variance", "values/mean", "returns/mean")
    assert all(name in row for row in rows for name in names)
    assert rows[0]["values/mean"] == 0.0 and rows[0]["explained_variance"] == 0.0  # the head starts at zero
    saved = load_checkpoint(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])["critic"]["model"]
    assert critic.get("separate") or set(saved) == {"head.weight", "head.bias"}
    assert rows[-1]["values/mean"] > 0.05 and trainer.learner.critic.head.weight.dtype == torch.float32
