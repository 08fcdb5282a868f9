"""Rollout engines."""

from python_trainer.rollout.types import Completion, Engine, Request, SamplingParams

__all__ = ["Completion", "Engine", "Request", "SamplingParams"]
