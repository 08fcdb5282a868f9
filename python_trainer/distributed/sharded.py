"""Several ranks, each with a shard of all weights, gradients and moments: ``parallel: fsdp2``."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from python_trainer.checkpoint import aside_for, begin_checkpoint, finish_checkpoint, removing_unfinished
from python_trainer.distributed.group import RankGroup
from python_trainer.distributed.shard_files import read_weight_files, unreadable_in_parts, write_shards
from python_trainer.errors import UserError
from python_trainer.model.loading import (
    base_folder,
    check_finite,
    check_vocabulary,
    choose_device,
    find_dtype,
    model_without_weights,
    policy_folder,
    read_model,
    read_tokenizer,
)
from python_trainer.model.lora import inject_adapters, is_adapter, plain_name
from python_trainer.model.policy import Policy, gather_weights, recompute_activations
from python_trainer.model.settings import ModelConfig
from python_trainer.model.weights import META, allocate, copy_weights, empty_copy, like, local, named_weights


class ShardedGroup(RankGroup):
    """Ranks whose weights are float32 shards, gathered layer by layer in the model's own type for each pass.

    Generation has all weights, on every rank: ``policy.inference_model`` is a copy in the model's type.
    """

    lockstep = sharded = True

    def __init__(self) -> None:
        super().__init__("fsdp2")
        self.mesh: DeviceMesh | None = None
        self.offload = False  # shards that train, their gradients and moments are in the memory of the host

    def load(self, config: ModelConfig, note: Callable[[str], None], *, offload: bool = False) -> Policy:
        """Each rank reads its rows of the weights; the copy for generation is then gathered from the shards.

        What cannot be read in parts is read by rank 0, in the memory of its host, and sent to the others.
        """
        self.offload = offload
        config = self.in_one_dtype(config)
        with self.together():
            device, folder = choose_device(config.device), policy_folder(config.path)
            dtype, base = find_dtype(config), base_folder(folder)
            tokenizer, model = read_tokenizer(base, config), model_without_weights(base, config, dtype)
            check_vocabulary(folder, model, tokenizer)
            mine = unreadable_in_parts(folder, model)
        self._device_mesh(device)
        if (reason := self.first(mine)) is not None:
            note(f"{folder} is read by the first process and sent to the others: {reason}")
            with self.together():
                values = _read_whole(folder, config, dtype, model) if self.rank == 0 else None
        with self.together():
            dtypes = {name: tensor.dtype for name, tensor in named_weights(model)}
            inference_model = empty_copy(model, META)
            if config.lora is not None:
                inject_adapters(model, config.lora)
            adapters = {name: p for name, p in model.named_parameters() if is_adapter(name)}
            model = self._sharded_copy(model, device)
            copy_weights(model, adapters.items())
        broken: list[str] = []
        if reason is not None:
            _receive(model, values, dtypes)
        else:
            with self.together():
                broken = read_weight_files(model, folder, dtypes)
        everywhere = {name for names in self.gather(broken) for name in names}
        with self.together():
            check_finite(folder, sorted(everywhere))
            inference_model = empty_copy(inference_model, device).requires_grad_(False)
        copy_weights(inference_model, gather_weights(model, dtypes))
        with self.together():
            policy = Policy(inference_model, tokenizer, name=str(folder))
        policy.model, policy.adapted = model.eval(), config.lora is not None
        if config.gradient_checkpointing is True:
            recompute_activations(model)
        return policy

    def _device_mesh(self, device: torch.device) -> DeviceMesh:
        """The mesh of all ranks, who must ask for it together when they do so first."""
        if self.mesh is None:
            self.mesh = init_device_mesh(device.type, (self.size,))
        return self.mesh

    def copy(self, module: Any, *, trains: bool) -> Any:
        copied = self._sharded_copy(module, next(module.parameters()).device, trains=trains)
        copy_weights(copied, named_weights(module))
        return copied

    def _sharded_copy(self, module: Any, device: torch.device, *, trains: bool | None = None) -> Any:
        """A copy of a module, cut while it takes no memory, with uninitialised shards."""
        copied = empty_copy(module, META)
        if trains is not None:
            copied.requires_grad_(trains)
        self._cut(copied, device)
        on_host = self.offload and any(p.requires_grad for p in copied.parameters())
        allocate(copied, device, shards_on=torch.device("cpu") if on_host else None)
        return copied

    def shard(self, module: torch.nn.Module) -> None:
        self._cut(module, next(module.parameters()).device)

    def _cut(self, module: torch.nn.Module, device: torch.device) -> None:
        dtype = next(module.parameters()).dtype
        options: dict[str, Any] = {"mesh": self._device_mesh(device)}
        if any(p.requires_grad for p in module.parameters()):
            # embeddings and output layer stay gathered until the backward pass
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
            )
            pin = device.type == "cuda"
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
        """The backward pass has; a pass without one may have left weights gathered, which are old after an update."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def save(self, folder: Path, step: int, state: Mapping[str, Any], learned: Mapping[str, Any], **kept: Any) -> None:
        """Each rank writes its part of ``learned``, between what rank 0 does alone."""
        with self.together():
            if self.rank == 0:
                begin_checkpoint(folder, step, state)
        with removing_unfinished(folder, step):
            write_shards(aside_for(folder, step), learned)
        with self.together():
            if self.rank == 0:
                finish_checkpoint(folder, step, **kept)


def _read_whole(folder: Path, config: ModelConfig, dtype: torch.dtype, model: Any) -> dict[str, torch.Tensor]:
    """All weights by name, in the memory of the host.

    Args:
        model: what config.json describes.

    Raises:
        UserError: they cannot be read, or the files hold another model.
    """
    read = dict(named_weights(read_model(folder, config, dtype)[0]))
    if others := sorted(read.keys() ^ {name for name, _ in named_weights(model)}):
        raise UserError(
            f"model.path: {folder} cannot be loaded with parallel: fsdp2, its weights and its config.json do not agree "
            f"on {others[0]}; if that is tied to another, tie_word_embeddings must be as in the files"
        )
    return read


@torch.no_grad()
def _receive(module: torch.nn.Module, values: Mapping[str, Any] | None, dtypes: Mapping[str, torch.dtype]) -> None:
    """Rank 0 has a whole model and sends it weight by weight; each rank keeps its rows.

    Args:
        module: allocated; adapters in it stay as they are.
        values: by name; None in all but rank 0.
        dtypes: of the model's weights.
    """
    for name, target in named_weights(module):
        if is_adapter(name):
            continue
        plain, device = plain_name(name), local(target).device
        if values is not None:
            value = values[plain].detach().to(device).contiguous()
        else:
            value = torch.empty(target.shape, dtype=dtypes[plain], device=device)
        dist.broadcast(value, 0)
        target.copy_(like(value, target))
