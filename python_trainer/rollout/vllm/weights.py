"""How the adapters of a policy reach vLLM's servers, through files."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from python_trainer.model.lora import AdaptedWeight, adapted_layers
from python_trainer.model.policy import Policy
from python_trainer.run_directory import usual_mode

BASE, ADAPTER = "base", "adapter.safetensors"


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
