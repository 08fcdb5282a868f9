"""How a policy's weights reach vLLM's servers: adapters alone through files, or all by vLLM's own weight transfer."""

import importlib
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.model.lora import AdaptedWeight, adapted_layers
from python_trainer.model.policy import Policy
from python_trainer.rollout.vllm.in_process import checkpoint_weights, import_vllm
from python_trainer.rollout.vllm.server import START, Server
from python_trainer.run_directory import usual_mode

BASE, ADAPTER = "base", "adapter.safetensors"
TRANSFER = "vllm.distributed.weight_transfer"  # vLLM's package


class AdapterFiles:
    """The files of a policy with adapters, which a server's ``PolicyWorker`` merges.

    The weights without adapters are written once, and stay: servers read them again each time, from
    the memory where their machine keeps files that were read, and hold no copy of their own.

    Args:
        names: of the weights with adapters, in the model -> in a checkpoint, by :func:`names_in_checkpoint`.
        folder: made when it is needed.
    """

    def __init__(self, names: Mapping[str, str], folder: Path):
        self.names, self.folder = names, folder
        self.written = False  # the weights are there
        self._base: dict[str, torch.Tensor] = {}  # until then, once the policy's are merged
        self._parts: dict[str, torch.Tensor] = {}

    def remember(self, name: str, weight: AdaptedWeight) -> None:
        """Keeps a weight that has just been merged: ``Policy.on_merge``."""
        if not self.written and name not in self._base:  # of a resumed run the first merge is no longer the base
            self._base[name] = weight.base.detach().to("cpu", copy=True)
        scale = torch.tensor(weight.scale, dtype=torch.float64)
        for part, value in (("down", weight.down), ("up", weight.up), ("scale", scale)):
            self._parts[f"{self.names[name]}.{part}"] = value.detach().to("cpu", copy=True).contiguous()

    def write(self, model: PreTrainedModel) -> int:
        """Writes what servers do not have yet -> bytes.

        Args:
            model: the plain one, with adapters merged into it where there have been any.

        Raises:
            OSError, SafetensorError: it cannot be written.
        """
        count = 0
        if not self.written:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
            state = model.state_dict()
            state |= {name: base.to(state[name].dtype) for name, base in self._base.items()}
            model.save_pretrained(self.folder / BASE, state_dict=state)
            self.written, self._base = True, {}
            count = sum(path.stat().st_size for path in (self.folder / BASE).glob("*.safetensors"))
        if self._parts:
            save_file(self._parts, self.folder / ADAPTER)
            count += (self.folder / ADAPTER).stat().st_size
        usual_mode(self.folder)
        return count

    @property
    def places(self) -> list[str]:
        """What ``PolicyWorker.load_policy`` takes."""
        return [str(self.folder / BASE), *([str(self.folder / ADAPTER)] if self._parts else [])]


def adapter_files(policy: Policy, folder: Path, note: Callable[[str], object]) -> AdapterFiles | None:
    """For servers that merge a policy's adapters themselves; None where they are sent all its weights each time."""
    if not policy.adapted:
        return None
    adapted = [f"{name}.weight" for name, _ in adapted_layers(policy.model)]
    names = names_in_checkpoint(policy.inference_model, adapted)
    if names is None:
        note("rollout.vllm_server gets all weights after each update: not all adapted ones are in a checkpoint as such")
        return None
    files = AdapterFiles(names, folder.absolute())
    policy.on_merge = files.remember
    return files


def names_in_checkpoint(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str] | None:
    """The names of weights of the model in a checkpoint; None where one is not there as the model has it."""
    from transformers.core_model_loading import revert_weight_conversion

    state, found = model.state_dict(), {}
    for name in names:
        reverted = dict(revert_weight_conversion(model, {name: state[name]}))
        ((there, weight), *more) = reverted.items()
        if more or not isinstance(weight, torch.Tensor) or weight.shape != state[name].shape:
            return None
        found[name] = there
    return found


def nccl_info(server: Server) -> Any:
    """A group of NCCL: this process, which is its first, and the server's workers."""
    info = importlib.import_module(f"{TRANSFER}.nccl_engine").NCCLTrainerInitInfo
    address = address_towards(server.url)
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    return info(master_address=address, master_port=port, world_size=1 + server.workers, rank=0)


# Backend, as in vLLM's factory -> what it needs to connect to a server.
BACKENDS: dict[str, Callable[[Server], Any]] = {"nccl": nccl_info}


class Transfer:
    """vLLM's weight transfer to one server, which was started with the same backend: from device to device.

    The connection is vLLM's, and is made with the first weights.

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
            factory: Any = importlib.import_module(f"{TRANSFER}.factory").WeightTransferTrainerFactory
            info = BACKENDS[self.backend](self.server)
            self._engine = factory.trainer_init(info, client=self.server, source=weight_source(model))
            self._model = model
        self._engine.send_weights()
        self.server.settle()
        return sum(weight.nbytes for _, weight in checkpoint_weights(model))


def weight_source(model: PreTrainedModel) -> Any:
    """vLLM's ``WeightSource`` of a model: its weights as a checkpoint has them."""
    base: Any = importlib.import_module(f"{TRANSFER}.base")

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
