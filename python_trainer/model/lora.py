"""Low-rank adapters by PEFT: the model stays as it is, and what trains is a product of two thin matrices per layer."""

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from python_trainer.errors import UserError, first_line
from python_trainer.model.settings import LoraSettings
from python_trainer.model.weights import full
from rlkernels.sampling.keys import keyed_seed

ADAPTER = "default"
ALL_LINEAR = "all-linear"


class AdaptedWeight(NamedTuple):
    """A weight [out, in] with an adapter: ``base`` + ``scale`` x ``up`` [out, r] ``down`` [r, in]."""

    base: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    scale: float


def add_adapters(model: Any, settings: LoraSettings) -> Any:
    """Freeze the model and add adapters, which change nothing yet; return the plain model as a copy.

    The copy has weights of its own where there are adapters; the others are shared.
    """
    plain = copy.deepcopy(model, {id(p): p for p in model.parameters()})  # modules of its own around the same weights
    inject_adapters(model, settings)
    for name, layer in adapted_layers(model):
        weight = layer.base_layer.weight.detach().clone()
        plain.get_submodule(name).weight = torch.nn.Parameter(weight, requires_grad=False)
    return plain


def inject_adapters(model: Any, settings: LoraSettings) -> None:
    """Freeze the model and add adapters, which change nothing yet; they begin the same in every process.

    Raises:
        UserError: PEFT is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"model.lora needs PEFT ({error}): pip install peft") from error
    target = model
    modules = settings.target_modules
    if modules == ALL_LINEAR:
        # wrap the model: by the model type in a config, PEFT would add fused experts and their router
        target = torch.nn.ModuleDict({"model": model})
        output = model.get_output_embeddings()
        plain = torch.nn.Linear.forward  # the router of Phimoe has another
        modules = [
            name for name, module in target.named_modules() if type(module).forward is plain and module is not output
        ]
    lora = LoraConfig(r=settings.r, lora_alpha=settings.alpha, target_modules=modules)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(keyed_seed("lora"))
        try:
            inject_adapter_in_model(lora, target, ADAPTER)
        except (ValueError, NotImplementedError, re.error) as error:
            raise UserError(
                f"model.lora.target_modules: {settings.target_modules!r} fits no layers: {error}"
            ) from error
    for name, layer in adapted_layers(model):
        if not isinstance(layer.base_layer, torch.nn.Linear):
            raise UserError(f"model.lora.target_modules must name linear layers, {name} is none")
    if hasattr(model.get_output_embeddings(), "lora_A"):
        raise UserError(f"model.lora.target_modules must not name the output layer, got {settings.target_modules!r}")


def merge_adapter(model: Any, folder: Path) -> Any:
    """Return the model with an adapter of PEFT added to its weights.

    Raises:
        UserError: PEFT is not installed, or the adapter does not fit.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UserError(f"model.path: an adapter needs PEFT ({error}): pip install peft") from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys")
            adapted = PeftModel.from_pretrained(model, folder, local_files_only=True)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if hasattr(layer, "lora_A"):  # a weight tied to another would change in both places, or twice
                layer.base_layer.weight = torch.nn.Parameter(layer.base_layer.weight.detach().clone())
        return adapted.merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UserWarning) as error:
        raise UserError(f"model.path: the adapter {folder} does not fit its model: {first_line(error)}") from error


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Return name and layer for each layer with an adapter."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def adapted_weight(layer: Any) -> AdaptedWeight:
    """Return the parts of a layer with an adapter; if it is sharded, all ranks call together."""
    modules = (layer.base_layer, layer.lora_A[ADAPTER], layer.lora_B[ADAPTER])
    base, down, up = (full(module.weight) for module in modules)
    return AdaptedWeight(base, down, up, layer.scaling[ADAPTER])


def plain_name(parameter: str) -> str:
    """Translate the name of a weight in a model with adapters to its name in the plain model."""
    return parameter.replace(".base_layer.", ".")


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter of this name is part of an adapter."""
    return ".lora_" in parameter


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Switch all adapters off."""
    layers: Sequence[Any] = [layer for _, layer in adapted_layers(model)]
    scales = [layer.scaling[ADAPTER] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[ADAPTER] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales):
            layer.scaling[ADAPTER] = scale


def adapter_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gather the weights of all adapters, by the names that PEFT gives them; all ranks call it together."""
    return {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": full(value.detach()).contiguous()
        for name, value in model.state_dict().items()
        if is_adapter(name)
    }


def save_adapter(
    weights: dict[str, torch.Tensor],
    policy_model: torch.nn.Module,
    plain: torch.nn.Module,
    settings: LoraSettings,
    folder: Path,
    *,
    base: tuple[str, str | None],
) -> None:
    """Write adapters as PEFT and vLLM read them.

    Args:
        weights: by :func:`adapter_weights`.
        policy_model: the model that has them.
        plain: the model with the adapters merged in.
        base: path and revision that name the model they are for.
    """
    from peft import LoraConfig

    names = [name for name, _ in adapted_layers(policy_model)]
    ends = {name.rpartition(".")[2] for name in names}
    linear = [name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)]
    alone = all(name in names for name in linear if name.rpartition(".")[2] in ends)
    options: dict[str, Any] = {
        "r": settings.r,
        "lora_alpha": settings.alpha,
        "target_modules": sorted(ends) if alone else names,
        "base_model_name_or_path": base[0],
        "revision": base[1],
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }
    LoraConfig(**options).save_pretrained(str(folder))
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
