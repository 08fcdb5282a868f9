"""Makes the engine that the settings ask for."""

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_trainer.errors import UserError
from python_trainer.model.policy import Policy
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.engine import Engine, Ranks
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.settings import RolloutConfig

if TYPE_CHECKING:
    from python_trainer.rollout.vllm.engine import VLLMEngine


def has_vllm() -> bool:
    """Whether the package is here, in a version that will do; it is not imported, which takes long."""
    from python_trainer.rollout.vllm.engine import check_version

    try:
        check_version(importlib.metadata.version("vllm"), "the package vllm")
    except (UserError, importlib.metadata.PackageNotFoundError):
        return False
    return True


def make_engine(
    rollout: RolloutConfig,
    model: ModelConfig,
    policy: Policy,
    output_dir: Path,
    ranks: Ranks,
    *,
    reserved_bytes: int = 0,
    longest_draft: int = 0,
) -> Engine:
    """An engine for the policy; what a server has to read goes through a folder of ``output_dir``.

    Args:
        ranks: all of them make an engine together.
        reserved_bytes: of the device's memory, which training will take and the KV cache must leave.
        longest_draft: of the drafters that it will be given, which vLLM has to know before; 0: it will get none.

    Raises:
        UserError: the engine cannot run this model, or not in as many processes, or vLLM is not there as it must be.
    """
    options: dict[str, Any] = {
        "eos_token_ids": policy.eos_token_ids,
        "tokenizer": policy.tokenizer,
        "lengths": LengthHistory() if rollout.schedule == "history" else None,
    }
    if rollout.servers:
        return _on_servers(rollout, policy, output_dir / ".vllm", ranks, options)
    if rollout.engine == "vllm":
        from python_trainer.rollout.vllm.engine import InProcess, VLLMEngine, import_vllm

        with ranks.together():
            import_vllm()  # where that fails on one rank the others would wait for it in vLLM
        policy.streams_weights = ranks.sharded
        in_process = InProcess(
            policy.inference_model,
            policy.name,
            trust_remote_code=model.trust_remote_code,
            reserved_bytes=reserved_bytes,
            gathered=policy.stream_checkpoint if policy.streams_weights else None,
            longest_draft=longest_draft,
            memory_bytes=rollout.memory_bytes,
        )
        return VLLMEngine(policy.inference_model, in_process, **options)
    with ranks.together():
        from python_trainer.rollout.paged.engine import PagedEngine

        options |= {"memory_bytes": rollout.memory_bytes, "reserved_bytes": reserved_bytes, "traits": policy.traits}
        return PagedEngine(policy.inference_model, **options)


def _on_servers(
    rollout: RolloutConfig, policy: Policy, folder: Path, ranks: Ranks, options: dict[str, Any]
) -> "VLLMEngine":
    """Rank 0 asks the servers; the engines of others know what it is limited to."""
    from python_trainer.rollout.vllm.engine import VLLMEngine
    from python_trainer.rollout.vllm.servers import Elsewhere, Servers
    from python_trainer.rollout.vllm.weights import AdapterFiles

    model, servers = policy.inference_model, None
    with ranks.together():
        if ranks.rank == 0:
            adapters = AdapterFiles(policy, folder) if policy.adapted else None
            servers = Servers(model, rollout.servers, folder, adapters)
    limits = ranks.first(None if servers is None else (servers.max_positions, servers.limited_by))
    assert limits is not None  # rank 0 has servers, or together() has raised
    return VLLMEngine(model, servers or Elsewhere(*limits), **options)
