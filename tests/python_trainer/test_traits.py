"""What is found out about a model before anything runs: models that packing would change are refused, by any engine."""

import pytest
import torch
from conftest import save_tiny_policy
from paged import SIZES, make
from rich.console import Console
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from python_trainer.data import Rollout
from python_trainer.errors import UserError
from python_trainer.model.forward import LogitRule
from python_trainer.model.packing import pack
from python_trainer.model.policy import Policy, load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.model.traits import ModelTraits, find_traits
from python_trainer.rollout.make import make_engine
from python_trainer.rollout.paged import engine as engine_module
from python_trainer.trainer import Trainer


class Convolution(torch.nn.Module):
    """Depth-wise over the tokens [1, T, H], each of which sees its neighbours."""

    def __init__(self, width: int, *, causal: bool):
        super().__init__()
        self.causal, self.inner = causal, torch.nn.Conv1d(width, width, 3, padding=2 if causal else 1, groups=width)

    def forward(self, states):
        return self.inner(states.transpose(1, 2))[..., : states.shape[1]].transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
def test_a_convolution_among_the_tokens_is_refused(tiny_policy, causal):
    tokenizer = load_policy(ModelConfig(path=str(tiny_policy), device="cpu")).tokenizer
    model = make()
    layer = model.model.layers[1]
    layer.mlp = torch.nn.Sequential(Convolution(SIZES["hidden_size"], causal=causal), layer.mlp)
    message = r"cannot run mixed \(Qwen2ForCausalLM\) on flattened tokens: .* nothing but attention may mix tokens"
    with pytest.raises(UserError, match=message):
        Policy(model, tokenizer, name="mixed")


@pytest.mark.parametrize("engine", ["paged", "vllm"])
def test_a_hybrid_model_is_refused_when_it_is_loaded(make_config, tmp_path, engine):
    folder = save_tiny_policy(tmp_path / "policy")
    config = Lfm2Config(**SIZES | {"vocab_size": 64}, layer_types=["conv", "full_attention", "conv"])
    Lfm2ForCausalLM(config).save_pretrained(folder)
    message = rf"^cannot run {folder} \(Lfm2ForCausalLM\) on flattened tokens: 1 of its 3 layers use .* and all must$"
    with pytest.raises(UserError, match=message):
        Trainer(make_config(model={"path": str(folder)}, rollout={"engine": engine}), tmp_path / "run",
                console=Console(quiet=True))  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_masks_that_short_sequences_do_not_show_are_refused():
    config = Llama4TextConfig(**SIZES, attention_chunk_size=16, num_local_experts=2, head_dim=8,
                              intermediate_size_mlp=48, no_rope_layers=[1, 1, 0])  # fmt: skip
    with pytest.raises(UserError, match="cannot run Llama4ForCausalLM .* it has layers of chunked_attention"):
        find_traits(Llama4ForCausalLM(config))


def test_traits_of_models():
    found = find_traits(make())
    assert found == ModelTraits(layers=3, kv_heads=2, head_dim=8, window=None, logits=LogitRule(), fusible=True)
    assert find_traits(make().bfloat16()).fusible and not find_traits(make().half()).fusible
    windowed = find_traits(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24)))
    assert windowed.window == 24 and windowed.fusible


@pytest.mark.parametrize("lora", [None, {"r": 4}])
@pytest.mark.parametrize("fused", [True, False])
def test_an_engine_of_a_policy_does_not_look_again(make_config, tmp_path, monkeypatch, lora, fused):
    config = make_config(model={"lora": lora})
    policy = load_policy(config.model)
    policy.fused = fused  # of training alone
    monkeypatch.setattr(engine_module, "find_traits", None)
    engine = make_engine(config.rollout, config.model, policy, tmp_path)
    assert engine.fused and engine.cache.key_cache.shape[3:] == (policy.traits.kv_heads, policy.traits.head_dim)


def test_a_policy_is_limited_to_the_original_length_of_its_rotary_factors(tiny_policy):
    """Up to it log-probabilities do not depend on what else is in the micro-batch; beyond it they do."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    config = Phi3Config(**SIZES | {"pad_token_id": 0}, rope_parameters=rope, original_max_position_embeddings=12)
    policy = load_policy(ModelConfig(path=str(tiny_policy), device="cpu"))
    policy = Policy(Phi3ForCausalLM(config).eval(), policy.tokenizer, name="phi")
    assert policy.max_length == 12

    def beside(length):
        """Log-probabilities of a short answer in one micro-batch with another, of so many tokens with its prompt."""
        answers = [Rollout([1, 2], [3, 4, 5]), Rollout([6], [7] * (length - 1))]
        with torch.no_grad(), policy.packed_attention():
            return policy.score(pack(answers, [0, 1]), 1.0)[0][0, :3]

    torch.testing.assert_close(beside(5), beside(12), rtol=0, atol=1e-5)
    assert not torch.allclose(beside(5), beside(14), atol=1e-2)
    with pytest.raises(UserError, match="12 leaves .* the original length of the model's rotary factors is 12 tokens"):
        policy.room(12)


@pytest.mark.parametrize("fused", [True, False])
def test_answers_beyond_the_window_of_mistral_are_refused(tiny_policy, fused):
    tokenizer = load_policy(ModelConfig(path=str(tiny_policy), device="cpu")).tokenizer
    policy = Policy(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)), tokenizer, name="mistral")
    assert policy.fused
    policy.fused = fused
    with policy.packed_attention():
        policy.score(pack([Rollout([1, 2], [3, 4, 5, 6])], [0]), 1.0)  # of the last token nothing is asked
        with pytest.raises(UserError, match="sliding window of 5 tokens, got 6"):
            policy.score(pack([Rollout([1, 2], [3, 4, 5, 6, 7])], [0]), 1.0)
