"""Attention under models of Transformers: sinks, windows, soft caps, and keys wider than values."""

import pytest
import torch
from accuracy import assert_as_plain, with_gradients
from paged_problems import visible_pairs

pytest.importorskip("rlkernels.integrations.transformers", reason="this machine lacks transformers")
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import rlkernels
from rlkernels import TreeLayout
from rlkernels.integrations.transformers import IMPLEMENTATION, pack
from rlkernels.integrations.transformers_attention import add_sinks
from tools.architectures import build, check_packed, check_paged

LAYOUT = TreeLayout.from_sequences([[*range(70)], [*range(70), 1, 2], [*range(20), *range(9)], [7]])
BOTH = (check_packed, check_paged)
PACKED = (check_packed,)


@pytest.mark.parametrize(("kind", "checks"), [
    ("gpt_oss", BOTH), ("granite_swa", BOTH), ("granitemoe_swa", BOTH),
    ("mimo_v2_flash", PACKED),  # more heads of keys in layers with a window: not for one cache
    ("mistral", BOTH), ("gemma3_text", BOTH), ("phimoe", BOTH),  # windows, as an argument or in the mask
    ("moshi", BOTH),  # a window in the config alone
    ("gemma2", BOTH), ("vaultgemma", BOTH),
    ("deepseek_v2", BOTH), ("deepseek_v3", BOTH), ("glm4_moe_lite", BOTH), ("minicpm3", BOTH), ("youtu", BOTH),
    ("longcat_flash", BOTH),
])  # fmt: skip
def test_models_compute_what_they_do_by_eager_attention(kind, checks):
    for check in checks:
        check(build(kind))


def packed_logits(model):
    packed = pack([[5, 6, 7, 8], [5, 6, 9]])
    return model(packed.ids[None], position_ids=packed.position_ids[None], attention=packed.layout, use_cache=False)


@pytest.mark.parametrize("kind", ["bloom", "falcon", "xglm", "mpt", "gpt_neox_japanese", "openai-gpt"])
def test_models_whose_layers_do_not_call_the_interface_are_refused(kind):
    """Their layers would attend to all tokens of the row, and without a mask if the name is in their config."""
    model = build(kind)
    name = type(model).__name__
    reason = "its layers do not call Transformers' attention interface"
    for implementation in ("eager", IMPLEMENTATION):
        model.set_attn_implementation(implementation)  # Transformers warns and changes nothing
        with pytest.raises(ValueError, match=f"^{name} cannot run a packed pass: {reason}$"):
            packed_logits(model)
    with pytest.raises(ValueError, match=f"^attn_implementation='rlkernels' cannot run {name}: {reason}$"):
        AutoModelForCausalLM.from_config(model.config, attn_implementation=IMPLEMENTATION)


@pytest.mark.parametrize(("kind", "reason"), [
    ("bart", "it takes no position_ids"), ("marian", "it takes no position_ids"),
    ("mamba", "its layers do not call"), ("jamba", "its layers do not call"),
])  # fmt: skip
def test_models_that_ignore_positions_or_do_not_attend_are_refused(kind, reason):
    model = build(kind)
    model.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(ValueError, match=f"^{type(model).__name__} cannot run a packed pass: {reason}"):
        packed_logits(model)


def test_a_packed_pass_by_another_implementation_is_refused():
    model = build("llama")
    AttentionInterface.register("another", sdpa_attention_forward)  # TRL's trainers wrap "sdpa" itself
    model.set_attn_implementation("another")
    message = r"^LlamaForCausalLM cannot .* it attends by 'another', call set_attn_implementation\('rlkernels'\)$"
    with pytest.raises(ValueError, match=message):
        packed_logits(model)
    check_packed(model)


def test_a_packed_pass_without_positions_is_refused():
    model = build("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    expected = packed_logits(model).logits
    packed = pack([[5, 6, 7, 8], [5, 6, 9]])
    for name, part in (("LlamaForCausalLM", model), ("LlamaModel", model.model)):
        with pytest.raises(ValueError, match=f"^position_ids must be given to {name} in a packed pass, got None"):
            part(packed.ids[None], attention=packed.layout, use_cache=False)
    assert torch.equal(model(packed.ids[None], None, packed.position_ids[None], attention=packed.layout)[0], expected)
    with pytest.raises(ValueError, match=r"^position_ids must be the layout's .* for LlamaForCausalLM .* \[1, 5\]$"):
        model(packed.ids[None], position_ids=torch.arange(5)[None], attention=packed.layout, use_cache=False)


def test_a_loss_of_the_packed_row_is_refused():
    model = build("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    packed = pack([[5, 6, 7, 8], [5, 6, 9]])
    inputs = {"input_ids": packed.ids[None], "position_ids": packed.position_ids[None], "attention": packed.layout}
    with pytest.raises(ValueError, match="^labels must not be given to LlamaForCausalLM in a packed pass, whose row"):
        model(**inputs, labels=packed.ids[None])
    assert torch.equal(model(**inputs, labels=None).logits, packed_logits(model).logits)


def test_dropout_of_attention_is_refused():
    model = build("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    expected = packed_logits(model).logits
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(
        ValueError, match=r"^LlamaAttention drops attention weights \(dropout=0.1\), which the attention"
    ):
        packed_logits(model.train())
    torch.testing.assert_close(packed_logits(model.eval()).logits, expected)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_autocast_casts_attention_as_sdpa_does(kind):
    """Rotary factors leave queries and keys in float32, values come in bfloat16; every layer gets all three alike."""
    model = build(kind)
    model.set_attn_implementation(IMPLEMENTATION)
    exact = packed_logits(model).logits
    with torch.autocast("cpu", torch.bfloat16):
        rounded = packed_logits(model).logits
    rounded.float().sum().backward()
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05 * float(exact.detach().abs().max()))


@pytest.mark.parametrize("compiled_part", ["model", "layers"])
def test_compiled_models_run_packed_passes(compiled_part):
    model = build("llama")
    model.set_attn_implementation(IMPLEMENTATION)
    expected = packed_logits(model).logits
    if compiled_part == "layers":
        for layer in model.model.layers:
            layer.compile(backend="eager", fullgraph=True)
    else:
        model = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(packed_logits(model).logits, expected)


def attend_with_sink_score(query, key, value, sinks, window):
    """Attend with a softmax over the scores of the keys and of the sink, every step rounded."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (key, value))
    score = (query.transpose(0, 1) * 0.3) @ key.transpose(1, 2)
    score = score.masked_fill(~visible_pairs(LAYOUT, window), -torch.inf)
    sink = sinks.view(-1, 1, 1).expand(*score.shape[:2], 1)
    weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    return (weight @ value).transpose(0, 1)


@pytest.mark.parametrize("sink", [0.0, 3.0, -40.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_sink_is_one_more_score(compiled, dtype, sink):
    shapes = [(LAYOUT.num_tokens, 4, 16), (LAYOUT.num_tokens, 2, 16), (LAYOUT.num_tokens, 2, 16), (4,)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tensors[3] += sink
    grad = torch.randn(shapes[0]).to(dtype)
    for window in (5, 1000):

        def ours(query, key, value, sinks, window=window):
            out_and_lse = rlkernels.tree_attention(query, key, value, LAYOUT, scale=0.3, window=window, return_lse=True)
            return add_sinks(*out_and_lse, sinks)

        plain, exact = (
            with_gradients(lambda *arguments, window=window: attend_with_sink_score(*arguments, window), inputs, grad)
            for inputs in (tensors, [t.double() for t in tensors])
        )
        assert_as_plain(with_gradients(ours, tensors, grad), plain, exact, 1e-6, 2e-6)
