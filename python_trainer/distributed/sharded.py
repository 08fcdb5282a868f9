"""Several ranks, each with a shard of all weights, gradients and moments: ``parallel: fsdp2``."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from python_trainer.distributed.group import RankGroup
from python_trainer.errors import UserError
from python_trainer.model.loading import (
    choose_device,
    find_dtype,
    model_without_weights,
    policy_folder,
    read_model,
    read_tokenizer,
)
from python_trainer.model.lora import inject_adapters, is_adapter, plain_name
from python_trainer.model.policy import Policy, recompute_activations
from python_trainer.model.settings import ModelConfig
from python_trainer.model.weights import META, copy_weights, empty_copy, named_weights


class ShardedGroup(RankGroup):
    """Ranks whose weights are float32 shards, gathered layer by layer in the model's own type for each pass.

    Generation has all weights, on every rank: ``policy.inference_model`` is a copy in the model's type.
    """

    sharded = True
    mesh: DeviceMesh  # of all ranks, from load() on

    def __init__(self) -> None:
        super().__init__("fsdp2")
        self.offload = False  # shards that train, their gradients and moments are in the memory of the host

    def load(self, config: ModelConfig, *, offload: bool = False) -> Policy:
        """Rank 0 reads the model into the memory of its host and sends each weight to the others.

        Every rank has all weights for generation, in the model's type, and cuts its shards from those.
        """
        self.offload = offload
        with self.fail_together():
            device = choose_device(config.device)
            folder = policy_folder(config.path)
            dtype = find_dtype(config, device)
            tokenizer = read_tokenizer(folder, config)
            model = model_without_weights(config, dtype)
            read = dict(named_weights(read_model(folder, config, dtype)[0])) if self.rank == 0 else {}
            names = {name for name, _ in named_weights(model)}
            if self.rank == 0 and (differing := sorted(read.keys() ^ names)):
                raise UserError(
                    f"model.path: {folder} cannot be loaded with parallel: fsdp2, its weights and its config.json do "
                    f"not agree on {differing[0]}; if that is tied to another, tie_word_embeddings must be as in the "
                    "files"
                )
            full_model = empty_copy(model, device).requires_grad_(False)
            copy_weights(full_model, read.items())
            read.clear()
            shapes = {name: [str(weight.dtype), *weight.shape] for name, weight in named_weights(full_model)}
        self.check_equal({}, {"the shapes of the weights": shapes})  # else what rank 0 sends fits no other
        for _, weight in named_weights(full_model):
            dist.broadcast(weight, 0)
        self.mesh = init_device_mesh(device.type, (self.size,))
        with self.fail_together():
            if config.lora is not None:
                inject_adapters(model, config.lora)
            adapters = {name: p for name, p in model.named_parameters() if is_adapter(name)}
            sharded = self._sharded_copy(model, device)
            weights = dict(named_weights(full_model))
            copied = {name: weights[plain_name(name)] for name, _ in named_weights(sharded) if name not in adapters}
            copy_weights(sharded, [*copied.items(), *adapters.items()])
            policy = Policy(full_model, tokenizer, name=str(folder))
        policy.model = sharded.eval()
        policy.adapted = config.lora is not None
        if config.gradient_checkpointing is True:
            recompute_activations(sharded)
        return policy

    def copy(self, module: Any, *, trains: bool) -> Any:
        copied = self._sharded_copy(module, next(module.parameters()).device, trains=trains)
        copy_weights(copied, named_weights(module))
        return copied

    def _sharded_copy(self, module: Any, device: torch.device, *, trains: bool | None = None) -> Any:
        """Copy a module, cut while it takes no memory, with uninitialised shards."""
        copied = empty_copy(module, META)
        if trains is not None:
            copied.requires_grad_(trains)
        self.shard(copied)
        on_host = self.offload and any(p.requires_grad for p in copied.parameters())
        buffers = [(part, dict(part._buffers)) for part in copied.modules()]  # sharding has moved them to the device
        copied.to_empty(device="cpu" if on_host else device)
        for part, values in buffers:
            part._buffers.update(values)
        return copied

    def shard(self, module: torch.nn.Module) -> None:
        dtype = next(module.parameters()).dtype
        options: dict[str, Any] = {"mesh": self.mesh}
        if any(p.requires_grad for p in module.parameters()):
            # embeddings and output layer stay gathered until the backward pass
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
            )
            pin = self.mesh.device_type == "cuda"
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=pin) if self.offload else OffloadPolicy()
            module.float()  # the master weights
        else:
            options["reshard_after_forward"] = True  # there is no backward pass
        layers = [x for x in module.modules() if isinstance(x, GradientCheckpointingLayer)]
        for part in (*layers, module):
            if not isinstance(part, FSDPModule):
                fully_shard(part, **options)
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)  # the loss of a micro-batch is its share: gradients add up
                    part.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """Free weights that a pass without a backward pass left gathered; backward passes have added up gradients."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
