"""Shared prompts inside TRL's DPOTrainer: losses, gradients and metrics of TRL alone, on a tiny random model."""

import importlib
import logging

import pytest
from tiny import assert_same_gradients, gradient_recorder, save_tiny_policy

EOS = 63
# prompt, chosen, rejected: prompts of two pairs, answers that begin alike, one that begins the other, one token
PAIRS = [
    ("ABCDEFGH", "IJKL", "MNOPQR"), ("ABCDEFGH", "IJX", "B"), ("ABZ", "CDEFG", "CDEFGHIJ"), ("L", "M", "NOPQ"),
    ("TUVWXYZABCDE", "FG", "AB"), ("TUVWXYZABCDE", "FG", "HIJ"), ("Q", "RSTUV", "RS"), ("ABCDEFG", "H", "IJ"),
]  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen2")
    return save_tiny_policy(folder, seed=5, num_attention_heads=6, hidden_size=48, max_position_embeddings=512)


@pytest.fixture
def train(trl_integration, policy, tmp_path):
    """Train two steps; return the trainer, and gradients of each step before clipping, by name."""
    trl, datasets = map(importlib.import_module, ("trl", "datasets"))

    def run(shared=True, peft_config=None, **settings):
        callback, steps = gradient_recorder()
        args = trl.DPOConfig(
            str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, seed=3,
            optim="sgd", lr_scheduler_type="constant", logging_steps=1, beta=0.3,
            **{"max_steps": 2, "per_device_train_batch_size": 4, "bf16": False, "learning_rate": 3e-2, **settings},
        )  # fmt: skip
        data = datasets.Dataset.from_dict(dict(zip(("prompt", "chosen", "rejected"), zip(*PAIRS), strict=True)))
        cls = trl_integration.SharedPrefixDPOTrainer if shared else trl.DPOTrainer
        trainer = cls(str(policy), args=args, train_dataset=data, peft_config=peft_config, callbacks=[callback])
        trainer.train()
        return trainer, steps

    return run


def assert_same(shared, alone):
    (trainer, steps), (plain, expected) = shared, alone
    assert_same_gradients(steps, expected)
    for step, (result, expected_step) in enumerate(zip(trainer.state.log_history[:2], plain.state.log_history)):
        assert result.keys() - expected_step.keys() == {"shared_prefix/tokens_over_trl"}
        # before the first update the policy is the reference: the sign of a reward is that of rounding
        for name in expected_step.keys() - ({"rewards/accuracies"} if step == 0 else set()):
            assert result[name] == pytest.approx(expected_step[name], rel=1e-4, abs=1e-5), name


CASES = {
    "plain": {},
    "reference computed before": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 3},
    "weights of tokens, several losses": {
        "use_weighting": True, "loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.4,
    },
    "cut at the end": {"max_length": 9, "gradient_checkpointing": False},
    "cut at the beginning": {"max_length": 9, "truncation_mode": "keep_end"},
    "LoRA": {"lora": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_update_equals_that_of_trl(train, name):
    """The reference too: after the first step its log-probabilities are not those of the policy."""
    settings = dict(CASES[name])
    if settings.pop("lora", False):
        peft = importlib.import_module("peft")
        settings["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    shared, alone = train(**settings), train(shared=False, **settings)
    assert shared[0].shares_prefixes and shared[0]._compared
    assert_same(shared, alone)
    for column in ("ref_chosen_logps", "ref_rejected_logps") if name == "reference computed before" else ():
        logprobs, expected_logprobs = (trainer.train_dataset[column] for trainer in (shared[0], alone[0]))
        assert list(logprobs) == pytest.approx(list(expected_logprobs), rel=1e-5)


def test_tokens_through_the_model(train, monkeypatch):
    """Each prefix passes once with its continuations, where TRL passes padded rows."""
    trainer, _ = train(per_device_train_batch_size=len(PAIRS), max_steps=1)
    rows = [(*prompt, *answer, EOS) for prompt, *answers in PAIRS for answer in answers]
    packed = len({row[:end] for row in rows for end in range(2, len(row) + 1)})
    ratio = trainer.state.log_history[0]["shared_prefix/tokens_over_trl"]
    assert ratio == pytest.approx(packed / (len(rows) * max(map(len, rows))))


def test_two_levels_as_on_a_gpu(train, monkeypatch):
    monkeypatch.setattr("rlkernels.integrations.trl_dpo.packs_tries", lambda device: False)
    assert_same(train(), train(shared=False))


def test_a_model_that_disagrees_is_left_to_trl(train, caplog, monkeypatch):
    monkeypatch.setattr("rlkernels.prefix_cache.tree_attention", lambda query, *_, **options: query * 0.5)
    with caplog.at_level(logging.WARNING, "rlkernels"):
        result = train()
    assert not result[0].shares_prefixes and "differ from TRL's" in caplog.text
    assert_same(result, train(shared=False))


@pytest.mark.parametrize("reason", ["neftune_noise_alpha", "PromptTuningConfig"])
def test_what_cannot_be_shared_is_computed_by_trl_and_said_once(train, caplog, reason):
    settings = {"neftune_noise_alpha": 5.0}
    if reason == "PromptTuningConfig":
        peft = importlib.import_module("peft")
        settings = {"peft_config": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)}
    with caplog.at_level(logging.WARNING, "rlkernels"):
        result = train(**settings)
    (line,) = [record.message for record in caplog.records if record.name.startswith("rlkernels")]
    assert reason in line and not result[0].shares_prefixes
    assert_same(result, train(shared=False, **settings))
