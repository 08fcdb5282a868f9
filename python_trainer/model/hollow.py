"""Models without weights: the modules and buffers of a model, its parameters of no size or on ``meta``."""

import copy
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from python_trainer.model.reading import place_of, read_settings, reading
from python_trainer.model.settings import ModelConfig

META = torch.device("meta")


def hollow_model(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The model of a folder or GGUF file as ``from_pretrained`` makes it, but for the numbers in its weights.

    Every parameter repeats one number, so that none takes memory. Buffers that no file holds, such as the frequencies
    of rotary embeddings, are as they should be; those that a file does hold are not.

    Raises:
        UserError: it does not say what model it is.
    """
    place = place_of(folder)
    with reading(folder):
        settings = read_settings(folder, config)
        shapes = model_on_meta(settings, config, dtype)
        weights = {name: _repeated(tensor) for name, tensor in weights_of(shapes)}
        model = type(shapes).from_pretrained(None, config=settings, state_dict=weights, dtype=dtype)
        model.config.name_or_path = str(place["pretrained_model_name_or_path"])
        if place["gguf_file"] is None and (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def model_on_meta(settings: Any, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The model that a configuration of Transformers describes, all of it on ``meta``."""
    with META:
        return AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=config.trust_remote_code)


def weights_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of what a file of weights holds: parameters, shared ones once, and buffers that are saved."""
    yield from module.named_parameters()
    saved: Collection[str] = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in saved)


def _repeated(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def emptied(module: Any, device: torch.device) -> Any:
    """A copy whose parameters are of unknown contents on a device, or on ``meta``; what is tied stays tied.

    Buffers are copied to the device, but not to ``meta``.
    """
    there: dict[int, torch.Tensor] = {
        id(p): torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), p.requires_grad)
        for p in module.parameters()
    }
    if device.type != "meta":
        there |= {id(buffer): buffer.to(device, copy=True) for buffer in module.buffers()}
    return copy.deepcopy(module, there)


@torch.no_grad()
def allocate(module: torch.nn.Module, device: torch.device) -> None:
    """Gives the shards of a module that was cut on ``meta`` memory of unknown contents; buffers stay."""
    buffers = [buffer.clone() for buffer in module.buffers()]
    module.to_empty(device=device)
    for buffer, value in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(value)
