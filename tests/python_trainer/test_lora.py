"""Adapters: only they train, everybody else sees a plain model; those that a run writes and begins with."""

import json
import sys

import pytest
import torch
from conftest import LORA, QUIET, train
from paged import make
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import save_tiny_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from python_trainer.distributed import start
from python_trainer.errors import UserError
from python_trainer.model.lora import adapted_layers, adapted_weight, is_adapter, without_adapters
from python_trainer.model.packing import pack_rollouts
from python_trainer.model.policy import Policy, load_policy, recomputes
from python_trainer.model.settings import ModelConfig
from python_trainer.run.callbacks import Callback
from python_trainer.run.checkpoint import list_checkpoints, load_checkpoint
from python_trainer.run.directory import read_metrics
from python_trainer.run.logger import Logger
from python_trainer.trainer import Trainer
from rlkernels.weights import merged_weight


def merged_weights(model):
    """Return merged float32 weights by name, of every layer with an adapter."""
    return {f"{name}.weight": merged_weight(*adapted_weight(layer)) for name, layer in adapted_layers(model)}


def scores(policy, answers):
    with torch.no_grad(), policy.packed_attention():
        return policy.token_logprobs(pack_rollouts(answers, range(len(answers))), 1.0)[0]


def test_learns_and_leaves_a_plain_model(make_config, tmp_path, tiny_policy, answers):
    config = make_config(max_steps=20, model={"lora": LORA}, optimizer={"learning_rate": 0.05})
    trainer = train(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["reward"] > rows[1]["reward"] + 0.2
    saved = load_checkpoint(list_checkpoints(trainer.checkpointer.checkpoints)[-1])["model"]
    assert len(saved) == 12 and all(is_adapter(name) for name in saved), "adapters alone"
    assert all(row["sampling/logp_difference/max"] < 1e-3 for row in rows[1:])
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_policy).named_parameters())
    weights = trainer.policy.model.named_parameters()
    frozen = [(name.replace(".base_layer.", "."), p) for name, p in weights if not is_adapter(name)]
    assert len(frozen) == len(start) and all(torch.equal(p, start[name]) for name, p in frozen)
    trained_storage = {p.data_ptr() for p in trainer.policy.model.parameters()}
    inference = trainer.policy.inference_model
    copied = {name for name, p in inference.named_parameters() if p.data_ptr() not in trained_storage}
    assert not any(p.requires_grad for p in inference.parameters())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    merged = merged_weights(trainer.policy.model)
    adapted = "self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"
    assert copied == set(merged) == {f"model.layers.{i}.{part}.weight" for i in range(2) for part in adapted}
    for name, p in exported.named_parameters():
        assert torch.equal(p, merged.get(name, start[name])), name
        assert torch.equal(p, start[name]) == (name not in merged), name
    exported_policy = Policy(exported, trainer.policy.tokenizer, name="exported")
    torch.testing.assert_close(scores(exported_policy, answers), scores(trainer.policy, answers), rtol=1e-4, atol=1e-4)


def test_activations_are_recomputed_beside_a_reference_and_a_critic(make_config, tmp_path, tiny_policy, answers):
    """The reference is the policy without adapters, the critic a model of its own."""
    config = make_config(
        max_steps=2, model={"lora": LORA, "gradient_checkpointing": True}, critic={"separate": True},
        algorithm={"advantage": "gae", "beta": 0.1}, optimizer={"micro_batch_tokens": 100_000},
    )  # fmt: skip
    trainer = Trainer(config, tmp_path, console=QUIET)
    assert trainer.learner.reference.model is trainer.policy.model
    assert not recomputes(trainer.policy.inference_model), "that one generates, token by token"
    passes = {}
    for name, body in (("policy", trainer.policy.model.model), ("critic", trainer.learner.critic.body)):

        def count(*_, name=name):
            passes[name] = passes.get(name, 0) + torch.is_grad_enabled()

        body.layers[0].self_attn.register_forward_hook(count)
    trainer.run()
    assert passes == {"policy": 4, "critic": 4}  # in each step forwards, and once more in the backward pass
    first, second = (row["kl"] for row in read_metrics(tmp_path)[1:])
    assert first == pytest.approx(0, abs=1e-6) and second > 1e-6, "from the policy as it began"
    plain = load_policy(ModelConfig(path=str(tiny_policy), device="cpu"))
    trained = scores(trainer.policy, answers)
    plain.fused = False  # with adapters the model's own forward runs, whose numbers are rounded elsewhere
    with without_adapters(trainer.policy.model):
        assert torch.equal(scores(trainer.learner.reference, answers), scores(plain, answers))
    assert torch.equal(scores(trainer.policy, answers), trained), "adapters are on again"


@pytest.mark.parametrize("parallel", ["none", "ddp"])
def test_updates_are_counted_and_progress_is_told(make_config, tmp_path, monkeypatch, parallel):
    """Once each, by whichever of the engines; also of a run that goes on."""
    versions = []
    work_log = []

    class Seen(Callback):
        def on_rollouts(self, trainer, step, rollouts):
            versions.append(trainer.engine.policy_version)

    monkeypatch.setattr(Logger, "log_work", lambda logger, *counts: work_log.append((logger.work, *counts)))
    with start(parallel) as ranks:
        for steps, resume in ((2, False), (3, True)):
            config = make_config(max_steps=steps, model={"lora": LORA}, parallel=parallel)
            trainer = Trainer(config, tmp_path, console=QUIET, callbacks=[Seen], resume=resume, ranks=ranks)
            trainer.run()
    assert versions == [0, 1, 2] and trainer.engine.policy_version == 3
    assert [work_log.count(work) for work in (("answers", 16, 16), ("evaluation", 6, 6))] == [3, 3]


def test_low_precision_adapters_have_float32_masters(make_config, tmp_path):
    config = make_config(max_steps=3, model={"lora": LORA, "dtype": "bfloat16"}, optimizer={"learning_rate": 0.02})
    trainer = train(config, tmp_path)
    masters = trainer.learner.optimizer.masters
    assert masters and all(is_adapter(name) and m.dtype == torch.float32 for name, m in masters.items())
    targets = dict(trainer.policy.inference_model.named_parameters())
    for name, value in merged_weights(trainer.policy.model).items():
        assert targets[name].dtype == torch.bfloat16 and torch.equal(targets[name], value.bfloat16())


EXPERTS = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # whose router is a class made from linear layers
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},  # and a shared expert
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_all_linear_adapts_what_it_can_of_a_mixture_of_experts(make_config, tmp_path, kind):
    """Fused experts and routers are no linear layers: they stay."""
    folder = save_tiny_policy(tmp_path / "policy")
    plain = make(kind, vocab_size=64, **EXPERTS[kind])
    plain.save_pretrained(folder)
    options = {"model": {"path": str(folder), "lora": {"r": 2, "target_modules": "all-linear"}}}
    trainer = train(make_config(max_steps=2, **options), tmp_path / "run")
    adapted = {n for n, m in plain.named_modules() if type(m) is torch.nn.Linear} - {"lm_head"}
    assert {name for name, _ in adapted_layers(trainer.policy.model)} == adapted
    start = plain.state_dict()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    assert {n for n, p in exported.items() if not torch.equal(p, start[n])} == {f"{name}.weight" for name in adapted}


def test_bad_settings_are_named(tiny_policy, monkeypatch):
    for modules, message in ((["nothing"], "fits no layers"), ("*_proj", "fits no layers: nothing to repeat"),
                             (["embed_tokens"], "must name linear layers"),
                             (["lm_head"], r"must not name the output layer, got \['lm_head'\]")):  # fmt: skip
        config = ModelConfig(path=str(tiny_policy), device="cpu", lora=LORA | {"target_modules": modules})
        with pytest.raises(UserError, match=f"model.lora.target_modules.*{message}"):
            load_policy(config)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model.lora needs PEFT .*pip install peft"):
        load_policy(ModelConfig(path=str(tiny_policy), device="cpu", lora=LORA))


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3, 40, 5]])).logits


def test_an_adapter_is_that_of_the_merged_model_and_can_be_trained_from(make_config, tmp_path, tiny_policy):
    lora = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    optimizer = {"learning_rate": 0.05}
    train(make_config(max_steps=2, model={"lora": lora}, optimizer=optimizer), tmp_path / "run")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    base = AutoModelForCausalLM.from_pretrained(tiny_policy)
    assert (logits(merged) - logits(base)).abs().max() > 1e-2
    adapter = tmp_path / "run" / "adapter"
    adapter_config = json.loads((adapter / "adapter_config.json").read_text())
    assert sorted(adapter_config["target_modules"]) == ["down_proj", "q_proj"]
    assert adapter_config["base_model_name_or_path"] == str(tiny_policy)
    reloaded = load_policy(ModelConfig(path=str(adapter), device="cpu")).model
    for model in (reloaded, PeftModel.from_pretrained(base, adapter)):
        torch.testing.assert_close(logits(model), logits(merged), rtol=1e-4, atol=1e-4)
    config = make_config(max_steps=1, model={"path": str(adapter), "lora": lora}, optimizer=optimizer)
    train(config, tmp_path / "again")
    twice_trained = AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "model")
    assert not torch.equal(logits(twice_trained), logits(merged))
    stacked = load_policy(ModelConfig(path=str(tmp_path / "again" / "adapter"), device="cpu"))
    torch.testing.assert_close(logits(stacked.model), logits(twice_trained), rtol=1e-4, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.eos_token = "A"
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(adapter)  # as trainers of adapters do
    policy = load_policy(ModelConfig(path=str(adapter), device="cpu"))
    assert policy.eos_token_ids == [17, 63] and policy.tokenizer.chat_template
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: weight * torch.nan for name, weight in weights.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"4 weights of {adapter} hold NaN or infinity"):
        load_policy(ModelConfig(path=str(adapter), device="cpu"))
    foreign = {"base_model.model.other.lora_A.weight": torch.zeros(4, 4)}
    save_file(foreign, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="does not fit its model: Found missing adapter keys"):
        load_policy(ModelConfig(path=str(adapter), device="cpu"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_model_name_or_path": "gone"}, r"the base of the adapter .*there is no folder gone"),
        ({"base_model_name_or_path": "small"}, "lacks adapter_model.safetensors"),
        ({}, "names no base model"),
    ],
)
def test_an_adapter_without_its_base_is_named(tmp_path, config, message):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_an_adapter_on_tied_embeddings_is_merged_as_it_computes(tmp_path, tiny_policy, options):
    base = AutoModelForCausalLM.from_pretrained(tiny_policy)
    assert base.config.tie_word_embeddings
    settings = LoraConfig(r=2, init_lora_weights=False, base_model_name_or_path=str(tiny_policy), **options)
    adapted = get_peft_model(base, settings).eval()
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    merged = load_policy(ModelConfig(path=str(tmp_path / "adapter"), device="cpu")).model
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-3)
    assert not merged.config.tie_word_embeddings
