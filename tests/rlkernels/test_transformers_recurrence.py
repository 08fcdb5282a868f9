"""Packed trees through models with recurrent layers: logits and gradients of each sequence run alone."""

import copy
import random
import subprocess
import sys
import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear

import rlkernels.integrations.transformers  # noqa: F401, registers the attention
from rlkernels import token_logprobs
from rlkernels.integrations.transformers_recurrence import CHUNK
from rlkernels.prefix_cache import GroupedLayout, TreeLayout

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.06, "pad_token_id": None, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}
MODELS = {
    "qwen3_next": {**DELTA, **EXPERTS, **SHARED},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, **SHARED},
    "olmo_hybrid": DELTA,
    "lara_mini": {**DELTA, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}


def build(kind, **changes):
    torch.manual_seed(2)
    config = AutoConfig.for_model(kind, **SIZES | MODELS.get(kind, {}) | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():  # states that last: as they are made, they decay within few tokens
        if name.endswith(("A_log", "dt_bias")):
            weight.data.uniform_(-3, -1)
    return model


def draw(count, seed=0):
    return random.Random(f"{count} {seed}").choices(range(1, VOCAB), k=count)


def conversation(turns, lengths, seed):
    """Make sequences that continue one another: a growing history, and at each turn two dropped answers."""
    history = draw(6, seed)
    sequences = []
    for turn in range(turns):
        history = history + draw(lengths[turn % len(lengths)], (seed, turn))
        sequences += [history + draw(2, (seed, turn, "a")), history + draw(5, (seed, turn, "b"))]
    return sequences


SYSTEM = draw(CHUNK + 9)
TREES = {
    "a system prompt, prompts, answers": [
        SYSTEM + draw(4, p) + draw(1 + 30 * a, (p, a)) for p in range(2) for a in range(3)
    ],
    "single tokens": [[*SYSTEM[:1], a, *draw(1, a)] for a in range(4)] + [[5], [6, 7]],
    "shorter than the convolution": conversation(6, [1, 2, 1], 7),
    "deep, with chunks of all sizes": conversation(5, [1, CHUNK, 3, CHUNK + 1, 2], 8),
    "one begins the other": [SYSTEM, SYSTEM[:40], SYSTEM[:3], SYSTEM + draw(3)],
}


def logprob_grads(model, logits, sequences):
    """Return gradients of the sum of the sequences' log-probabilities; ``logits``: of each sequence."""
    names, weights = zip(*model.named_parameters())
    rows = torch.cat([sequence_logits[: len(sequence) - 1] for sequence_logits, sequence in zip(logits, sequences)])
    targets = torch.tensor([token for sequence in sequences for token in sequence[1:]])
    grads = torch.autograd.grad(token_logprobs(rows, targets, backend="torch").sum(), weights, allow_unused=True)
    return {name: grad for name, grad in zip(names, grads) if grad is not None}


def pass_alone(model, sequences):
    """Return logits and gradients by eager attention, a sequence at a time."""
    model.set_attn_implementation("eager")
    logits = [model(torch.tensor([sequence]), use_cache=False).logits[0] for sequence in sequences]
    return logits, logprob_grads(model, logits, sequences)


def pass_packed(model, sequences, layout=None, **options):
    model.set_attn_implementation("rlkernels")
    layout = layout or TreeLayout.from_sequences(sequences)
    rows = model(layout.ids[None], position_ids=layout.position_ids[None], attention=layout, **options).logits[0]
    logits = [rows[place] for place in layout.places]
    return logits, logprob_grads(model, logits, sequences)


def distance(result, expected):
    """Return the largest difference of logits over the largest logit, and of a weight's gradient over its norm."""
    (logits, grads), (expected_logits, expected_grads) = result, expected
    assert grads.keys() == expected_grads.keys()
    largest = max(rows.abs().max() for rows in expected_logits)
    gap = max((rows - expected_rows).abs().max() for rows, expected_rows in zip(logits, expected_logits)) / largest
    return gap.item(), max(((grads[n] - g).norm() / g.norm()).item() for n, g in expected_grads.items())


def assert_as_alone(model, sequences, *, layout=None, **options):
    """Allow four times the change of the model alone when each weight moves by its last bit: float32's resolution."""
    expected = pass_alone(model, sequences)
    errors = distance(pass_packed(model, sequences, layout, **options), expected)
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 2**-23 * (2 * torch.randint(2, weight.shape) - 1))
    limits = distance(pass_alone(model, sequences), expected)
    model.load_state_dict(weights)
    assert max(limits) < 1e-4, "a test that shows little"
    assert all(error <= 4 * limit for error, limit in zip(errors, limits)), (errors, limits)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tree", TREES)
def test_logits_and_gradients_are_those_of_each_sequence_alone(kind, tree):
    assert_as_alone(build(kind), TREES[tree], use_cache=False)


def test_two_levels():
    sequences = TREES["a system prompt, prompts, answers"]
    layout = GroupedLayout.from_sequences(sequences, [len(SYSTEM)] * len(sequences))
    assert_as_alone(build("qwen3_5_text"), sequences, layout=layout, use_cache=False)


def test_layers_that_are_computed_again_in_the_backward_pass():
    model = build("qwen3_next").train()
    model.gradient_checkpointing_enable()
    assert_as_alone(model, TREES["shorter than the convolution"], use_cache=False)


@pytest.mark.parametrize("sequences", [TREES["single tokens"], [[5, 6, 7]]])
def test_a_cache_that_a_model_makes_by_default_changes_nothing(sequences):
    assert_as_alone(build("olmo_hybrid"), sequences)


def test_a_rule_with_a_decay_per_channel():
    """Kimi's, whose function has the same arguments."""
    rule = modeling_kimi_linear.chunk_kimi_delta_attention
    layout = TreeLayout.from_sequences(TREES["deep, with chunks of all sizes"])
    torch.manual_seed(0)
    shapes = {"query": (8,), "key": (8,), "value": (6,), "g": (8,), "beta": ()}
    row = {name: torch.randn(1, layout.num_tokens, 2, *shape) for name, shape in shapes.items()}
    row |= {"g": -row["g"].exp() * 0.05, "beta": row["beta"].sigmoid()}
    packed, _ = rule(**row, attention=layout, use_qk_l2norm_in_kernel=True)
    for place in layout.places:
        single, _ = rule(**{name: x[:, place] for name, x in row.items()}, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(packed[:, place], single, rtol=1e-5, atol=2e-6)


def test_layers_that_do_not_follow_a_tree_are_refused():
    model = build("minimax", layer_types=["full_attention", "linear_attention"], num_local_experts=2)
    message = (
        "MiniMaxAttention has layers of linear_attention, which do not follow a tree: pass each sequence by itself"
    )
    with pytest.raises(ValueError, match=message):
        pass_packed(model, [[1, 2], [1, 3]], use_cache=False)


def test_a_row_of_other_tokens_is_refused():
    model = build("lfm2")
    model.set_attn_implementation("rlkernels")
    layout = TreeLayout.from_sequences([[1, 2, 3], [1, 4]])
    with pytest.raises(ValueError, match=r"input_ids must be \[1, 4\], the tokens of the layout, got \[2, 4\]"):
        model(layout.ids.expand(2, -1), position_ids=layout.position_ids[None], attention=layout, use_cache=False)


def test_a_model_that_is_imported_later_follows(monkeypatch):
    """A file that comes with the weights defines such a model."""
    module = types.ModuleType("modeling_later")
    monkeypatch.setitem(sys.modules, "modeling_later", module)
    module.causal_conv1d_fn = lambda inputs, weight: torch.nn.functional.conv1d(
        inputs, weight[:, None], padding=weight.shape[1] - 1, groups=len(weight)
    )[..., : inputs.shape[2]]
    exec("from transformers import PreTrainedModel\nclass Later(PreTrainedModel): pass", vars(module))
    layout = TreeLayout.from_sequences([[1, 2, 3], [1, 4, 5, 6, 7]])
    inputs = torch.randn(1, 3, layout.num_tokens)
    weight = torch.randn(3, 4)
    packed = module.causal_conv1d_fn(inputs, weight, attention=layout)
    for place in layout.places:
        torch.testing.assert_close(packed[..., place], module.causal_conv1d_fn(inputs[..., place], weight))


def test_a_model_of_a_file_that_is_executed_without_an_import_can_be_defined():
    """No entry of sys.modules leads to its file; so executes ``importlib.util.module_from_spec``."""
    module = types.ModuleType("modeling_executed")
    exec("from transformers import LlamaForCausalLM\nclass Executed(LlamaForCausalLM): pass", vars(module))
    assert module.Executed(AutoConfig.for_model("llama", **SIZES)).can_generate()


@pytest.mark.slow
def test_a_model_that_is_imported_before_follows():
    code = """
from transformers.models.qwen3_next import modeling_qwen3_next as modeling
import rlkernels.integrations.transformers
print(modeling.causal_conv1d_fn.follows_trees, modeling.torch_chunk_gated_delta_rule.follows_trees)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout == "True True\n", process.stderr
