"""What is found out about a model before anything runs: models that packing would change are refused, by any engine.

The type of its weights follows from the setting, the device, the processor and the size of the model.
"""

import io
import json
import re
from unittest.mock import Mock

import pytest
import torch
import transformers
from conftest import QUIET, merged, save_tiny_policy, train
from fake_vllm import FakeLLM, install
from paged import GREEDY, LONGROPE, SIZES, make, make_policy, prompts
from rich.console import Console
from safetensors.torch import load_file
from tiny import generate_greedy

from python_trainer.command_line.sft import Sft
from python_trainer.config import load_config
from python_trainer.data import Request, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.loop.parts import make_engine
from python_trainer.model import traits as traits_module
from python_trainer.model.forward import page
from python_trainer.model.loading import described_model, find_dtype, ignored_settings, run_dtype
from python_trainer.model.packing import pack_rollouts
from python_trainer.model.policy import Policy, load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.model.traits import ModelTraits, find_traits
from python_trainer.rollout.paged import engine as engine_module
from python_trainer.rollout.paged.engine import PagedEngine
from python_trainer.run.checkpoint import list_checkpoints, load_checkpoint
from python_trainer.trainer import Trainer
from rlkernels.integrations.transformers_attention import IMPLEMENTATION


@pytest.mark.parametrize("shift", [1, -1])
def test_a_token_that_sees_its_neighbour_outside_attention_is_refused(tokenizer, shift):
    """The one before, as a causal convolution does, or the one after."""
    model = make()
    hook = model.model.layers[1].mlp.register_forward_pre_hook
    hook(lambda module, inputs: inputs[0] + torch.nn.functional.pad(inputs[0], (0, 0, shift, -shift)))
    message = r"cannot run mixed \(Qwen2ForCausalLM\) on flattened tokens: .* nothing but attention may mix tokens"
    with pytest.raises(UserError, match=message):
        Policy(model, tokenizer, name="mixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_attends_twice_is_refused(dtype):
    """Without a cache it is right; in a cache the second values would replace the first."""
    model = make("DiffLlama").to(dtype)
    with pytest.raises(UserError, match=r"^cannot run \w+ on flattened tokens: each of 3 layers must attend [^\n]*$"):
        find_traits(model)
    assert model.config._attn_implementation != IMPLEMENTATION


@pytest.mark.parametrize("kind", ["Phimoe", "GraniteMoe"])
def test_rounding_that_sends_a_token_to_another_expert_is_no_fault(kind):
    sizes = SIZES | {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    for seed in range(4):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
        find_traits(model.bfloat16().eval())


def test_rounding_of_large_scores_is_no_fault():
    """In bfloat16 eager attention rounds scores, which ours keeps in float32: logits differ by a tenth and more."""
    for seed in range(8):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 12}))
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 5
        assert find_traits(model.bfloat16().eval()).fusible


def test_a_fault_that_rounding_in_bfloat16_would_hide_is_refused():
    """2 % of the token before change the logits by 1 %."""
    model = make("Llama")
    hook = model.model.layers[1].mlp.register_forward_pre_hook
    hook(lambda module, inputs: inputs[0] + 0.02 * torch.nn.functional.pad(inputs[0], (0, 0, 1, -1)))
    with pytest.raises(UserError, match="nothing but attention may mix tokens"):
        find_traits(model.bfloat16().eval())


def test_passes_in_the_type_of_the_weights_must_go_through():
    model = make()
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, out: out @ torch.eye(32))
    find_traits(model)
    with pytest.raises(UserError, match="RuntimeError: expected .* same dtype"):
        find_traits(model.bfloat16())
    overflowing = make()
    overflowing.lm_head.weight.data *= 1e6
    with pytest.raises(UserError, match=r"its logits hold NaN or infinity in torch.float16"):
        find_traits(overflowing.half())


def test_logits_that_a_model_widens_are_none_of_its_output_matrix():
    model = make()
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.float())
    assert find_traits(model).logit_scale == 1.0 and find_traits(model.bfloat16()).logit_scale is None


def set_mkldnn(precision):
    torch.backends.mkldnn.matmul.fp32_precision = precision


OUTSIDE = {
    "products": (set_mkldnn, "bf16", "ieee"),
    "products, in torch's own words": (torch.set_float32_matmul_precision, "medium", "highest"),
    "double": (torch.set_default_dtype, torch.float64, torch.float32),
    "low": (torch.set_default_dtype, torch.bfloat16, torch.float32),
    "device": (torch.set_default_device, "meta", None),
    "threads": (torch.set_num_threads, 1, torch.get_num_threads()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", [*OUTSIDE, "autocast"])
def test_no_verdict_hangs_on_a_setting_outside(rounding_processor, request, setting, dtype):
    model = make().to(dtype)
    mixing = make().to(dtype)
    hook = mixing.model.layers[1].mlp.register_forward_pre_hook
    hook(lambda module, inputs: inputs[0] + torch.nn.functional.pad(inputs[0], (0, 0, 1, -1)))
    expected = find_traits(model)
    if setting in OUTSIDE:
        choose, value, default = OUTSIDE[setting]
        request.addfinalizer(lambda: choose(default))
        choose(value)
    with torch.autocast("cpu", enabled=setting == "autocast"):
        settings_before = facts()
        assert find_traits(model) == expected and expected.fusible
        with pytest.raises(UserError, match="nothing but attention may mix tokens"):
            find_traits(mixing)
        assert facts() == settings_before


def facts():
    products = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    return *products, torch.get_default_dtype(), torch.is_autocast_enabled("cpu")


def test_products_go_on_following_the_setting_of_all_of_them():
    set_mkldnn("none")
    try:
        torch.backends.fp32_precision = "tf32"
        find_traits(make())
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = "none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_paths_of_generation_are_checked(monkeypatch, dtype):
    """A prefill, decoding, and decoding with shared blocks: each with keys that are wrong in the cache alone."""
    passes = []

    def paged(cache, sequences, *args, **options):
        plan = page(cache, sequences, *args, **options)
        passes.append(plan)
        if (len(passes) - 1) % 3 + 1 in broken:
            for layer in cache.key_cache:
                layer.mul_(-3)
        return plan

    monkeypatch.setattr(traits_module, "page", paged)
    model = make("Llama").to(dtype)
    broken = []
    find_traits(model)
    assert [len(plan.slots) for plan in passes[:3]] == [3, 2, 2] and len(passes) == 6, "by both ways through the model"
    assert [plan.groups is not None for plan in passes[:3]] == [False, False, True]
    for number in (2, 3):
        broken[:] = [number]
        with pytest.raises(UserError, match="computes something else"):
            find_traits(model)


@pytest.mark.parametrize(
    "error", [KeyError(1), RuntimeError("view size is not\ncompatible"), AssertionError(), IndexError("i")]
)
def test_whatever_a_model_raises_is_one_line(error):
    model = make()
    model.model.layers[1].mlp.register_forward_pre_hook(Mock(side_effect=error))
    reason = (str(error) or "no message").splitlines()[0]
    message = f"cannot run Qwen2ForCausalLM on flattened tokens: {type(error).__name__}: {reason}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        find_traits(model)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
UNUSUAL = {
    "Afmoe": {**EXPERTS, "head_dim": 8, "sliding_window": 128, "num_shared_experts": 1, "num_dense_layers": 1},
    "JetMoe": {"kv_channels": 8, "num_local_experts": 4, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_models_that_want_contiguous_attention(kind):
    model = make(kind, **UNUSUAL[kind]).eval()
    prompt = prompts([11])[0]
    engine = PagedEngine(model, eos_token_ids=(), memory_bytes=1 << 20)
    assert engine.generate([Request(prompt, max_new_tokens=8)], GREEDY)[0].ids == generate_greedy(model, prompt, 8)


@pytest.mark.parametrize("engine", ["auto", "paged", "vllm"])
def test_layers_that_do_not_follow_a_tree_are_refused_when_they_are_loaded(make_config, tmp_path, engine):
    folder = save_tiny_policy(tmp_path / "policy")
    options = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2, "vocab_size": 64}
    make("MiniMax", **options, num_hidden_layers=4).save_pretrained(folder)
    message = rf"^cannot run {folder} \(MiniMaxForCausalLM\) on flattened tokens: it has layers of linear_attention$"
    with pytest.raises(UserError, match=message):
        Trainer(make_config(model={"path": str(folder)}, rollout={"engine": engine}), tmp_path / "run",
                console=QUIET)  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_masks_that_short_sequences_do_not_show_are_refused():
    options = {"attention_chunk_size": 16, "num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 48}
    config = transformers.Llama4TextConfig(**SIZES | options, no_rope_layers=[1, 1, 0])
    with pytest.raises(UserError, match="cannot run Llama4ForCausalLM .* it has layers of chunked_attention"):
        find_traits(transformers.Llama4ForCausalLM(config))


HYBRIDS = {"Qwen3_5Text": "linear_attention", "OlmoHybrid": "linear_attention", "Lfm2": "conv"}


def make_hybrid(kind, **settings):
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(
        **SIZES | heads | {"linear_value_head_dim": 8, "initializer_range": 0.06} | settings,
        layer_types=[HYBRIDS[kind], "full_attention", HYBRIDS[kind]],
    )
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_recurrent_model_scores_packed_answers_as_each_alone(tokenizer, kind):
    policy = Policy(make_hybrid(kind, vocab_size=64, eos_token_id=63), tokenizer, name=kind)
    traits = policy.traits
    assert (traits.layers, traits.recurrent, traits.fusible) == (1, (HYBRIDS[kind],), False)
    prompt, other_prompt = prompts([9, 2])
    answers = [[3, 5, 7], [3, 5, 8, 1, 2], [4], [63]]
    rollouts = [Rollout(prompt, answer) for answer in answers] + [Rollout(other_prompt, [9, 9, 1])]
    packed = pack_rollouts(rollouts, range(len(rollouts)))
    with policy.packed_attention(), torch.no_grad():
        logprobs, _, _ = policy.token_logprobs(packed, 1.0)
    policy.model.set_attn_implementation("eager")
    for rollout, row in zip(rollouts, logprobs):
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
        with torch.no_grad():
            all_logprobs = policy.model(ids, use_cache=False).logits[0].log_softmax(-1)
        size = len(rollout.response_ids)
        expected = all_logprobs[-1 - size : -1].gather(1, ids[0, -size:, None])[:, 0]
        torch.testing.assert_close(row[:size], expected, rtol=1e-5, atol=2e-6)


def test_a_recurrent_model_is_updated_and_generated_by_vllm(make_config, tmp_path, monkeypatch):
    """The fake takes the weights as a checkpoint names them; the own engine says what to set."""
    install(monkeypatch, sleeps=False)
    folder = save_tiny_policy(tmp_path / "policy")
    make_hybrid("Qwen3_5Text", vocab_size=64, eos_token_id=63).save_pretrained(folder)
    start_weights = load_file(folder / "model.safetensors")
    config = make_config(model={"path": str(folder)}, max_steps=2)
    message = (
        r"^rollout.engine paged caches keys and values alone, and Qwen3_5ForCausalLM has layers of linear_attention: "
    )
    with pytest.raises(UserError, match=message + "set rollout.engine=vllm$"):
        Trainer(config.with_changes("rollout", engine="paged"), tmp_path / "paged", console=QUIET)
    trainer = train(config.with_changes("rollout", engine="auto"), tmp_path / "run")
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert trained.keys() == start_weights.keys() == FakeLLM.last.loaded.keys()
    assert all((trained[name] != weight).any() for name, weight in start_weights.items() if "linear_attn" in name)
    assert trainer.engine.stats["generated_tokens"] > 0


def test_traits_of_models():
    traits = find_traits(make())
    assert traits == ModelTraits(layers=3, kv_heads=2, head_dim=8, window=None, logit_scale=1.0, fusible=True)
    assert find_traits(make().bfloat16()).fusible and not find_traits(make().half()).fusible
    windowed = find_traits(make("Mistral", sliding_window=24))
    assert windowed.window == 24 and windowed.fusible


@pytest.mark.parametrize(("lora", "fused"), [(None, True), ({"r": 4}, False)])
def test_an_engine_of_a_policy_does_not_look_again(make_config, tmp_path, monkeypatch, lora, fused):
    config = make_config(model={"lora": lora})
    policy = load_policy(config.model)
    policy.fused = fused  # of training alone
    monkeypatch.setattr(engine_module, "find_traits", None)
    engine = make_engine(config, policy, tmp_path, RankGroup())
    engine = engine if lora is None else engine.inner  # of one that merges the adapters
    assert engine.fused and engine.cache.key_cache.shape[3:] == (policy.traits.kv_heads, policy.traits.head_dim)


def test_a_policy_is_limited_to_the_original_length_of_its_rotary_factors(tokenizer):
    """Up to it log-probabilities do not depend on what else is in the micro-batch; beyond it they do."""
    options = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 12}
    policy = make_policy("Phi3", tokenizer, pad_token_id=0, **options)
    assert policy.max_length == 12

    def beside(length):
        """Return log-probabilities of a short answer packed with one of so many tokens, its prompt included."""
        answers = [Rollout([1, 2], [3, 4, 5]), Rollout([6], [7] * (length - 1))]
        with torch.no_grad(), policy.packed_attention():
            return policy.token_logprobs(pack_rollouts(answers, [0, 1]), 1.0)[0][0, :3]

    torch.testing.assert_close(beside(5), beside(12), rtol=0, atol=1e-5)
    assert not torch.allclose(beside(5), beside(14), atol=1e-2)
    with pytest.raises(UserError, match="12 leaves .* the original length of the model's rotary factors is 12 tokens"):
        policy.room(12)


def test_type_of_the_weights_suits_the_device():
    for setting, on_cpu, on_gpu in (
        ("auto", torch.float32, torch.bfloat16),
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
    ):
        assert find_dtype(ModelConfig(dtype=setting), torch.device("cpu")) == on_cpu, setting
        assert find_dtype(ModelConfig(dtype=setting), torch.device("cuda")) == on_gpu, setting


@pytest.mark.parametrize("products", [{"amx_bf16": True}, {"avx512_bf16": True}, {"bf16": True}])
def test_large_models_are_bfloat16_where_the_processor_has_its_products(monkeypatch, products):
    def found(weights, setting="auto"):
        model = torch.nn.Linear(1, weights, bias=False, device="meta")
        monkeypatch.setattr("python_trainer.model.loading.described_model", lambda config: model)
        return find_dtype(ModelConfig(dtype=setting), torch.device("cpu"))

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: products, raising=False)
    assert found(1 << 26) == torch.float32  # 256 MB, which is fused
    assert found((1 << 26) + 1) == torch.bfloat16
    assert found(1 << 30, "float32") == torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    assert found(1 << 30) == torch.float32


def test_sizes_of_weights_are_known_without_weights(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    config = ModelConfig(path=str(folder))
    assert [p.shape for p in described_model(config).parameters()] == [p.shape for p in model.parameters()]
    with pytest.raises(UserError, match="holds no causal language model"):
        described_model(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("setting", ["auto", "bfloat16", "float32"])
def test_a_run_goes_on_in_its_type_where_auto_has_become_another(make_config, tmp_path, monkeypatch, setting):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    train(make_config(max_steps=1), tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["dtype"] == "float32"
    monkeypatch.setattr("python_trainer.model.loading.MAX_BYTES", 1000)  # the model is large now
    config = make_config(max_steps=2, model={"dtype": setting})
    resumed = train(config, tmp_path / "run", resume=True)
    dtype = "bfloat16" if setting == "bfloat16" else "float32"
    assert resumed.policy.model.dtype == getattr(torch, dtype)
    assert load_checkpoint(list_checkpoints(tmp_path / "run/checkpoints")[-1])["dtype"] == dtype
    assert f"dtype: {setting}" in (tmp_path / "run/config.yaml").read_text(), "what was asked for"
    fresh = Trainer(make_config(), tmp_path / "fresh", console=QUIET)
    assert fresh.policy.model.dtype == torch.bfloat16


def test_a_checkpoint_that_names_no_type_changes_nothing():
    config = ModelConfig(device="cpu")
    assert all(run_dtype(config, saved) == "float32" for saved in ({"dtype": "float16"}, {}, [], None))
    assert run_dtype(config, {"dtype": "bfloat16"}) == "bfloat16"


@pytest.mark.parametrize(("changes", "named"), [
    ({"output_router_logits": True, "router_aux_loss_coef": 0.02}, "router_aux_loss_coef 0.02 (output_router_logits)"),
    ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, None),
    ({"output_router_logits": False, "router_aux_loss_coef": 0.02}, None),
    ({"attention_dropout": 0.1, "router_jitter_noise": 0.01}, "attention_dropout 0.1, router_jitter_noise 0.01"),
])  # fmt: skip
def test_settings_of_a_model_that_training_ignores_are_named(lessons, tmp_path, changes, named):
    """The loss of a router needs all tokens of a batch, and passes have neither dropout nor jitter."""
    folder = save_tiny_policy(tmp_path / "policy")
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**SIZES | {"vocab_size": 64} | sizes | changes)
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    model = {"model": {"path": str(folder)}}
    for number, kind in enumerate((Trainer, Sft)):
        console = Console(file=io.StringIO(), width=1000)
        kind(load_config(merged(lessons, model)), tmp_path / f"run{number}", console=console)
        output = console.file.getvalue()
        assert ("training ignores what the model's config sets" in output) == (named is not None)
        assert named is None or output.count(named) == 1


@pytest.mark.parametrize("recomputes", [True, "auto"])
def test_a_model_whose_layers_cannot_recompute_is_named(make_config, tmp_path, recomputes):
    folder = save_tiny_policy(tmp_path / "policy")
    sizes = {"vocab_size": 64, "n_positions": 128, "n_embd": 16, "dff": 16, "n_layer": 1, "n_head": 2}
    transformers.CTRLLMHeadModel(transformers.CTRLConfig(**sizes, bos_token_id=None)).save_pretrained(folder)
    console = Console(file=io.StringIO(), width=1000)
    model = {"path": str(folder), "gradient_checkpointing": recomputes}
    Trainer(make_config(model=model), tmp_path / "run", console=console)
    assert ("model.gradient_checkpointing has no effect" in console.file.getvalue()) == (recomputes is True)


def test_heads_of_other_tasks_drop_nothing():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, resid_pdrop=0.0,
                                                                 embd_pdrop=0.0, attn_pdrop=0.25))  # fmt: skip
    assert ignored_settings(model) == "training ignores what the model's config sets: attn_pdrop 0.25"
