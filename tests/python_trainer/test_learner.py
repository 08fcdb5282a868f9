"""What makes the update cheaper does not change it: fused passes, and samples without an advantage."""

import copy

import pytest
import torch
from conftest import QUIET
from transformers import AutoConfig, AutoModelForCausalLM

import python_trainer.model.policy
from python_trainer.batch import Minibatch
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.memory import Device, plan_memory
from python_trainer.model.packing import pack
from python_trainer.model.policy import Policy, load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.paged.engine import memory_limit
from python_trainer.trainer import Trainer

KINDS = {"qwen2": {}, "qwen3": {"head_dim": 8}, "llama": {"attention_bias": True, "mlp_bias": True}}


def make_policy(kind, tiny_policy):
    """A random model of this kind with the tiny policy's tokenizer and sizes."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
             "eos_token_id": 63, "bos_token_id": None, "initializer_range": 0.2}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **KINDS[kind]))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
    return Policy(model, load_policy(ModelConfig(path=str(tiny_policy), device="cpu")).tokenizer, name=kind)


def gradients(policy, packed):
    with policy.packed_attention():
        logprobs, entropy, states = policy.score_with_states(packed, 0.8)
        (logprobs.square().sum() + entropy.sum() + states.sin().sum()).backward()
    found = {name: p.grad for name, p in policy.model.named_parameters()}
    for p in policy.model.parameters():
        p.grad = None
    return logprobs.detach(), entropy.detach(), states.detach(), found


def some_answers():
    gen = torch.Generator().manual_seed(2)

    def ids(n):
        return torch.randint(0, 60, (n,), generator=gen).tolist()

    prefix = ids(3)
    answers = [Rollout([5, 6, 7], prefix + ids(n), 3) for n in (4, 1, 9)] + [
        Rollout(ids(4), ids(6)),
        Rollout([9], ids(1)),
    ]
    return pack(answers, range(5))


@pytest.mark.parametrize("kind", KINDS)
def test_fused_pass_has_the_gradients_of_the_model(tiny_policy, kind):
    policy = make_policy(kind, tiny_policy)
    assert policy.fused
    packed = some_answers()
    ours = gradients(policy, packed)
    policy.fused = False
    wanted = gradients(policy, packed)
    for found, value in zip(ours[:3], wanted[:3]):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)
    for name, value in wanted[3].items():
        assert value.any()
        torch.testing.assert_close(ours[3][name], value, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_fused_pass_in_bfloat16_is_as_exact_as_the_model(tiny_policy, kind):
    """At most twice the model's own error of bfloat16, both against float64 with the same weights; by tensor."""
    policy = make_policy(kind, tiny_policy)
    policy.model.bfloat16()
    packed, exact = some_answers(), copy.deepcopy(policy)
    exact.model.double()
    exact.fused = False
    wanted = gradients(exact, packed)
    assert policy.fused and policy.model.dtype == torch.bfloat16
    ours = gradients(policy, packed)
    policy.fused = False
    plain = gradients(policy, packed)

    def errors(found):
        """Relative, of outputs and of gradients."""
        both = zip([*found[:3], *found[3].values()], [*wanted[:3], *wanted[3].values()], strict=True)
        return [((x.double() - gold).norm() / gold.norm()).item() for x, gold in both]

    pairs = list(zip(errors(ours), errors(plain), strict=True))
    assert all(mine <= 2 * allowed for mine, allowed in pairs), pairs
    assert 0 < max(mine for mine, _ in pairs) < 0.1


def test_hooks_and_checkpointing_take_the_model_itself(tiny_policy, monkeypatch):
    def none_wanted(*args):
        raise AssertionError("the model's own forward was to run")

    monkeypatch.setattr(python_trainer.model.policy, "FusedDecoder", none_wanted)
    packed = pack([Rollout([1, 2], [3, 4])], [0])
    policy = make_policy("qwen2", tiny_policy)
    with policy.packed_attention():
        with pytest.raises(AssertionError, match="own forward"):
            policy.score(packed, 1.0)
        seen = []
        hook = policy.model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
        policy.score(packed, 1.0)
        hook.remove()
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.score(packed, 1.0)
    assert seen == [1]


def rollouts(rewards):
    """Groups of four answers with these rewards."""
    gen = torch.Generator().manual_seed(3)
    found = []
    for i, reward in enumerate(rewards):
        ids = torch.randint(0, 63, (2 + i % 5,), generator=gen).tolist()
        found.append(Rollout(
            prompt_key=i // 4, group=i // 4, prompt_ids=[1 + i // 4, 2], response_ids=ids, prefix_len=0,
            logprobs=[-4.0] * len(ids), finish_reason="stop", text="", reward=reward, rewards={}, accuracy=reward,
        ))  # fmt: skip
    return found


MIXED = [1, 0, 0, 1] + [1] * 4 + [0] * 4 + [0, 0, 0, 1]


ALGORITHMS = [{}, {"loss_type": "grpo", "num_minibatches": 2, "num_iterations": 2}]
# the second step has nothing to teach: momentum alone moves the weights
STEPS = [(MIXED, 1), ([1] * 16, 2)]


def two_trainers(make_config, folder, algorithm):
    config = make_config(algorithm=algorithm, optimizer={"adam_epsilon": 1e-4})  # or rounding of zeros grows to steps
    return [Trainer(config, folder / name, console=QUIET) for name in ("a", "b")]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_answers_without_advantage_change_nothing(make_config, tmp_path, algorithm):
    ours, other = two_trainers(make_config, tmp_path, algorithm)
    rows = [ours.learner.update(rollouts(rewards), number) for rewards, number in STEPS]
    other.learner._have_gradient = lambda batch: [True] * len(batch.rollouts)
    for row, (rewards, number) in zip(rows, STEPS, strict=True):
        wanted = other.learner.update(rollouts(rewards), number)
        assert row["tokens/trained"] < wanted["tokens/trained"]
        for key in ("loss", "grad_norm", "kl", "learning_rate"):  # the others are of the taught answers
            assert row[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    for (name, a), b in zip(ours.policy.model.named_parameters(), other.policy.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_answers_without_advantage_are_not_even_passed_forward(make_config, tmp_path, monkeypatch, algorithm):
    ours, other = two_trainers(make_config, tmp_path, algorithm)
    score, seen = Policy.score_with_states, []

    def counted(self, packed, temperature):
        seen.append((torch.is_grad_enabled(), packed.input_ids.numel()))
        return score(self, packed, temperature)

    monkeypatch.setattr(Policy, "score_with_states", counted)
    for rewards, number in STEPS:
        seen.clear()
        trained = ours.learner.update(rollouts(rewards), number)["tokens/trained"]
        assert trained == sum(tokens for graded, tokens in seen if graded)
        # log-probabilities of before the update, once, and no others
        before = [tokens for graded, tokens in seen if not graded]
        assert sum(before) == (trained / 2 if algorithm else 0)

    learn = type(other.learner)._pass

    def with_the_rest(self, minibatch, metrics):
        with torch.no_grad():
            for packed in self._packs(minibatch.batch, sorted({*minibatch.indices} - {*minibatch.samples})):
                logprobs, entropy, _ = self.policy.score_with_states(packed, self.temperature)
                minibatch.loss(packed, logprobs, entropy)
        return learn(self, minibatch, metrics)

    monkeypatch.setattr(type(other.learner), "_pass", with_the_rest)
    for rewards, number in STEPS:
        other.learner.update(rollouts(rewards), number)
    for (name, a), b in zip(ours.policy.model.named_parameters(), other.policy.model.parameters()):
        assert torch.equal(a, b), name


def test_all_ranks_teach_what_the_first_one_does(make_config, tmp_path):
    """On a GPU sums have no order: an advantage can be 0 on one rank and 1e-8 on another."""

    class Second(RankGroup):
        def first(self, value):
            return [True] * 8 + [False] * 8

    trainer = Trainer(make_config(), tmp_path, console=QUIET)
    trainer.learner.ranks = Second()
    steps = rollouts(MIXED)
    answers = [Rollout(rollout.prompt_ids, rollout.response_ids) for rollout in steps]
    assert trainer.learner.update(steps, 1)["tokens/trained"] == pack(answers, range(8)).input_ids.numel()


@pytest.mark.parametrize("algorithm", [{"entropy_coef": 0.1}, {"beta": 0.1}, {"advantage": "gae"}])
def test_every_answer_counts_where_the_loss_has_other_terms(make_config, tmp_path, algorithm):
    trainer = Trainer(make_config(algorithm=algorithm), tmp_path / "run", console=QUIET)
    steps = rollouts([1] * 16)
    answers = [Rollout(rollout.prompt_ids, rollout.response_ids) for rollout in steps]
    assert trainer.learner.update(steps, 1)["tokens/trained"] == pack(answers, range(16)).input_ids.numel()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_to_come_is_what_a_step_leaves_behind(make_config, tmp_path, monkeypatch, dtype):
    algorithm = {"beta": 0.1, "advantage": "gae"}
    config = make_config(model={"dtype": dtype}, algorithm=algorithm, critic={"separate": True})
    trainer = Trainer(config, tmp_path, console=QUIET)
    learner, policy = trainer.learner, trainer.policy
    held = {id(p) for p in policy.model.parameters()}
    found = []

    def count():
        tensors = [*learner.reference.model.parameters(), *learner.critic.parameters()]
        for optimizer in (learner.optimizer, learner.critic.optimizer):
            tensors += optimizer.masters.values()
            tensors += [weight.grad for weight in optimizer.masters.values()]
            tensors += [x for state in optimizer.adamw.state.values() for x in state.values() if x.ndim]
        found.append(sum(x.nbytes for x in {id(x): x for x in tensors}.values() if id(x) not in held))

    step = type(learner.critic).step
    monkeypatch.setattr(type(learner.critic), "step", lambda self, lr: count() or step(self, lr))
    plain = learner.optimizer.step
    kept = {}

    def step_and_keep(lr):
        kept.update({name: master.grad.clone() for name, master in learner.optimizer.masters.items()})
        norm = plain(lr)
        for name, master in learner.optimizer.masters.items():
            master.grad = kept[name]
        return norm

    monkeypatch.setattr(learner.optimizer, "step", step_and_keep)
    for number in (1, 2):  # the critic has no moments before its first step
        learner.update(rollouts(MIXED), number)
        learner.optimizer.adamw.zero_grad()
    memory = plan_memory(config, Device("cpu", 1 << 40), model=policy.model)
    expected = memory.reserved - memory.parts["activations"]
    assert found[1] == pytest.approx(expected, rel=0.02)  # the critic's last layer


def test_the_cache_leaves_room_for_what_training_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 80 * 10**9))
    device = torch.device("cuda", 0)
    assert memory_limit(device) == 28 * 10**9
    assert memory_limit(device, 50 * 10**9) == 8 * 10**9
    with pytest.raises(UserError, match=r"70.0 GB are free on cuda:0, and training will take 80.0 GB; model.lora"):
        memory_limit(device, 80 * 10**9)


def test_gradients_of_bfloat16_weights_add_up_in_float32(make_config, tmp_path, monkeypatch):
    found = {}
    for tokens in (1, 4096):  # a micro-batch an answer, and one for all
        config = make_config(model={"dtype": "bfloat16"}, optimizer={"micro_batch_tokens": tokens})
        learner = Trainer(config, tmp_path / str(tokens), console=QUIET).learner
        masters = learner.optimizer.masters
        assert all(p.dtype == torch.bfloat16 for p in learner.policy.model.parameters())
        plain, pieces = type(learner)._pass, []

        def in_pieces(self, minibatch, metrics, masters=masters, plain=plain, pieces=pieces):
            for index in minibatch.samples:
                plain(self, Minibatch(minibatch.batch, minibatch.indices, [index]), metrics)
                pieces.append({name: master.grad for name, master in masters.items()})
                for master in masters.values():
                    master.grad = None
            return plain(self, minibatch, metrics)

        def keep(lr, tokens=tokens, masters=masters, pieces=pieces):
            found[tokens] = {name: master.grad for name, master in masters.items()}, pieces
            return 0.0

        with monkeypatch.context() as patched:
            patched.setattr(type(learner), "_pass", in_pieces)
            patched.setattr(learner.optimizer, "step", keep)
            learner.update(rollouts(MIXED), 1)
        assert all(p.grad is None for p in learner.policy.model.parameters())
    many, pieces = found[1]
    assert len(pieces) == 8
    for name, gradient in many.items():
        assert gradient.dtype == torch.float32
        total = pieces[0][name].clone()
        for piece in pieces[1:]:
            total += piece[name]
        assert torch.equal(gradient, total), name
    one = torch.cat([g.flatten() for g in found[4096][0].values()])
    difference = torch.cat([g.flatten() for g in many.values()]) - one
    # what is left: the products of each micro-batch are rounded to bfloat16, 2**-9 of their size
    assert difference.norm() <= 2**-7 * one.norm()
