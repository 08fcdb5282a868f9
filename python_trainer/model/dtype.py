"""The type of weights that suits a device, a processor and the size of a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from python_trainer.model.fused import MAX_BYTES
from python_trainer.model.hollow import model_on_meta
from python_trainer.model.reading import base_folder, read_settings, reading
from python_trainer.model.settings import ModelConfig

NAMED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16")  # of a processor, as torch names them; the last one of Arm


def choose_dtype(name: str, device: torch.device, weights: Callable[[], int]) -> torch.dtype:
    """The type that the setting ``model.dtype`` stands for on a device.

    Args:
        weights: counts those of the model, where it depends on them.
    """
    if name != "auto":
        return NAMED[name]
    if device.type == "cuda":
        return torch.bfloat16
    # in small models calls count as much as products; what matters in large ones is the rate of products
    large = multiplies_bfloat16() and weights() * torch.float32.itemsize > MAX_BYTES
    return torch.bfloat16 if large else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """As the setting ``model.dtype`` names it."""
    return str(dtype).removeprefix("torch.")


def saved_dtype(saved: object) -> str | None:
    """Returns the type of weights that a checkpoint names, if it does."""
    found = saved.get("dtype") if isinstance(saved, dict) else None
    return found if found in NAMED else None


def keep_dtype(config: ModelConfig, before: str | None) -> ModelConfig:
    """Returns the settings of a resumed run: ``auto`` becomes the type that its weights had ``before``."""
    return config.model_copy(update={"dtype": before}) if before is not None and config.dtype == "auto" else config


def multiplies_bfloat16() -> bool:
    """Whether the processor has products of bfloat16, which without are slower than those of float32."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.12 and later
    return any(found.get(name, False) for name in PRODUCTS)


def count_weights(folder: Path, config: ModelConfig) -> int:
    """Of the model in a folder or GGUF file, or of the base of the adapter in it.

    Raises:
        UserError: it does not say what model it is.
    """
    with reading(base := base_folder(folder)):
        return count_described(read_settings(base, config), config)


def count_described(settings: Any, config: ModelConfig) -> int:
    """Of the model that a configuration of Transformers describes; tied ones count once."""
    return sum(p.numel() for p in model_on_meta(settings, config, torch.float32).parameters())
