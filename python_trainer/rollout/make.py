"""The engine that the settings ask for."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from python_trainer.model.policy import Policy
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.engine import Engine
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.settings import RolloutConfig

if TYPE_CHECKING:
    from python_trainer.rollout.vllm.engine import VLLMEngine

T = TypeVar("T")


class Processes(Protocol):
    """Those that share a run: what a ``RankGroup`` has."""

    rank: int

    def together(self) -> AbstractContextManager[None]: ...

    def first(self, value: T) -> T: ...


def make_engine(
    rollout: RolloutConfig,
    model: ModelConfig,
    policy: Policy,
    output_dir: Path,
    *,
    reserved_bytes: int = 0,
    ranks: Processes | None = None,
) -> Engine:
    """An engine for the policy; what a server has to read goes through a folder of ``output_dir``.

    Args:
        reserved_bytes: of the device's memory, which training will take and the KV cache must leave.
        ranks: all of them make an engine together; None: one process.

    Raises:
        UserError: the engine cannot run this model, or not in as many processes, or vLLM is not there as it must be.
    """
    options: dict[str, Any] = {
        "eos_token_ids": policy.eos_token_ids,
        "tokenizer": policy.tokenizer,
        "lengths": LengthHistory() if rollout.schedule == "history" else None,
    }
    sizes: dict[str, Any] = {"memory_bytes": rollout.memory_bytes, "block_size": rollout.block_size}
    if rollout.servers:
        return _on_servers(rollout.servers, policy, output_dir / ".vllm", ranks, options)
    if rollout.engine == "vllm":
        from python_trainer.rollout.vllm.engine import InProcess, VLLMEngine

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


def _on_servers(
    urls: list[str], policy: Policy, folder: Path, ranks: Processes | None, options: dict[str, Any]
) -> "VLLMEngine":
    """Of several processes the first one asks the servers; the others' engine knows what it is limited to."""
    from python_trainer.rollout.vllm.engine import VLLMEngine
    from python_trainer.rollout.vllm.servers import Elsewhere, Servers

    if ranks is None:
        return VLLMEngine(policy.whole, Servers(policy.whole, urls, folder), **options)
    engine = None
    with ranks.together():
        if ranks.rank == 0:
            engine = VLLMEngine(policy.whole, Servers(policy.whole, urls, folder), **options)
    limits = ranks.first(None if engine is None else (engine.max_positions, engine.limited_by))
    if engine is None:
        assert limits is not None  # the first one has an engine, or together() has raised
        engine = VLLMEngine(policy.whole, Elsewhere(*limits), **options)
    return engine
