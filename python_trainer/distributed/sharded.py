"""Several ranks, each with a shard of all weights, gradients and moments: ``parallel: fsdp2``."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from python_trainer.checkpoint import aside_for, save_checkpoint
from python_trainer.distributed.replicated import Replicated
from python_trainer.distributed.shard_files import write_shards
from python_trainer.model.policy import Policy


class Sharded(Replicated):
    """Weights are float32 shards, gathered layer by layer in the model's own type for each pass over them.

    Generation has all weights, on every rank: ``policy.whole`` is a copy in the model's type.
    """

    name = "fsdp2"
    lockstep = True

    def __init__(self) -> None:
        super().__init__()
        self.mesh: DeviceMesh | None = None

    def prepare(self, policy: Policy) -> None:
        policy.whole = copy.deepcopy(policy.whole).requires_grad_(False)

    def shard(self, module: torch.nn.Module) -> None:
        param = next(module.parameters())
        if self.mesh is None:
            self.mesh = init_device_mesh(param.device.type, (self.size,))
        if any(p.requires_grad for p in module.parameters()):
            precision = MixedPrecisionPolicy(
                param_dtype=None if param.dtype == torch.float32 else param.dtype, reduce_dtype=torch.float32
            )
            module.float()  # the master weights
        else:
            precision = MixedPrecisionPolicy()
        layers = [x for x in module.modules() if isinstance(x, GradientCheckpointingLayer)]
        for part in (*layers, module):
            if not isinstance(part, FSDPModule):
                fully_shard(part, mesh=self.mesh, mp_policy=precision)
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)  # the loss of a micro-batch is its share: gradients add up
                    part.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self, module: torch.nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """The backward pass has; a pass without one may have left weights gathered, which are old after an update."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def save(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, Any],
        learned: Mapping[str, Any],
        *,
        keep: int,
        spare: int | None = None,
    ) -> None:
        """Every rank writes its shards; the first writes the rest and publishes all of it."""

        def write(aside: Path) -> None:
            dist.barrier()  # the folder is there
            write_shards(aside, learned)

        if self.rank == 0:
            save_checkpoint(folder, step, state, keep=keep, spare=spare, add=write)
        else:
            write(aside_for(folder, step))
