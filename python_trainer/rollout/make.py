"""The engine that a configuration asks for."""

from typing import Any

from python_trainer.config import Config
from python_trainer.policy import Policy
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.types import Engine


def make_engine(config: Config, policy: Policy) -> Engine:
    """An engine for the policy.

    Raises:
        UserError: the engine cannot run this model, or not in as many processes.
    """
    rollout = config.rollout
    options: dict[str, Any] = {
        "eos_token_ids": policy.eos_token_ids,
        "tokenizer": policy.tokenizer,
        "memory_bytes": rollout.memory_bytes,
        "block_size": rollout.block_size,
        "lengths": LengthHistory() if rollout.schedule == "history" else None,
    }
    if rollout.workers > 1:
        from python_trainer.rollout.workers import WorkerPool

        precision = config.model.matmul_precision
        return WorkerPool(policy.model, workers=rollout.workers, matmul_precision=precision, **options)
    from python_trainer.rollout.engine import PagedEngine

    return PagedEngine(policy.model, **options)
