"""A tiny policy that tests write, and a reward that it can learn."""

import importlib

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rlkernels.extrapolation import Limits

LENIENT = Limits(min_gap=0, noise_factor=0, min_rise=-1, min_cosine=0, min_skill=-float("inf"), min_share=0)


def save_tiny_policy(folder, *, seed=0, dtype=torch.float32, vocab=64, **options):
    """Save a random Qwen2 whose tokens are the characters from "0" on; the last is the end-of-sequence token."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "initializer_range": 0.2, "eos_token_id": vocab - 1, "bos_token_id": None,
    }  # fmt: skip
    Qwen2ForCausalLM(Qwen2Config(**settings | options)).to(dtype).save_pretrained(folder)
    save_letters(folder, vocab)
    return folder


def save_letters(folder, vocab=64):
    """Save the tokenizer of such a policy."""
    letters = {chr(48 + i): i for i in range(vocab - 1)}
    tokenizer = Qwen2Tokenizer(
        vocab=letters | {"<eos>": vocab - 1}, merges=[], unk_token=None, pad_token="<eos>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)


def generate_greedy(model, prompt, count, eos=None):
    """Return the tokens that Transformers generates without sampling and penalties; ``eos``: default the model's."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, "repetition_penalty": 1.0}
    ends = eos or model.generation_config.eos_token_id
    out = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=ends, **options)
    return out[0, len(prompt) :].tolist()


def grpo_trainer(folder, policy, prompts, reward, settings, trainer_class=None, **parts):
    """Return TRL's GRPOTrainer, or ``trainer_class``, on a CPU with groups of four answers."""
    trl = importlib.import_module("trl")
    datasets = importlib.import_module("datasets")
    make = trainer_class or trl.GRPOTrainer
    args = (trl.RLOOConfig if issubclass(make, trl.RLOOTrainer) else trl.GRPOConfig)(
        output_dir=str(folder), num_generations=4, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        **{"bf16": False, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, **settings},
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"prompt": prompts})
    return make(model=str(policy), args=args, train_dataset=data, reward_funcs=reward, **parts)


def gradient_recorder():
    """Return a callback for TRL's trainers, and the list it fills: gradients of each step before clipping, by name."""
    callback = importlib.import_module("transformers").TrainerCallback()
    steps = []

    def note_gradients(args, state, control, model, **kwargs):
        steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    callback.on_pre_optimizer_step = note_gradients
    return callback, steps


def assert_same_gradients(steps, expected):
    """Compare what two such callbacks have filled in two steps."""
    assert len(steps) == len(expected) == 2
    for result, expected_step in zip(steps, expected):
        torch.testing.assert_close(result, expected_step, rtol=1e-4, atol=1e-6)


def copy_weights(trainer):
    """Return copies of the parameters of a trainer of Transformers, by name."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def digits(prompts, completions, completion_ids, **columns):
    """Return the share of digits among the tokens of an answer: quick to learn, rarely equal within a group."""
    return [sum(token < 10 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def mostly_digits(prompts, completions, completion_ids, **columns):
    """Return 1 where more than half of an answer are digits, else 0."""
    return [float(share > 0.5) for share in digits(prompts, completions, completion_ids)]
