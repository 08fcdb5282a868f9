"""Two processes that load a policy in shards: the same weights as cut from a whole one."""

import copy
import shutil
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import save_tiny_policy
from gloo import run_on_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.config import Config
from python_trainer.distributed import RankGroup, start
from python_trainer.distributed.sharded import ShardedGroup
from python_trainer.errors import UserError
from python_trainer.loop.learner import Learner
from python_trainer.loop.parts import resolve_settings
from python_trainer.model.packing import pack_rollouts
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import CriticConfig, ModelConfig
from python_trainer.model.weights import full

pytestmark = pytest.mark.slow  # two processes load models for half a minute

# folder, further settings of the model
CASES = {
    "tied": ("tied", {}),
    "tied, bfloat16": ("tied", {"dtype": "bfloat16"}),
    "not tied, recomputed": ("plain", {"dtype": "bfloat16", "gradient_checkpointing": True}),
    "adapters": ("plain", {"dtype": "bfloat16", "lora": {"r": 2}}),
    "an adapter merged in": ("adapter", {"dtype": "bfloat16"}),
}
REFUSED = {
    "nan": r"1 weights of .*nan hold NaN or infinity: model.norm.weight$",
    "lacking": r"lacks 1 weights of its model: model.norm.weight",
    "untied": r"cannot be loaded with parallel: fsdp2, .* do not agree on lm_head.weight",
}
EMBEDDINGS = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def cut_from_a_whole(config, ranks):
    """Load the policy whole on every rank, then cut it."""
    policy = load_policy(config)
    policy.inference_model = copy.deepcopy(policy.inference_model).requires_grad_(False).eval()
    policy.inference_model.gradient_checkpointing_disable()  # it only generates
    if policy.adapted:
        policy.model.eval()  # PEFT's layers, which have no dropout
    ranks.shard(policy.model)
    return policy


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def assert_equal_modules(first, second):
    for kind in ("named_parameters", "named_buffers"):
        values, expected_values = (dict(getattr(module, kind)()) for module in (first, second))
        assert list(values) == list(expected_values)
        for name, value in values.items():
            expected = expected_values[name]
            assert value.requires_grad == expected.requires_grad and value.dtype == expected.dtype, name
            assert value.shape == expected.shape and torch.equal(local(value), local(expected)), name
    assert len(first.state_dict()) == len(second.state_dict())  # what is tied is tied
    for (name, x), (_, y) in zip(first.named_modules(), second.named_modules(), strict=True):
        assert (x.training, type(x).__name__) == (y.training, type(y).__name__), name


def assert_equal_copies(policy, ranks):
    """Check that a reference and the body of a critic begin with the weights of the policy."""
    algorithm = AlgorithmConfig(advantage="gae", beta=0.1)
    critic = CriticConfig(separate=True)
    learner = Learner(policy, Config(algorithm=algorithm, critic=critic), ranks)
    if not policy.adapted:  # else it is the policy itself
        for name, p in policy.inference_model.named_parameters():
            assert torch.equal(full(learner.reference.model.get_parameter(name)), p)
    body = {name: full(p) for name, p in learner.critic.body.named_parameters()}
    for name, p in policy.inference_model.base_model.named_parameters():
        assert torch.equal(body[name], p.float()) and body[name].dtype == torch.float32


def compare(settings):
    config = ModelConfig(device="cpu", **settings)
    group = ShardedGroup()
    whole_group = ShardedGroup()
    policy = group.load(config)
    whole_group.mesh = group.mesh
    plain = cut_from_a_whole(config, whole_group)
    for attribute in ("model", "inference_model"):
        assert_equal_modules(getattr(policy, attribute), getattr(plain, attribute))
    assert policy.traits == plain.traits and policy.eos_token_ids == plain.eos_token_ids
    assert policy.adapted == plain.adapted and policy.name == plain.name
    fields = policy.inference_model.config.to_dict()
    own_dtype = {"dtype": fields["dtype"]}  # one that an adapter was merged into says that of its base
    assert fields == plain.inference_model.config.to_dict() | own_dtype
    assert policy.inference_model.generation_config.to_dict() == plain.inference_model.generation_config.to_dict()
    assert_equal_copies(policy, group)


def settle_on_unlike_processors(path):
    """Let only the second process choose bfloat16; check that it takes the dtype of the first one."""
    with (
        patch("python_trainer.model.loading.MAX_BYTES", 0 if dist.get_rank() else 1 << 40),
        patch.object(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}),
    ):
        config = Config(model=ModelConfig(path=str(path), device="cpu"))
        assert resolve_settings(config, None, RankGroup("ddp"), print).model.dtype == "float32"


def every_case(paths):
    settle_on_unlike_processors(paths["tied"])
    for name, (place, settings) in CASES.items():
        print("case:", name)
        compare(settings | {"path": str(paths[place])})
    for name, message in REFUSED.items():
        with pytest.raises(UserError, match=message):
            ShardedGroup().load(ModelConfig(path=str(paths[name]), device="cpu"))


def copy_with_weights(source, folder, changed):
    """Copy a folder, with other weights in its only file."""
    shutil.copytree(source, folder)
    save_file(changed(load_file(source / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


def save_adapter(folder, base):
    import peft

    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)  # random, so that it matters
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(str(base)), adapter).save_pretrained(folder)


def test_loaded_in_shards_is_cut_from_a_whole(tmp_path):
    """Weights, buffers and modes, bit for bit; what is no good is refused in every process."""
    paths = {name: tmp_path / name for name in ("tied", "plain", "adapter", "untied", "nan", "lacking")}
    save_tiny_policy(paths["tied"], vocab=65)  # does not divide by two
    save_tiny_policy(paths["plain"], tie_word_embeddings=False)
    save_adapter(paths["adapter"], paths["tied"])
    bad = torch.tensor([1.0] * 31 + [torch.nan])  # in the part of the last rank
    copied = partial(copy_with_weights, paths["tied"])
    copied(paths["untied"], lambda weights: weights | {"lm_head.weight": weights[EMBEDDINGS] + 1})
    copied(paths["nan"], lambda weights: weights | {NORM: bad})
    copied(paths["lacking"], lambda weights: {name: weights[name] for name in weights if name != NORM})
    run_on_ranks(tmp_path, every_case, paths)


def test_a_reference_is_whole_within_its_passes_only(tiny_policy, answers):
    """The policy keeps embeddings and output layer for the backward pass, a reference has none."""
    with start("fsdp2", "cpu") as ranks:
        policy = ranks.load(ModelConfig(path=str(tiny_policy), device="cpu"))
        reference = policy.frozen_copy(ranks)
        for model, sharded in (policy, False), (reference, True):
            with torch.no_grad(), model.packed_attention():
                model.token_logprobs(pack_rollouts(answers, range(len(answers))), 1.0)
            assert all(hasattr(p, "to_local") for p in model.model.parameters()) == sharded
