"""Memory of a run by arithmetic, before anything is loaded.

The constants are fits to the tensors of the trainer's passes; ``python -m bench memory`` holds them against a process.
Not counted: Python, CUDA's context and gaps between tensors.
"""

import os
import re
from dataclasses import dataclass
from typing import Any

import torch

from python_trainer.config import Config
from python_trainer.errors import UserError
from python_trainer.model.fused import MAX_BYTES, MODEL_TYPES
from python_trainer.model.loading import described_model, find_dtype
from python_trainer.model.lora import adapted_layers, add_adapters
from python_trainer.model.policy import LARGEST_LOGITS, choose_device
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.paged.engine import CPU_MEMORY_BYTES, CUDA_MEMORY_SHARE
from rlkernels.logprobs.linear import block_columns
from rlkernels.weights.delta import has_zstandard

USABLE = 0.94  # of a GPU's memory; the rest is for CUDA's context and for gaps between tensors
PROMPT_TOKENS = 256  # of a prompt, unless the caller knows better
SEQUENCES = 256  # most in a pass of generation
PREFILL_TOKENS = 8192  # most in a pass of generation
LOGIT_BYTES = {"cuda": 24, "cpu": 8}  # for each logit of a block, forwards and backwards
DRAW_BYTES = {"cuda": 46, "cpu": 6}  # for each logit that a token is drawn from
RECOMPUTES = "model.gradient_checkpointing: auto recomputes activations, which would not fit otherwise"


@dataclass(frozen=True)
class Device:
    """Where a run is to be: "cpu" or "cuda", the bytes that can be counted on, and how many devices there are."""

    kind: str
    memory: int
    count: int = 1


class Shape:
    """Sizes of a policy's model, which may be on ``meta``.

    Attributes:
        total, body, trained: weights of the policy as generation uses it, without an output layer of its own, and those
            that train.
        adapted: weights that have an adapter; 0 without LoRA.
        head: weights of the output layer that train.
        inner: width of the MLP, of all experts that see a token.
        query, key: heads x head size.
        item: bytes of a number in its passes.
        fused: its passes are those of FusedDecoder.
        capped: its logits are, which are then all held.
    """

    def __init__(self, model: Any, kind: str):
        text = model.config.get_text_config()
        params = list(model.parameters())
        head = model.get_output_embeddings().weight
        trained = [p.numel() for p in params if p.requires_grad]
        self.trained = sum(trained)
        self.largest = max(trained, default=0)
        self.adapted = sum(layer.base_layer.weight.numel() for _, layer in adapted_layers(model))
        self.total = sum(p.numel() for p in params) - (self.trained if self.adapted else 0)
        self.body = sum(p.numel() for p in model.base_model.parameters()) - (self.trained if self.adapted else 0)
        self.head = head.numel() if head.requires_grad else 0
        self.vocab = head.shape[0]
        self.item = head.element_size()
        self.layers = text.num_hidden_layers
        self.hidden = text.hidden_size
        self.layer = (self.total - 2 * head.numel()) // self.layers
        heads = text.num_attention_heads
        size = getattr(text, "head_dim", None) or self.hidden // heads
        self.query = heads * size
        self.key = (getattr(text, "num_key_value_heads", None) or heads) * size
        self.inner = getattr(text, "intermediate_size", None) or 4 * self.hidden
        if experts := getattr(text, "num_experts_per_tok", None):
            self.inner = experts * (getattr(text, "moe_intermediate_size", None) or self.inner)
        self.capped = getattr(text, "final_logit_softcapping", None) is not None
        small = self.item == 2 or 4 * self.total <= MAX_BYTES
        self.fused = kind == "cpu" and small and not self.adapted and model.config.model_type in MODEL_TYPES


def read_shape(config: ModelConfig, kind: str) -> Shape:
    """Read the sizes of a model from its folder; weights are neither read nor fetched."""
    model = described_model(config).to(find_dtype(config, torch.device(kind)))
    if config.lora is not None:
        add_adapters(model, config.lora)
    return Shape(model, kind)


def training_bytes(shape: Shape, config: Config, kind: str, gpu_memory: int | None, prompt: int) -> int:
    """Estimate the peak of a forward and backward pass over a micro-batch, beside weights and the like."""
    rollout = config.rollout
    recompute = config.model.gradient_checkpointing is True
    answer, num_generations = rollout.max_completion_length, rollout.num_generations
    group = prompt + num_generations * answer
    max_tokens = min(max(config.optimizer.micro_batch_tokens, prompt + answer), rollout.prompts_per_step * group)
    groups, partial_group = divmod(max_tokens, group)
    partial = max(partial_group - prompt, 0) // answer  # answers of a group that is cut
    pairs = (groups * num_generations + partial) * answer  # log-probabilities
    tokens = (groups + (partial > 0)) * prompt + pairs
    attention = 2 * (shape.query + shape.key)  # query, key, value and output
    if shape.fused and not recompute:
        layer = shape.item * (4 * shape.hidden + attention + 3 * shape.inner)
    else:  # norms keep their inputs in float32
        layer = shape.item * (4 * shape.hidden + attention + 4 * shape.inner) + 8 * shape.hidden
    logits = pairs * shape.vocab
    if logits * shape.item > LARGEST_LOGITS and not shape.capped:
        logits = min(logits, pairs * block_columns(pairs, gpu_memory))
    at_head = logits * LOGIT_BYTES[kind] + shape.head * shape.item
    if not recompute:
        return shape.layers * layer * tokens + at_head
    layer_inputs = shape.layers * shape.hidden * shape.item * tokens
    return layer_inputs + max(at_head, (layer + 3 * shape.inner * shape.item) * tokens + shape.layer * shape.item)


@dataclass
class Memory:
    """What a device holds, in bytes.

    Attributes:
        parts: what is held, by name; gradients and activations in an update only.
        phases: the most at a time, by phase.
        reserved: what training will take after the KV cache is made.
        cache_tokens: tokens that the KV cache has room for; None: there is none, or a server has it.
        longest: tokens of prompt and answer.
    """

    device: Device
    parts: dict[str, int]
    phases: dict[str, int]
    reserved: int
    cache_tokens: int | None
    longest: int

    @property
    def trouble(self) -> str | None:
        """Say why the run cannot work, and what helps; None if it can work."""
        return self.overflow or self.small_cache

    @property
    def overflow(self) -> str | None:
        """Say which phase takes more memory than there is, and what helps; None if none does."""
        phase = max(self.phases, key=lambda name: self.phases[name])
        if self.phases[phase] <= self.device.memory:
            return None
        return (
            f"{phase} takes {self.phases[phase] / 1e9:.1f} GB of {self.device.memory / 1e9:.1f}: smaller "
            "optimizer.micro_batch_tokens or rollout.memory_bytes, model.gradient_checkpointing=true, model.lora or "
            "parallel=fsdp2 on more GPUs take less"
        )

    @property
    def small_cache(self) -> str | None:
        """Say that the KV cache does not hold one answer, and what helps; None if it does."""
        if self.cache_tokens is None or self.cache_tokens >= self.longest:
            return None
        return (
            f"the KV cache has room for {self.cache_tokens} tokens, prompt and answer have {self.longest}: raise "
            "rollout.memory_bytes, leave more memory to it, or lower rollout.max_completion_length"
        )


LOADED = ("weights", "copy for generation", "weights of vLLM")  # before the KV cache is made


def held_bytes(config: Config, shape: Shape, shards: int) -> dict[str, int]:
    """Compute what a device holds between passes, and the gradients; ranks of fsdp2 hold shards in float32."""
    sharded = shards > 1 or config.parallel == "fsdp2"
    low_precision = shape.item < 4
    model_bytes = shape.total * shape.item
    moments = 12 if low_precision and not sharded else 8  # bytes a weight, with the float32 masters of low precision
    vllm = config.rollout.engine == "vllm" and not config.rollout.vllm_server
    parts = {
        "weights": (4 if sharded else shape.item) * (shape.total + (shape.trained if shape.adapted else 0)) // shards
    }
    if vllm:
        parts["weights of vLLM"] = model_bytes
    if (sharded and not vllm) or (shape.adapted and not sharded):
        parts["copy for generation"] = model_bytes if sharded else shape.adapted * shape.item
    parts["moments and masters"] = moments * shape.trained // shards
    parts["gradients"] = 4 * shape.trained // shards
    if config.algorithm.beta and not shape.adapted:
        parts["reference"] = model_bytes // shards
    if config.algorithm.advantage_fn.critic and config.critic.separate:
        parts["critic"] = ((4 if sharded else shape.item) + moments) * shape.body // shards
        parts["gradients"] += 4 * shape.body // shards
    return parts


def plan_memory(
    config: Config, device: Device, *, prompt: int = PROMPT_TOKENS, model: Any = None, generates: bool = True
) -> Memory:
    """Compute what each device holds in every phase of a run.

    Args:
        prompt: tokens of a prompt.
        model: the model itself; None: one like that of the settings is described.
        generates: False for supervised training, which needs no KV cache.
    """
    shape = read_shape(config.model, device.kind) if model is None else Shape(model, device.kind)
    rollout = config.rollout
    kind = device.kind
    shards = device.count if config.parallel == "fsdp2" else 1
    parts = held_bytes(config, shape, shards)
    keeps_weights = config.save.weight_history is not None
    sends_deltas = rollout.vllm_server is not None and not shape.adapted and has_zstandard()
    if kind == "cpu" and (keeps_weights or sends_deltas):  # a GPU's host holds the copies
        parts["weights before, for deltas"] = (keeps_weights + sends_deltas) * shape.total * shape.item
    activations = training_bytes(shape, config, kind, None if kind == "cpu" else device.memory, prompt)
    if "critic" in parts:
        activations *= 2  # it runs over the same tokens
    if config.optimizer.offload and kind != "cpu":  # the host holds what trains, with its gradients and moments
        parts |= {name: 0 for name in parts if name in ("weights", "moments and masters", "gradients", "critic")}
    if shards > 1:  # embeddings, output and two layers are gathered; the gradients of a layer add up in float32
        activations += shape.item * (2 * shape.vocab * shape.hidden + 2 * shape.layer) + 4 * shape.layer
    parts["activations"] = activations
    asleep = rollout.engine == "vllm" and kind != "cpu"  # vLLM gives its memory up in an update
    passing = ("gradients", "activations")
    reserved = sum(size for name, size in parts.items() if name not in (LOADED + passing if asleep else LOADED))
    free = max(device.memory - reserved - sum(parts.get(name, 0) for name in LOADED), 0)
    cache = rollout.memory_bytes or (CPU_MEMORY_BYTES if kind == "cpu" else int(free * CUDA_MEMORY_SHARE))
    generates_here = generates and not rollout.vllm_server
    cache = cache if generates_here else 0
    held = sum(size for name, size in parts.items() if name not in passing)
    update = held + parts["gradients"] + (-parts.get("weights of vLLM", 0) if asleep else cache)
    longest = prompt + rollout.max_completion_length
    token_bytes = 2 * shape.layers * shape.key * shape.item  # of the KV cache
    phases = {
        "generation": held + cache + (generating_bytes(shape, config, kind, prompt) if generates_here else 0),
        "the update": update + activations,
        # a float32 master is rounded to its weight
        "the optimizer step": update + (9 * shape.largest if shape.item < 4 and shards == 1 else 0),
    }
    return Memory(
        device, parts | {"KV cache": cache}, phases, reserved, cache // token_bytes if cache else None, longest
    )


def generating_bytes(shape: Shape, config: Config, kind: str, prompt: int) -> int:
    """Estimate the most that a pass of generation takes, beside the cache: a prefill, or drawing tokens."""
    prompts = config.rollout.prompts_per_step
    sequences = min(SEQUENCES, prompts * config.rollout.num_generations)
    tokens = min(PREFILL_TOKENS, prompts * prompt)
    prefill = shape.item * tokens * (4 * shape.hidden + 2 * (shape.query + shape.key) + 3 * shape.inner)
    return max(prefill, sequences * shape.vocab * DRAW_BYTES[kind])


def device_here(name: str, ranks: int | None = None) -> Device:
    """Describe the devices that a run uses here.

    Args:
        name: ``model.device``.
        ranks: processes of the run; None: one for each GPU.
    """
    if choose_device(name).type == "cpu":
        return Device("cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    total = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    return Device("cuda", int(total * USABLE), ranks or torch.cuda.device_count())


def parse_gpus(text: str) -> Device:
    """Read ``8x80`` or ``80``: GPUs of so many gigabytes, 10^9 bytes each."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)", text)
    if match is None or int(match[1] or 1) < 1 or float(match[2]) <= 0:
        raise UserError(f"--gpus must be like 80, or 8x80 for eight of 80 GB, got {text!r}")
    return Device("cuda", int(float(match[2]) * 1e9), int(match[1] or 1))


def needs_recomputing(config: Config, device: Device, *, generates: bool = True) -> bool:
    """Decide whether ``model.gradient_checkpointing: auto`` recomputes: on a GPU where the run would not fit."""
    if config.model.gradient_checkpointing != "auto" or device.kind == "cpu":
        return False
    plan = plan_memory(config, device, generates=generates)
    cache_grows = config.rollout.memory_bytes is None  # by what activations leave
    return plan.overflow is not None or (cache_grows and plan.small_cache is not None)


def memory_lines(memory: Memory) -> list[str]:
    """Write a plan in lines, in gigabytes of 10^9 bytes."""
    device = memory.device
    lines = [f"memory of each {device.kind} device ({device.count} of {device.memory / 1e9:.1f} GB), in GB:"]
    lines += [f"  {name:<27}{size / 1e9:9.2f}" for name, size in memory.parts.items()]
    lines += [f"  most in {name:<19}{size / 1e9:9.2f}" for name, size in memory.phases.items()]
    if memory.cache_tokens is not None:
        lines.append(f"  answers of full length in the KV cache: {memory.cache_tokens // memory.longest}")
    return lines
