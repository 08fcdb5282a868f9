"""The same model, samples and settings in TRL's GRPOTrainer: equal loss, gradients and weights after training.

TRL pads prompts on the left and answers on the right and runs plain attention; here the same answers are packed
behind one copy of their prompt. Some answers end with EOS, which is the padding token too, and some are cut off.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import QUIET, digits
from support import ROOT
from tiny import copy_weights, grpo_trainer
from torch.nn.utils.rnn import pad_sequence

from python_trainer.accelerators.rpo import RPO
from python_trainer.accelerators.settings import RPOSettings
from python_trainer.algorithms.settings import LOSS_TYPES
from python_trainer.data import Group, Rollout
from python_trainer.loop.batch import Batch, Minibatch
from python_trainer.model.packing import micro_batches, pack_rollouts
from python_trainer.trainer import Trainer
from rlkernels.sampling.keys import keyed_seed, keyed_unit

GROUPS = 3
NUM_GENERATIONS = 4  # as in tiny.grpo_trainer
MAX_TOKENS = 12
EOS = 63


@pytest.fixture
def make_trl(trl_integration, tiny_policy, tmp_path):
    """Return a function that feeds TRL's trainer with given answers: ``make_trl(rollouts, **settings)``."""

    def make(rollouts, **settings):
        answers = {}
        for rollout in rollouts:
            answers.setdefault(rollout.text, []).append(rollout)
        queues = {prompt: iter(rows * 10) for prompt, rows in answers.items()}

        def rollout_func(prompts, trainer):
            rows = [next(queues[prompt]) for prompt in prompts]
            return {
                "prompt_ids": [row.prompt_ids for row in rows],
                "completion_ids": [row.response_ids for row in rows],
                "logprobs": None,
            }

        options = {
            "per_device_train_batch_size": len(rollouts), "max_completion_length": MAX_TOKENS, "shuffle_dataset": False,
            "gradient_checkpointing": False, "logging_strategy": "no", "beta": 0.0, **settings,
        }  # fmt: skip
        return grpo_trainer(tmp_path / "trl", tiny_policy, list(answers), digits, options, rollout_func=rollout_func)

    return make


def make_rollouts():
    """Return random answers of 1 to 12 tokens; ``text`` holds the prompt."""
    gen = torch.Generator().manual_seed(1)
    rollouts = []
    for group in range(GROUPS):
        prompt = torch.randint(10, 40, (2 + 3 * group,), generator=gen).tolist()
        for _ in range(NUM_GENERATIONS):
            length = int(torch.randint(1, MAX_TOKENS + 1, (1,), generator=gen))
            ids = torch.randint(0, 40, (length,), generator=gen).tolist()
            if length < MAX_TOKENS:
                ids[-1] = EOS
            facts = {"text": "".join(chr(48 + i) for i in prompt), "reward": digits(None, None, [ids])[0]}
            reason = "stop" if ids[-1] == EOS else "length"
            rollouts.append(Rollout(prompt, ids, 0, [0.0] * length, reason, prompt_index=group, group=group, **facts))
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    return rollouts


def padded(rows, side):
    """Pad lists; return [B, T] and the mask of their entries."""
    ids = [torch.tensor(row) for row in rows]
    present = [torch.ones_like(row) for row in ids]
    return [pad_sequence(tensors, batch_first=True, padding_side=side) for tensors in (ids, present)]


# (their settings, ours): every loss type and option that both have
CASES = {
    "grpo": ({"loss_type": "grpo"}, {"loss_type": "grpo"}),
    "bnpo": ({"loss_type": "bnpo"}, {"loss_type": "token-mean"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "luspo": ({"loss_type": "luspo"}, {"loss_type": "seq-mean-token-sum"}),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"},) * 2,
    "two-sided": ({"loss_type": "grpo", "delta": 1.5},) * 2,
    "kl": ({"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False}, {"loss_type": "dapo", "beta": 0.3}),
    "unbiased kl": ({"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},) * 2,
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.28},  # theirs is the bound itself
        {"loss_type": "dapo", "policy_loss": "cispo", "epsilon_high": 0.28},
    ),
}
THEIR_LOSS_TYPES = {"token-mean": "bnpo", "seq-mean-token-sum": "luspo", "seq-mean-token-mean": "grpo"}
# the entropy bonus of every loss_type, large enough that another mean over it is seen
CASES |= {
    f"entropy, {name}": (
        {"loss_type": THEIR_LOSS_TYPES.get(name, name), "entropy_coef": 0.5}, {"loss_type": name, "entropy_coef": 0.5}
    )
    for name in LOSS_TYPES.names
}  # fmt: skip


def documented_sapo():
    """Return the plug-in of docs/algorithms.md."""
    page = (ROOT / "docs/algorithms.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"__name__": "my_losses"}
    exec(code, names)
    return names["sapo"]


CASES["sapo"] = {"loss_type": "sapo"}, {"loss_type": "grpo", "policy_loss": documented_sapo()}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal(make_trl, make_config, tmp_path, name):
    trl_settings, settings = CASES[name]
    rollouts = make_rollouts()
    config = make_config(algorithm=settings, rollout={"temperature": 0.8, "max_completion_length": MAX_TOKENS})
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    policy = trainer.policy
    algorithm = trainer.config.algorithm
    if trainer.learner.reference is not None:  # one that differs from the policy
        with torch.no_grad():
            for p in trainer.learner.reference.model.parameters():
                p.add_(0.05 * torch.randn_like(p))
    batch = Batch(rollouts, algorithm, MAX_TOKENS, policy.device)
    with policy.packed_attention():
        trainer.learner._record_before(batch)
        trainer.learner._record_logprobs(batch, range(len(rollouts)))
        # ratios from 0.5 to 2: clipped on both sides
        batch.old_logprobs[batch.present] += 0.3 * torch.randn(int(batch.present.sum()))
        batch.set_advantages()
        total_loss = 0.0
        for samples in micro_batches(batch.rollouts, range(len(rollouts)), 40):
            packed = pack_rollouts(rollouts, samples)
            scores = policy.token_logprobs(packed, 0.8)[:2]
            loss, _ = Minibatch(batch, range(len(rollouts))).loss(packed, *scores)
            loss.backward()
            total_loss += loss.item()

    peer = make_trl(rollouts, temperature=0.8, **trl_settings)
    prompts, prompt_mask = padded([r.prompt_ids for r in rollouts], "left")
    answers, mask = padded([r.response_ids for r in rollouts], "right")
    inputs = {
        "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": answers,
        "completion_mask": mask, "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.old_logprobs.nan_to_num(), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if batch.reference_logprobs is not None:
        inputs["ref_per_token_logps"] = batch.reference_logprobs.nan_to_num()
    peer.current_gradient_accumulation_steps = 1
    peer.model.train()
    trl_loss = peer._compute_loss(peer.model, inputs)
    trl_loss.backward()
    assert abs(total_loss) > 0.01
    assert total_loss == pytest.approx(trl_loss.item(), rel=1e-5, abs=1e-6)
    grads, expected_grads = (
        {name: p.grad for name, p in model.named_parameters()} for model in (policy.model, peer.model)
    )
    assert all(grad.any() for grad in grads.values())
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_weights_after_training_equal(make_trl, make_config, tmp_path, loss_type):
    """TRL's own loop from rewards to weights: advantages, KL to the start, two passes, clipping, AdamW."""
    shared = {"loss_type": loss_type, "num_iterations": 2, "beta": 0.05, "mask_truncated_completions": True,
              "use_bias_correction_kl": True}  # fmt: skip
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.1, "adam_epsilon": 1e-4, "max_grad_norm": 0.5}
    rollouts = make_rollouts()
    trainer = Trainer(
        make_config(algorithm=shared, optimizer=optimizer, rollout={"max_completion_length": MAX_TOKENS}),
        tmp_path / "run", console=QUIET,
    )  # fmt: skip
    start_weights = copy_weights(trainer.policy)
    row = trainer.learner.update(rollouts, 1)
    assert abs(row["loss"]) > 1e-3 and row["grad_norm"] > 0.5  # so that it was clipped
    peer = make_trl(rollouts, max_steps=2, temperature=1.0, **shared, **optimizer)
    peer.train()
    trained_weights = copy_weights(trainer.policy)
    assert all((weight - start_weights[name]).abs().max() > 5e-5 for name, weight in trained_weights.items())
    torch.testing.assert_close(trained_weights, copy_weights(peer), rtol=1e-5, atol=1e-5)


def test_prompts_begin_as_with_trls_suffix_rollouts(trl_integration):
    """One method, two adapters: the same draws for the same seed of the step, and the same memory."""
    suffixes = trl_integration.SuffixRollouts(seed=5)
    suffixes._ends = frozenset({EOS})
    rpo = RPO(RPOSettings())
    prompts = ["3"] * NUM_GENERATIONS + ["8"] * NUM_GENERATIONS
    ids = [[10 + i, 20, EOS] for i in range(2 * NUM_GENERATIONS)]
    for step in range(1, 30):
        context = SimpleNamespace(step=step, seed=keyed_seed(5, step), telemetry={})
        groups = [Group([1], max_new_tokens=3, example=None, prompt_index=index) for index in (3, 8)]
        prefixes = [group.prefix_ids for group in rpo.plan(context, groups)]
        assert prefixes == [suffixes.beginning(prompt, step, 3) for prompt in ("3", "8")]
        rewards = [float(keyed_unit(step, i) < 0.4) for i in range(2 * NUM_GENERATIONS)]
        suffixes._step = step
        suffixes.watch(lambda rewards=rewards, **columns: rewards)(prompts=prompts, completion_ids=ids)
        scored = zip(prompts, ids, rewards)
        rpo.collect(context, [
            Rollout([1], row, finish_reason="stop", prompt_index=int(key), group=int(key), reward=reward,
                    accuracy=reward)
            for key, row, reward in scored
        ])  # fmt: skip
        assert {str(prompt): answer for prompt, answer in rpo.memory.answers.items()} == suffixes.answers
    assert len(suffixes.answers) == 2 and any(rpo.memory.whole_scores)
    assert rpo.memory.whole_scores == suffixes._memory.whole_scores
