"""The engine that ``rollout.engine: auto`` stands for."""

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError

from python_trainer.errors import UserError

if TYPE_CHECKING:
    from python_trainer.config import Config


def choose_engine(config: "Config", *, gpu: bool | None = None) -> tuple["Config", str | None]:
    """The settings with ``auto`` replaced, and what to say of it.

    vLLM where servers are named, or where it is installed and training is on a GPU, if the other settings go with it;
    else the trainer's own engine.

    Args:
        gpu: whether training is on one; None: as ``model.device`` has it here.
    """
    if config.rollout.engine != "auto":
        return config, None
    gpu = trains_on_gpu(config.model.device) if gpu is None else gpu
    if not config.rollout.servers and not (gpu and has_vllm()):
        return with_engine(config, "paged"), None
    try:
        found = with_engine(config, "vllm")
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        return with_engine(config, "paged"), f"rollout.engine: auto generates without vLLM, since {reason}"
    if config.rollout.servers:
        return found, None
    return found, "rollout.engine: auto generates with vLLM, which is installed; paged is the trainer's own engine"


def with_engine(config: "Config", engine: str) -> "Config":
    """The settings with this engine; ValidationError where others do not go with it."""
    values = config.model_dump()
    values["rollout"]["engine"] = engine
    return type(config).model_validate(values)


def trains_on_gpu(device: str) -> bool:
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def has_vllm() -> bool:
    """Whether the package is here, in a version that will do; it is not imported, which takes long."""
    from python_trainer.rollout.vllm.engine import check_version

    if importlib.util.find_spec("vllm") is None:
        return False
    try:
        check_version(importlib.metadata.version("vllm"), "the package vllm")
    except (UserError, importlib.metadata.PackageNotFoundError):
        return False
    return True
