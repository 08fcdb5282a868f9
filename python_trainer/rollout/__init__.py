"""Rollout engines."""

from python_trainer.data import Completion
from python_trainer.rollout.engine import Engine, Request, SamplingParams

__all__ = ["Completion", "Engine", "PagedEngine", "Request", "SamplingParams", "VLLMEngine"]


def __getattr__(name: str):
    # transformers takes seconds to import, so it waits until an engine is asked for
    if name == "PagedEngine":
        from python_trainer.rollout.paged.engine import PagedEngine

        return PagedEngine
    if name == "VLLMEngine":
        from python_trainer.rollout.vllm.engine import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
