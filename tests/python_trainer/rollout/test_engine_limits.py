"""Models, requests and settings that the engine cannot run, and those it runs up to a limit."""

import pytest
import transformers
from paged import GREEDY, LONGROPE, SIZES, VOCAB, engine_for, make, own_greedy, prompts

from python_trainer.errors import UserError
from python_trainer.rollout import PagedEngine, Request
from rlkernels.integrations.transformers_attention import IMPLEMENTATION


def test_absolute_positions_and_sliding_window():
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=2,
                                     initializer_range=0.3, bos_token_id=None, eos_token_id=None)  # fmt: skip
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    request = Request(prompts([11])[0], max_new_tokens=10)
    got = PagedEngine(gpt2, eos_token_ids=(), memory_bytes=1 << 20).generate([request], GREEDY)[0]
    assert got.ids == own_greedy(gpt2, request.prompt_ids, 10)
    # inside its window a sliding layer attends to everything; the engine stops there
    windowed = engine_for(transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=24)))
    assert len(windowed.generate([Request(prompts([20])[0], max_new_tokens=10)], GREEDY)[0].ids) == 4
    assert windowed.max_positions == 24 and windowed.limited_by.endswith("(the model's sliding window)")


def test_angles_that_depend_on_the_longest_sequence():
    options = {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 40}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES | options)).eval()
    engine = engine_for(model)
    assert engine.max_positions == 40 and "original length of the model's rotary factors" in engine.limited_by
    request = Request(prompts([20])[0], max_new_tokens=30)
    assert engine.generate([request], GREEDY)[0].ids == own_greedy(model, request.prompt_ids, 20)  # and ends there
    # what Transformers compares with is another number
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 40}
    engine = engine_for(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=rope)))
    assert engine.max_positions == engine_for(make()).max_positions == 160


@pytest.mark.parametrize(("positions", "blocks"), [(160, 9), (160, 1), (24, 40), (5, 40), (5, 1)])
def test_passes_are_measured_in_what_there_is(positions, blocks):
    """Of few positions or few blocks of the cache, as drafts ask for them."""
    model = make()
    model.config.max_position_embeddings = positions
    one = PagedEngine(model, eos_token_ids=(), memory_bytes=1 << 20, block_size=16)
    engine = PagedEngine(model, eos_token_ids=(), memory_bytes=blocks * (1 << 20) // (one.room // 16), block_size=16)
    assert (engine.max_positions, engine.room) == (positions, 16 * blocks)
    for sequences, tokens in ((1, 1), (8, 1), (8, 8), (32, 8)):
        assert engine.pass_seconds(sequences, tokens) > 0
    request = Request([1], max_new_tokens=3)
    assert engine.generate([request], GREEDY)[0].ids == own_greedy(model, [1], 3)  # all blocks were given back


def test_models_it_cannot_run():
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2)
    with pytest.raises(UserError, match="MambaForCausalLM"):
        PagedEngine(transformers.MambaForCausalLM(config), eos_token_ids=())
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8))
    with pytest.raises(UserError, match="softcap"):
        PagedEngine(gemma, eos_token_ids=())
    assert gemma.config._attn_implementation != IMPLEMENTATION


def test_too_little_memory():
    with pytest.raises(UserError, match="memory_bytes must be at least"):
        PagedEngine(make(), eos_token_ids=(), memory_bytes=10)
    with pytest.raises(UserError, match="100 tokens, .* does not fit into a KV cache of 80 .*memory_bytes"):
        engine_for(make(), blocks=20).generate([Request([1] * 40, max_new_tokens=60)], GREEDY)
