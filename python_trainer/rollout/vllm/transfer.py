"""Weights to a server by vLLM's own weight transfer: from device to device, not through files.

Needs vLLM in the trainer's environment too. The connection is vLLM's; this is what its interface asks of a trainer.
"""

import importlib
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.rollout.vllm.in_process import checkpoint_weights, import_vllm
from python_trainer.rollout.vllm.server import START, Server

HOME = "vllm.distributed.weight_transfer"


def nccl_info(server: Server) -> Any:
    """For a group of NCCL: this process, which is its first, and the server's workers."""
    info = importlib.import_module(f"{HOME}.nccl_engine").NCCLTrainerInitInfo
    address = address_towards(server.url)
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    return info(master_address=address, master_port=port, world_size=1 + server.workers, rank=0)


# Backend, as in vLLM's factory -> what it needs to connect to a server.
BACKENDS: dict[str, Callable[[Server], Any]] = {"nccl": nccl_info}


class Transfer:
    """To one server, which was started with the same backend; the connection is made with the first weights.

    Args:
        device: of the weights.

    Raises:
        UserError: the server has another backend or none, or vLLM or a GPU is not here.
    """

    def __init__(self, server: Server, backend: str, device: torch.device):
        if backend == "nccl" and device.type != "cuda":
            raise UserError(f"rollout.vllm_transfer must be files for a policy that is not on a GPU, got {backend}")
        import_vllm(f"rollout.vllm_transfer {backend}", ", beside that of the server")
        if server.transfer != backend:
            raise UserError(
                f"the vLLM server {server.url} takes weights by {server.transfer}, rollout.vllm_transfer is {backend}; "
                f'start it with: {START} --weight-transfer-config \'{{"backend": "{backend}"}}\''
            )
        self.server, self.backend = server, backend
        self._engine: Any = None
        self._model: PreTrainedModel | None = None  # whose weights are sent

    def send(self, model: PreTrainedModel) -> int:
        """Sends all weights -> bytes.

        Raises:
            UserError: as of :class:`Server`.
        """
        if self._model is not model:
            factory: Any = importlib.import_module(f"{HOME}.factory").WeightTransferTrainerFactory
            info = BACKENDS[self.backend](self.server)
            self._engine = factory.trainer_init(info, client=self.server, source=weight_source(model))
            self._model = model
        self._engine.send_weights()
        self.server.settle()
        return sum(weight.nbytes for _, weight in checkpoint_weights(model))


def weight_source(model: PreTrainedModel) -> Any:
    """vLLM's ``WeightSource`` of a model: its weights as a checkpoint has them."""
    base: Any = importlib.import_module(f"{HOME}.base")

    class CheckpointSource(base.WeightSource):  # type: ignore[misc, name-defined]
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return checkpoint_weights(model)

    return CheckpointSource()


def address_towards(url: str) -> str:
    """The address of this machine by which the one of a server reaches it; nothing is sent."""
    parts = urlsplit(url)
    family, _, _, _, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as towards:
        towards.connect(place)
        return str(towards.getsockname()[0])
