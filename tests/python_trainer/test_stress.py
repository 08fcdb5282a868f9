"""Numbers at their limits: whatever a reward or a model comes with, weights stay finite and are what they should be."""

import math

import pytest
import torch
from conftest import graded, merged
from paged import engine_for, make_policy
from support import assert_equal
from tiny import copy_weights

from python_trainer.config import load_config
from python_trainer.data import Request
from python_trainer.errors import NotFinite
from python_trainer.loop.learner import Learner
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.engine import SamplingParams

MIXED, LENGTHS = [1.0, 0.0, 0.0, 1.0], [3, 5, 2, 7]


def learner_of(policy, settings, temperature=1.0, **algorithm):
    rollout = {"max_completion_length": 16384, "temperature": temperature}
    return Learner(policy, load_config(merged(settings, {"algorithm": algorithm, "rollout": rollout})))


def learn(learner, rewards=MIXED, lengths=LENGTHS, **options):
    """Return metrics of an update by answers of these rewards and lengths; check that all numbers are finite."""
    learned = learner.update(graded(rewards, lengths, **options), 1)
    assert all(math.isfinite(value) for value in learned.values())
    assert all(p.isfinite().all() for p in learner.policy.model.parameters())
    return learned


def policy_of(tokenizer, vocab=64, **sizes):
    """Return a random model with any vocabulary; nothing decodes its tokens."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "tie_word_embeddings": True, "eos_token_id": 0} | sizes
    return make_policy("Qwen2", tokenizer, vocab_size=vocab, **sizes)


@pytest.fixture
def fresh(tiny_policy, settings):
    """Return a function that makes a learner of the tiny policy, for these settings of the algorithm."""

    def make(**algorithm):
        policy = load_policy(ModelConfig(path=str(tiny_policy), device="cpu"))
        return learner_of(policy, settings, **algorithm)

    return make


@pytest.mark.parametrize("advantage", ["group", "rloo", "reinforce++"])
@pytest.mark.parametrize("size", [1e-30, 1e15])
def test_rewards_of_any_size_count_as_those_of_one(fresh, advantage, size):
    """Rewards whose squares are too large to compare end the update with a message, and leave the weights."""
    learner = fresh(advantage=advantage)
    plain = fresh(advantage=advantage)
    start_weights = copy_weights(learner.policy)
    learn(plain)
    try:
        learn(learner, [size * reward for reward in MIXED])
    except NotFinite:
        assert_equal(copy_weights(learner.policy), start_weights)
        return
    if size > 1 and advantage != "rloo":  # divided by their deviation
        torch.testing.assert_close(copy_weights(learner.policy), copy_weights(plain.policy), rtol=1e-3, atol=1e-4)


EQUAL = [({}, [reward] * 4, {"num_generations": size}) for reward in (0.0, 1.0, 0.1, -1e15) for size in (1, 4)]
MASKED = [({"loss_type": kind, "mask_truncated_completions": True}, MIXED, {"finish": "length"})
          for kind in ("grpo", "dapo", "dr_grpo")]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "rewards", "options"), EQUAL + MASKED)
def test_equal_rewards_groups_of_one_and_truncated_answers_teach_nothing(fresh, algorithm, rewards, options):
    learner = fresh(**algorithm)
    start_weights = copy_weights(learner.policy)
    learn(learner, rewards, **options)
    assert_equal(copy_weights(learner.policy), start_weights)


@pytest.mark.parametrize("vocab", [1, 257, 262_144])
def test_vocabularies(tokenizer, settings, vocab):
    policy = policy_of(tokenizer, vocab)
    request = Request([0, 0], num_generations=4, max_new_tokens=5)
    for temperature in (1.0, 1e-3):
        drawn = engine_for(policy.model).generate([request], SamplingParams(temperature=temperature, seed=1))
        assert all(0 <= token < vocab for answer in drawn for token in answer.ids)
        assert all(math.isfinite(x) and x <= 0 for answer in drawn for x in answer.logprobs)
        if temperature == 1e-3:  # as good as the largest
            best = engine_for(policy.model).generate([request], SamplingParams(temperature=0.0))
            assert [answer.ids for answer in drawn] == [answer.ids for answer in best]
    start_weights = copy_weights(policy)
    learn(learner_of(policy, settings), vocab=vocab)
    assert vocab == 1 or any(not torch.equal(p, start_weights[name]) for name, p in policy.model.named_parameters())


def test_a_temperature_near_zero_in_the_loss(fresh):
    """Log-probabilities of tokens that are not the largest are of the order of -1000s."""
    learn(fresh(temperature=1e-3))


@pytest.mark.slow
def test_one_token_beside_sixteen_thousand(tokenizer, settings):
    """Per answer, as with grpo, the short one counts as much as the long one."""
    gradients = []
    for lengths in ([1, 16_000], [1, 16]):
        policy = policy_of(tokenizer, max_position_embeddings=16_384, hidden_size=8)
        learned = learn(learner_of(policy, settings, loss_type="grpo"), [1.0, 0.0], lengths, num_generations=2)
        gradients.append(learned["grad_norm"])
    assert gradients[0] > 0.1 * gradients[1] > 0
