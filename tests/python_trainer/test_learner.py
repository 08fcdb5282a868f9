"""What makes the update cheaper does not change it: fused passes, and samples without an advantage."""

import copy
from unittest.mock import Mock

import pytest
import torch
from conftest import QUIET, graded
from paged import make_policy
from support import assert_equal

import python_trainer.model.policy
from python_trainer.data import Rollout
from python_trainer.errors import NotFinite, UserError
from python_trainer.loop.batch import Minibatch
from python_trainer.loop.memory import Device, plan_memory
from python_trainer.model.packing import pack_rollouts
from python_trainer.model.policy import Policy
from python_trainer.rollout.paged.engine import memory_limit
from python_trainer.trainer import Trainer

KINDS = {"Qwen2": {}, "Qwen3": {"head_dim": 8}, "Llama": {"attention_bias": True, "mlp_bias": True}}


def stirred_policy(kind, tokenizer):
    """Return a policy of this kind whose biases and norms matter."""
    policy = make_policy(kind, tokenizer, num_hidden_layers=2, initializer_range=0.2, **KINDS[kind])
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
    return policy


def gradients(policy, packed):
    with policy.packed_attention():
        logprobs, entropy, states = policy.token_logprobs(packed, 0.8)
        (logprobs.square().sum() + entropy.sum() + states.sin().sum()).backward()
    grads = {name: p.grad for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    return logprobs.detach(), entropy.detach(), states.detach(), grads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_fused_pass_is_as_exact_as_the_model(tokenizer, answers, kind, dtype, largest):
    """Allow twice the model's own error for each tensor, both against float64 with the same weights."""
    policy = stirred_policy(kind, tokenizer)
    policy.model.to(dtype)
    packed = pack_rollouts(answers, range(len(answers)))
    exact = copy.deepcopy(policy)
    exact.model.double()
    exact.fused = False
    expected = gradients(exact, packed)
    assert policy.fused and policy.model.dtype == dtype
    fused = gradients(policy, packed)
    policy.fused = False
    model_pass = gradients(policy, packed)

    def errors(results):
        """Return relative errors of outputs and of gradients."""
        pairs = zip([*results[:3], *results[3].values()], [*expected[:3], *expected[3].values()], strict=True)
        return [((x.double() - gold).norm() / gold.norm()).item() for x, gold in pairs]

    pairs = list(zip(errors(fused), errors(model_pass), strict=True))
    assert all(error <= 2 * allowed for error, allowed in pairs), pairs
    assert 0 < max(error for error, _ in pairs) < largest


def test_hooks_and_checkpointing_take_the_model_itself(tokenizer, monkeypatch):
    unexpected = AssertionError("the model's own forward was to run")
    monkeypatch.setattr(python_trainer.model.policy, "FusedDecoder", Mock(side_effect=unexpected))
    packed = pack_rollouts([Rollout([1, 2], [3, 4])], [0])
    policy = stirred_policy("Qwen2", tokenizer)
    with policy.packed_attention():
        with pytest.raises(AssertionError, match="own forward"):
            policy.token_logprobs(packed, 1.0)
        calls = []
        hook = policy.model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
        policy.token_logprobs(packed, 1.0)
        hook.remove()
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.token_logprobs(packed, 1.0)
    assert calls == [1]


MIXED = [1, 0, 0, 1] + [1] * 4 + [0] * 4 + [0, 0, 0, 1]


@pytest.mark.parametrize("algorithm", [{}, {"loss_type": "grpo", "num_minibatches": 2, "num_iterations": 2}])
def test_answers_without_advantage_are_not_passed_forward_and_change_nothing(
    make_config, tmp_path, monkeypatch, algorithm
):
    config = make_config(algorithm=algorithm, optimizer={"adam_epsilon": 1e-4})  # or rounding of zeros grows to steps
    trainer, reference = (Trainer(config, tmp_path / name, console=QUIET) for name in ("ours", "other"))
    reference.learner._have_gradient = lambda batch: [True] * len(batch.rollouts)
    score = trainer.policy.token_logprobs
    passes = []

    def counted(packed, temperature):
        passes.append((torch.is_grad_enabled(), packed.ids.numel()))
        return score(packed, temperature)

    monkeypatch.setattr(trainer.policy, "token_logprobs", counted)
    for number, rewards in ((1, MIXED), (2, [1] * 16)):  # the second has nothing to teach: momentum alone moves weights
        passes.clear()
        row = trainer.learner.update(graded(rewards), number)
        expected_row = reference.learner.update(graded(rewards), number)
        trained = row["tokens/trained"]
        assert trained == sum(tokens for has_grad, tokens in passes if has_grad) < expected_row["tokens/trained"]
        # log-probabilities of before the update, once, and no others
        assert sum(tokens for has_grad, tokens in passes if not has_grad) == (trained / 2 if algorithm else 0)
        for key in ("loss", "grad_norm", "learning_rate", "clip_ratio/low_mean", "clip_ratio/high_mean"):
            assert row[key] == pytest.approx(expected_row[key], rel=1e-4, abs=1e-5), key
    weights, expected = (trainer.policy.model.state_dict() for trainer in (trainer, reference))
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)


def test_all_ranks_teach_what_the_first_one_does(make_config, tmp_path):
    """On a GPU sums have no order: an advantage can be 0 on one rank and 1e-8 on another."""
    trainer = Trainer(make_config(), tmp_path, console=QUIET)
    trainer.learner.ranks.broadcast = Mock(return_value=[True] * 8 + [False] * 8)
    steps = graded(MIXED)
    assert trainer.learner.update(steps, 1)["tokens/trained"] == pack_rollouts(steps, range(8)).ids.numel()


@pytest.mark.parametrize("algorithm", [{"advantage": "gae"}, {"beta": 0.1, "use_kl_in_reward": True}])
def test_stored_answers_alone_need_nothing_before_the_update(make_config, tmp_path, monkeypatch, algorithm):
    """Their advantages need neither values nor a KL, and no critic learns from them."""
    config = make_config(algorithm=algorithm)
    learner = Trainer(config, tmp_path, console=QUIET).learner
    score, passes = Policy.token_logprobs, []

    def counted(policy, packed, temperature):
        passes.append((policy is learner.policy, torch.is_grad_enabled()))
        return score(policy, packed, temperature)

    monkeypatch.setattr(Policy, "token_logprobs", counted)
    stored = graded([1] * 16)
    for rollout in stored:
        rollout.success_rate = 0.5
        rollout.importance_cap = 1.0
    critic = learner.critic and copy.deepcopy(learner.critic.state_dict())
    row = learner.update(stored, 1, lr_scale=0.25)
    assert row["learning_rate"] == 0.25 * config.optimizer.learning_rate and row["grad_norm"] > 0
    assert set(passes) == {(True, True)}
    if critic:
        assert_equal(learner.critic.state_dict(), critic)


@pytest.mark.parametrize("separate", [False, True])
def test_a_critic_whose_gradient_is_not_finite_leaves_the_policy_as_it_was(make_config, tmp_path, separate):
    config = make_config(algorithm={"advantage": "gae"}, critic={"separate": separate})
    learner = Trainer(config, tmp_path, console=QUIET).learner
    before = copy.deepcopy(learner.policy.model.state_dict())
    learner.critic.head.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
    with pytest.raises(NotFinite, match="the norm of the gradient is nan"):
        learner.update(graded(MIXED), 1)
    assert_equal(learner.policy.model.state_dict(), before)


def less_sure(logprobs, ratio, advantages, settings):
    return logprobs - ratio * advantages


@pytest.mark.parametrize("algorithm", [
    {"entropy_coef": 0.1}, {"beta": 0.1}, {"advantage": "gae"}, {"policy_loss": "test_learner:less_sure"},
])  # fmt: skip
def test_every_answer_counts_where_the_loss_has_other_terms(make_config, tmp_path, algorithm):
    trainer = Trainer(make_config(algorithm=algorithm), tmp_path / "run", console=QUIET)
    steps = graded([1] * 16)
    assert trainer.learner.update(steps, 1)["tokens/trained"] == pack_rollouts(steps, range(16)).ids.numel()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_to_come_is_what_a_step_leaves_behind(make_config, tmp_path, monkeypatch, dtype):
    algorithm = {"beta": 0.1, "advantage": "gae"}
    config = make_config(model={"dtype": dtype}, algorithm=algorithm, critic={"separate": True})
    learner = Trainer(config, tmp_path, console=QUIET).learner
    policy_ids = {id(p) for p in learner.policy.model.parameters()}
    totals = []

    def count():
        tensors = [*learner.reference.model.parameters(), *learner.critic.parameters()]
        tensors += [weight.grad for weight in learner.critic.optimizer.masters.values()]
        for optimizer in (learner.optimizer, learner.critic.optimizer):
            tensors += optimizer.masters.values()
            tensors += [x for state in optimizer.adamw.state.values() for x in state.values() if x.ndim]
        totals.append(sum(x.nbytes for x in {id(x): x for x in tensors}.values() if id(x) not in policy_ids))

    step = learner.critic.optimizer.step
    monkeypatch.setattr(learner.critic.optimizer, "step", lambda lr_scale: count() or step(lr_scale))
    masters = learner.optimizer.masters.values()
    gradients = []
    optimizer_step = learner.optimizer.step

    def count_and_step(lr_scale):
        gradients.append(sum(master.grad.nbytes for master in masters))  # which are gone when the critic takes its step
        return optimizer_step(lr_scale)

    monkeypatch.setattr(learner.optimizer, "step", count_and_step)
    for number in (1, 2):  # the critic has no moments before its first step
        learner.update(graded(MIXED), number)
        learner.optimizer.adamw.zero_grad()
    memory = plan_memory(config, Device("cpu", 1 << 40), model=learner.policy.model)
    expected = memory.reserved - memory.parts["activations"]
    assert totals[1] + gradients[1] == pytest.approx(expected, rel=0.02)  # the critic's last layer


def test_the_cache_leaves_room_for_what_training_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 80 * 10**9))
    device = torch.device("cuda", 0)
    assert memory_limit(device) == 28 * 10**9
    assert memory_limit(device, 50 * 10**9) == 8 * 10**9
    with pytest.raises(UserError, match=r"70.0 GB are free on cuda:0, and training will take 80.0 GB; model.lora"):
        memory_limit(device, 80 * 10**9)


def test_gradients_of_bfloat16_weights_add_up_in_float32(make_config, tmp_path, monkeypatch):
    """Each answer is a micro-batch; the gradients of single answers add up to those of all."""
    config = make_config(model={"dtype": "bfloat16"}, optimizer={"micro_batch_tokens": 1})
    learner = Trainer(config, tmp_path, console=QUIET).learner
    masters = learner.optimizer.masters
    step = learner._step
    pieces = []
    assert all(p.dtype == torch.bfloat16 for p in learner.policy.model.parameters())

    def in_pieces(minibatch, *args):
        for index in minibatch.samples:
            step(Minibatch(minibatch.batch, minibatch.indices, [index]), *args)
            pieces.append({name: master.grad for name, master in masters.items()})
            learner.optimizer.adamw.zero_grad()
        return step(minibatch, *args)

    monkeypatch.setattr(learner, "_step", in_pieces)
    monkeypatch.setattr(learner.optimizer, "clip_gradients", lambda: 0.0)
    monkeypatch.setattr(learner.optimizer, "step", lambda lr_scale: None)
    learner.update(graded(MIXED), 1)
    assert len(pieces) == 8 and all(p.grad is None for p in learner.policy.model.parameters())
    for name, master in masters.items():
        total = sum(piece[name] for piece in pieces)
        assert master.grad.dtype == torch.float32 and torch.equal(master.grad, total), name
