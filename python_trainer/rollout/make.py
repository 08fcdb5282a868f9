"""The engine that the settings ask for."""

from pathlib import Path
from typing import Any

from python_trainer.model.policy import Policy
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.engine import Engine
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.settings import RolloutConfig


def make_engine(
    rollout: RolloutConfig, model: ModelConfig, policy: Policy, output_dir: Path, *, reserved_bytes: int = 0
) -> Engine:
    """An engine for the policy; what a server has to read goes through a folder of ``output_dir``.

    Args:
        reserved_bytes: of the device's memory, which training will take and the KV cache must leave.

    Raises:
        UserError: the engine cannot run this model, or not in as many processes, or vLLM is not there as it must be.
    """
    options: dict[str, Any] = {
        "eos_token_ids": policy.eos_token_ids,
        "tokenizer": policy.tokenizer,
        "lengths": LengthHistory() if rollout.schedule == "history" else None,
    }
    sizes: dict[str, Any] = {"memory_bytes": rollout.memory_bytes, "block_size": rollout.block_size}
    if rollout.engine == "vllm":
        from python_trainer.rollout.vllm.engine import InProcess, VLLMEngine
        from python_trainer.rollout.vllm.server import Server

        if rollout.vllm_server is not None:
            server = Server(policy.whole, rollout.vllm_server, output_dir / ".vllm")
            return VLLMEngine(policy.whole, server, **options)
        trust = model.trust_remote_code
        in_process = InProcess(
            policy.whole, policy.name, trust_remote_code=trust, reserved_bytes=reserved_bytes, **sizes
        )
        return VLLMEngine(policy.whole, in_process, **options)
    if rollout.workers > 1:
        from python_trainer.rollout.workers.pool import WorkerPool

        precision = model.matmul_precision
        options |= sizes | {"traits": policy.traits}
        return WorkerPool(policy.whole, workers=rollout.workers, matmul_precision=precision, **options)
    from python_trainer.rollout.paged.engine import PagedEngine

    return PagedEngine(policy.whole, traits=policy.traits, reserved_bytes=reserved_bytes, **sizes, **options)
