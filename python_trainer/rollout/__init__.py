"""Rollout engines. Names are loaded on first use: the settings of this room need neither torch nor Transformers."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from python_trainer.data import Request as Request
    from python_trainer.data import Rollout as Rollout
    from python_trainer.rollout.engine import Engine as Engine
    from python_trainer.rollout.engine import SamplingParams as SamplingParams
    from python_trainer.rollout.paged.engine import PagedEngine as PagedEngine
    from python_trainer.rollout.vllm.engine import VLLMEngine as VLLMEngine

HOMES = {
    "Engine": "python_trainer.rollout.engine",
    "PagedEngine": "python_trainer.rollout.paged.engine",
    "Request": "python_trainer.data",
    "Rollout": "python_trainer.data",
    "SamplingParams": "python_trainer.rollout.engine",
    "VLLMEngine": "python_trainer.rollout.vllm.engine",
}
__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)
