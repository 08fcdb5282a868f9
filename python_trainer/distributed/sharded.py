"""Several ranks, each with a shard of all weights, gradients and moments: ``parallel: fsdp2``."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from python_trainer.checkpoint import aside_for, begin_checkpoint, finish_checkpoint, removing_unfinished
from python_trainer.distributed.replicated import Replicated
from python_trainer.distributed.shard_files import write_shards
from python_trainer.distributed.shard_loading import (
    find_files,
    gather,
    read_parts,
    receive,
    take_rows,
    whole_weights,
)
from python_trainer.model.hollow import META, allocate, emptied, hollow_model, weights_of
from python_trainer.model.lora import inject_adapters, is_adapter
from python_trainer.model.policy import Policy, choose_device, find_dtype, recompute_activations
from python_trainer.model.reading import base_folder, check_finite, check_vocabulary, read_tokenizer
from python_trainer.model.settings import ModelConfig
from python_trainer.model.shipped import policy_folder


class Sharded(Replicated):
    """Weights are float32 shards, gathered layer by layer in the model's own type for each pass over them.

    Generation has all weights, on every rank: ``policy.whole`` is a copy in the model's type.
    """

    name = "fsdp2"
    lockstep = sharded = True

    def __init__(self) -> None:
        super().__init__()
        self.mesh: DeviceMesh | None = None

    def load(self, config: ModelConfig, note: Callable[[str], None]) -> Policy:
        """Each rank reads its rows of the weights; the copy for generation is then gathered from the shards.

        What cannot be read in parts is read by the first rank, in the memory of its host, and sent to the others.
        """
        config = self.in_one_dtype(config)
        with self.together():
            device, folder = choose_device(config.device), policy_folder(config.path, config.revision)
            dtype, plain = find_dtype(config), base_folder(folder)
            tokenizer, hollow = read_tokenizer(plain, config), hollow_model(plain, config, dtype)
            check_vocabulary(folder, hollow, tokenizer)
            found = find_files(folder, hollow)
        self._meet(device)
        if (reason := self.first(found.reason)) is not None:
            note(f"{folder} is read by the first process and sent to the others: {reason}")
            with self.together():
                values = whole_weights(folder, config, dtype, hollow) if self.rank == 0 else None
        with self.together():
            dtypes, plain_model = {name: tensor.dtype for name, tensor in weights_of(hollow)}, emptied(hollow, META)
            if config.lora is not None:
                inject_adapters(hollow, config.lora)
            model = self._in_shards(hollow, device)
            take_rows(model, {name: p for name, p in hollow.named_parameters() if is_adapter(name)})
        broken: list[str] = []
        if reason is not None:
            receive(model, values, dtypes)
        else:
            with self.together():
                broken = read_parts(model, found, dtypes)
        everywhere = {name for names in self.gather(broken) for name in names}
        with self.together():
            check_finite(folder, sorted(everywhere))
            whole = emptied(plain_model, device).requires_grad_(False)
        gather(whole, model)
        with self.together():
            policy = Policy(whole, tokenizer, name=str(folder))
        policy.model, policy.adapted = model.eval(), config.lora is not None
        if config.gradient_checkpointing is True:
            recompute_activations(model)
        return policy

    def _meet(self, device: torch.device) -> DeviceMesh:
        """The mesh of all ranks, who must ask for it together when they do so first."""
        if self.mesh is None:
            self.mesh = init_device_mesh(device.type, (self.size,))
        return self.mesh

    def copy(self, module: Any, *, trains: bool) -> Any:
        copied = self._in_shards(module, next(module.parameters()).device, trains=trains)
        take_rows(copied, dict(weights_of(module)))
        return copied

    def _in_shards(self, module: Any, device: torch.device, *, trains: bool | None = None) -> Any:
        """A copy of a module, cut while it takes no memory, with shards of unknown contents."""
        copied = emptied(module, META)
        if trains is not None:
            copied.requires_grad_(trains)
        self._cut(copied, device)
        allocate(copied, device)
        return copied

    def shard(self, module: torch.nn.Module) -> None:
        self._cut(module, next(module.parameters()).device)

    def _cut(self, module: torch.nn.Module, device: torch.device) -> None:
        dtype = next(module.parameters()).dtype
        mesh, reshard = self._meet(device), None  # embeddings and output layer stay gathered until the backward pass
        if any(p.requires_grad for p in module.parameters()):
            precision = MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
            )
            module.float()  # the master weights
        else:
            precision, reshard = MixedPrecisionPolicy(), True  # there is none
        layers = [x for x in module.modules() if isinstance(x, GradientCheckpointingLayer)]
        for part in (*layers, module):
            if not isinstance(part, FSDPModule):
                fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)  # the loss of a micro-batch is its share: gradients add up
                    part.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """The backward pass has; a pass without one may have left weights gathered, which are old after an update."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def save(self, folder: Path, step: int, state: Mapping[str, Any], learned: Mapping[str, Any], **kept: Any) -> None:
        """Each rank writes its part of ``learned``, between what the first one does alone."""
        with self.together():
            if self.rank == 0:
                begin_checkpoint(folder, step, state)
        with removing_unfinished(folder, step):
            write_shards(aside_for(folder, step), learned)
        with self.together():
            if self.rank == 0:
                finish_checkpoint(folder, step, **kept)
