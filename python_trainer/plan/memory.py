"""What a device holds in each phase of a run, by the settings alone."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from python_trainer.config import Config
from python_trainer.distributed.replicated import BUCKET_ELEMENTS
from python_trainer.learner import bytes_to_come
from python_trainer.model.lora import adapted_layers
from python_trainer.model.optimizer import OFFLOADED_ELEMENTS
from python_trainer.plan.passes import Device, PlannedPolicy, Step, generating_bytes, training_bytes
from python_trainer.rollout.paged.engine import CPU_MEMORY_BYTES, CUDA_MEMORY_SHARE

PROMPT_TOKENS = 256  # of a prompt, unless told
SEQUENCES = 256  # most answers in a pass of either engine, and
BATCH_TOKENS = 8192  # most tokens
ROUNDED = 9  # bytes for each entry of the largest weight that an optimizer step holds, where masters are rounded to it
PARALLEL = ("none", "ddp", "fsdp2")
ASLEEP = ("weights of vLLM", "KV cache")
OFFLOADED = ("moments", "moments of the critic", "float32 masters")


@dataclass
class Plan:
    """One device under one ``parallel``. All sizes are bytes.

    Attributes:
        parts: what is held for long, by name; "gradients" within an update only.
        phases: most that is held at a time, by phase.
        room: tokens that the KV cache has room for; None: it is elsewhere.
        longest: tokens of prompt and answer.
        host: held by each process in the memory of the host instead (``optimizer.offload``).
    """

    parallel: str
    device: Device
    parts: dict[str, int]
    phases: dict[str, int]
    room: int | None
    longest: int
    host: int = 0

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def answers(self) -> int | None:
        """Of full length, that the KV cache has room for at a time."""
        return None if self.room is None else self.room // self.longest

    @property
    def trouble(self) -> str | None:
        """Why it cannot work, in half a sentence; None where it can."""
        phase = max(self.phases, key=lambda name: self.phases[name])
        if self.peak > self.device.memory:
            return f"{phase} takes {self.peak / 1e9:.1f} GB of {self.device.memory / 1e9:.1f}"
        if self.room is not None and self.room < self.longest:
            return f"the KV cache has room for {self.room} tokens, prompt and answer have {self.longest}"
        return None


@dataclass
class Memory:
    """The memory of a run on one kind of device; what passes take is worked out when it is first asked for."""

    config: Config
    device: Device
    prompt: int = PROMPT_TOKENS
    known: dict[Any, Any] = field(default_factory=dict)  # models and passes, by what decides about them

    def like(self, config: Config) -> "Memory":
        """The same with other settings."""
        return Memory(config, self.device, self.prompt, self.known)

    @cached_property
    def policy(self) -> PlannedPolicy:
        model = self.config.model
        key = model.model_copy(update={"gradient_checkpointing": False}).model_dump_json()
        if key not in self.known:
            self.known[key] = PlannedPolicy(model, self.device)
        return self.known[key]

    @property
    def longest(self) -> int:
        return self.prompt + self.config.rollout.max_completion_length

    @property
    def recompute(self) -> bool:
        """Whether activations are computed again; with ``auto`` not, until the plan says that they must be."""
        return self.config.model.gradient_checkpointing is True

    @property
    def activations(self) -> int:
        """Of a micro-batch in training."""
        rollout, optimizer, algorithm = self.config.rollout, self.config.optimizer, self.config.algorithm
        step = Step(
            rollout.prompts_per_step,
            rollout.num_generations,
            self.prompt,
            rollout.max_completion_length,
            optimizer.micro_batch_tokens,
            optimizer.share_prefixes,
            algorithm.entropy_coef != 0,
        )
        key = self.policy, step, self.recompute
        if key not in self.known:
            self.known[key] = training_bytes(self.policy, self.device, step, recompute=self.recompute)
        return self.known[key] * (2 if self._separate_critic else 1)  # it runs over the same tokens

    @property
    def generating(self) -> int:
        """Of a pass of generation, beside the cache."""
        rollout = self.config.rollout
        if rollout.vllm_server is not None:
            return 0
        answers = min(SEQUENCES, rollout.prompts_per_step * rollout.num_generations)
        prompts = max(min(rollout.prompts_per_step, BATCH_TOKENS // self.prompt), 1)
        sizes = [(prompts, min(self.prompt, BATCH_TOKENS), self.prompt), (answers, 1, self.longest)]
        gathered = self.device.kind != "cpu" and rollout.engine != "vllm"
        filtered = rollout.top_p < 1 or rollout.top_k > 0
        key = self.policy, tuple(sizes), gathered, filtered
        if key not in self.known:
            self.known[key] = generating_bytes(self.policy, self.device, sizes, gathered=gathered, filtered=filtered)
        return self.known[key]

    @property
    def _separate_critic(self) -> bool:
        return self.config.algorithm.judge.critic and self.config.critic.separate

    def plan(self, parallel: str) -> Plan:
        """Of each of the devices that share the run so; ``none`` uses one."""
        size = 1 if parallel == "none" else self.device.count
        parts = self._sharded(size) if parallel == "fsdp2" else self._whole()
        gradients, host = parts.pop("gradients"), 0
        if self._offload:
            host = sum(parts.pop(name, 0) for name in OFFLOADED)
        cache = self._cache_bytes(parts, size if parallel == "fsdp2" else 1)
        if cache:
            parts["KV cache"] = cache
        # vLLM's weights are gathered from the shards, and the copy goes
        copy = parts.pop("copy for generation") if parallel == "fsdp2" and self._vllm_inside else None
        everything = sum(parts.values())
        held = everything - sum(parts.get(name, 0) for name in ASLEEP if self._sleeps)
        phases = {
            "generation": everything + self.generating,
            "the update": held + gradients + self.activations,
            "the optimizer step": held + gradients + self._step_bytes(parallel, size),
        }
        if parallel == "fsdp2":
            gathered, ending = self._gathered(size)
            phases["the update"] = held + gradients + max(self.activations + gathered, ending)
            # shards, and the copy for generation, gathered from them weight by weight; the cache comes after, and with
            # vLLM its weights, before the copy goes
            vllm = 0 if copy is None else sum(parts.get(name, 0) for name in ASLEEP)
            copy = parts["copy for generation"] if copy is None else copy
            phases["loading"] = parts["float32 weights"] + copy + max(self._gathering(size), vllm)
        parts |= {"gradients": gradients, "activations": self.activations}
        room = cache // self.token_bytes if cache else None
        return Plan(parallel, self.device, parts, phases, room, self.longest, host)

    @property
    def _offload(self) -> bool:
        """Whether what is offloaded is in another memory."""
        return self.config.optimizer.offload and self.device.kind != "cpu"

    @property
    def _vllm_inside(self) -> bool:
        return self.config.rollout.engine == "vllm" and not self.config.rollout.servers

    @property
    def _sleeps(self) -> bool:
        """Whether vLLM within the trainer gives its memory up during updates."""
        return self._vllm_inside and self.config.rollout.vllm_enable_sleep_mode and self.device.kind != "cpu"

    @property
    def _params(self) -> list[torch.nn.Parameter]:
        return list(self.policy.model.parameters())

    @property
    def token_bytes(self) -> int:
        """Of keys and values, for a token."""
        traits = self.policy.traits
        return 2 * traits.layers * traits.kv_heads * traits.head_dim * self.policy.model.dtype.itemsize

    def _whole(self) -> dict[str, int]:
        """What a device holds between passes, with all weights on it; and gradients."""
        params = self._params
        trained = [p for p in params if p.requires_grad]
        parts = {"weights": _bytes(params)} | _trained(trained)
        if self.config.algorithm.beta and not self.policy.adapted:
            parts["reference"] = _bytes(params)
        if self._separate_critic:
            body = list(self.policy.whole.base_model.parameters())
            own = _trained(body)
            parts["gradients"] += own.pop("gradients")
            parts |= {"critic": _bytes(body), "moments of the critic": sum(own.values())}
        if self.policy.adapted:
            own_weights = (layer.base_layer.weight for _, layer in adapted_layers(self.policy.model))
            parts["copy for generation"] = sum(weight.nbytes for weight in own_weights)
        return parts | self._copies()

    def _sharded(self, size: int) -> dict[str, int]:
        """The same under fsdp2: shards in float32, and all weights for generation."""
        params = self._params
        whole, count = _bytes(list(self.policy.whole.parameters())), sum(p.numel() for p in params)
        trained = sum(p.numel() for p in params if p.requires_grad)
        parts = {"copy for generation": whole, "float32 weights": 4 * count // size}
        parts |= {"moments": 8 * trained // size, "gradients": 4 * trained // size}
        if self.config.algorithm.beta and not self.policy.adapted:
            parts["reference"] = _bytes(params) // size
        if self._separate_critic:
            body = sum(p.numel() for p in self.policy.whole.base_model.parameters())
            parts |= {"critic": 4 * body // size, "moments of the critic": 8 * body // size}
            parts["gradients"] += 4 * body // size
        return parts | self._copies()

    def _copies(self) -> dict[str, int]:
        """Of the weights, that engines keep."""
        return {"weights of vLLM": _bytes(list(self.policy.whole.parameters()))} if self._vllm_inside else {}

    def _cache_bytes(self, parts: dict[str, int], shards: int) -> int:
        """Of the KV cache, as the engines choose it; 0 where that is on a server."""
        rollout = self.config.rollout
        if rollout.vllm_server is not None:
            return 0
        if rollout.memory_bytes is not None:
            return rollout.memory_bytes
        wanted = SEQUENCES * (self.policy.max_length + rollout.block_size) * self.token_bytes
        if self.device.kind == "cpu":
            return min(wanted, CPU_MEMORY_BYTES)
        # what is there before the engine is: the weights, and their copy
        loaded = ("weights", "float32 weights", "copy for generation", "weights of vLLM")
        there = sum(parts.get(name, 0) for name in loaded)
        algorithm, critic = self.config.algorithm, self.config.critic
        to_come = bytes_to_come(self.policy, algorithm, critic, shards, offload=self._offload)
        if "float32 weights" in parts and not self._offload:  # masters have come
            to_come -= (
                sum(4 * p.numel() for p in self._params if p.requires_grad and p.dtype != torch.float32) // shards
            )
        return min(wanted, max(int((self.device.memory - there - to_come) * CUDA_MEMORY_SHARE), 0))

    def _step_bytes(self, parallel: str, size: int) -> int:
        """What the optimizer step takes in passing."""
        trained = [p for p in self._params if p.requires_grad]
        largest, count = max(p.numel() for p in trained), sum(p.numel() for p in trained)
        low = parallel != "fsdp2" and any(p.dtype != torch.float32 for p in trained)
        bucket = 4 * min(BUCKET_ELEMENTS + largest, count) if parallel == "ddp" else 0
        back = 0
        if self.config.optimizer.offload:  # moments, and masters where they are not the weights
            shards = size if parallel == "fsdp2" else 1
            back = min(max(OFFLOADED_ELEMENTS, largest // shards), count // shards) * (12 if low else 8)
        return max(back + (ROUNDED * largest if low else 0), bucket)

    def _gathering(self, size: int) -> int:
        """What it takes to gather the largest weight in the model's type: each rank's part, all parts, the whole."""
        largest = max(p.nbytes for p in self._params)
        return 2 * largest + largest // size

    def _gathered(self, size: int) -> tuple[int, int]:
        """What fsdp2 gathers: beside the activations of a pass, and at the end of it, when those are gone.

        Embeddings and output layer stay gathered throughout, of the layers one and the next; the gradients of a layer,
        and at the end those of embeddings and output, are added up in float32 before they are cut.
        """
        model, item = self.policy.model, self.policy.model.dtype.itemsize
        layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
        layer = max((sum(p.numel() for p in x.parameters()) for x in layers), default=0)
        inside = {p for x in layers for p in x.parameters()}
        root = sum(p.numel() for p in model.parameters() if p not in inside)
        adding = 4 + 4 / size
        during = root * item + 2 * layer * item + layer * adding
        ending = root * (2 * item + adding)
        return int(during), int(ending)


def _bytes(params: Any) -> int:
    return sum(p.nbytes for p in params)


def _trained(params: list[torch.nn.Parameter]) -> dict[str, int]:
    """Masters, moments and gradients of parameters that are whole."""
    low = sum(p.numel() for p in params if p.dtype != torch.float32)
    count = sum(p.numel() for p in params)
    masters = {"float32 masters": 4 * low} if low else {}
    return masters | {"moments": 8 * count, "gradients": 4 * count}
