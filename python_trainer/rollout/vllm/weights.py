"""How the adapters of a policy reach vLLM's servers, through files."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.model.lora import AdaptedWeight
from python_trainer.model.weights import checkpoint_weights
from python_trainer.run_directory import usual_mode

BASE, ADAPTER = "base", "adapter.safetensors"


class AdapterFiles:
    """The files of a policy with adapters, which a server's ``PolicyWorker`` merges.

    The weights without adapters are written once, and stay: servers read them again each time, from
    the memory where their machine keeps files that were read, and hold no copy of their own.

    Args:
        model: the plain one.
        names: of its weights that have an adapter.
        folder: made when it is needed.

    Raises:
        UserError: a checkpoint has a weight with an adapter in another form than the model.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str], folder: Path):
        self.folder = folder.absolute()
        self.names: dict[str, str] = {}  # in the model -> in a checkpoint
        for name in names:
            weight = model.get_parameter(name)
            ((there, found), *more) = checkpoint_weights(model, [(name, weight)])
            if more or found.shape != weight.shape:
                raise UserError(
                    f"rollout.vllm_server: {name} has an adapter, but is divided in the model's files; leave it out of "
                    "model.lora.target_modules"
                )
            self.names[name] = there
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
        """Returns the arguments of ``PolicyWorker.load_policy``."""
        return [str(self.folder / BASE), *([str(self.folder / ADAPTER)] if self._parts else [])]
