"""Tiny models of three families, an engine, requests of every kind and a tokenizer: what tests of the engine share."""

import pytest
import torch
import transformers

from python_trainer.data import Request
from python_trainer.model.policy import Policy
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged.engine import PagedEngine

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, dict] = {"Qwen2": {}, "Qwen3": {"head_dim": 16}, "Llama": {}}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
GREEDY = SamplingParams(temperature=0.0)


def make(kind: str = "Qwen2", **settings) -> torch.nn.Module:
    """Return a random causal language model of a kind of Transformers, of these sizes but for some settings."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES | MODELS.get(kind, {}) | settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def make_policy(kind: str, tokenizer, **settings) -> Policy:
    """Return such a model with the vocabulary of the tiny policy, whose tokenizer it takes."""
    model = make(kind, **{"vocab_size": 64, "eos_token_id": 63, **settings})
    return Policy(model, tokenizer, name=kind)


def engine_for(
    model: torch.nn.Module, *, eos=(), blocks=512, block_size=4, fused=True, share_reads=True, **kwargs
) -> PagedEngine:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    memory = blocks * block_size * token
    engine = PagedEngine(model, eos_token_ids=eos, memory_bytes=memory, block_size=block_size, **kwargs)
    engine.fused &= fused
    engine.share_from = engine.share_from if share_reads else None
    return engine


class Letters:
    """Stand in for a policy and its tokenizer: a token is a letter."""

    def __init__(self):
        self.tokenizer = self

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def mixed_requests(**changes) -> list[Request]:
    """Make requests of several lengths, some with common prompt prefixes, answer prefixes or several samples."""
    a, b, c = prompts([19, 6, 1])
    settings = [
        {"prompt_ids": a, "num_generations": 3},
        {"prompt_ids": b},
        {"prompt_ids": [*a[:10], *b], "prefix_ids": b, "num_generations": 2},
        {"prompt_ids": c, "prefix_ids": a, "num_generations": 4},
        {"prompt_ids": a, "prefix_ids": c, "num_generations": 2},
    ]
    return [
        Request(**{"max_new_tokens": 20 + 3 * i, "sample_id": 10 * i, **values, **changes})
        for i, values in enumerate(settings)
    ]


def assert_same(completions, expected):
    assert [c.ids for c in completions] == [c.ids for c in expected]
    for completion, expected_completion in zip(completions, expected):
        assert completion.logprobs == pytest.approx(expected_completion.logprobs, abs=1e-4)
