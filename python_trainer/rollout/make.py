"""The engine that the settings ask for."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from python_trainer.model.gathering import gathered_checkpoint
from python_trainer.model.policy import Policy
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.engine import Engine
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.settings import RolloutConfig

if TYPE_CHECKING:
    from python_trainer.rollout.vllm.adapters import AdapterFiles
    from python_trainer.rollout.vllm.engine import VLLMEngine

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Processes(Protocol):
    """Those that share a run: what a ``RankGroup`` has."""

    rank: int
    sharded: bool

    def together(self) -> AbstractContextManager[None]: ...

    def first(self, value: T) -> T: ...


def make_engine(
    rollout: RolloutConfig,
    model: ModelConfig,
    policy: Policy,
    output_dir: Path,
    *,
    reserved_bytes: int = 0,
    longest_draft: int = 0,
    ranks: Processes | None = None,
    note: Callable[[str], object] = logger.info,
) -> Engine:
    """An engine for the policy; what a server has to read goes through a folder of ``output_dir``.

    Args:
        reserved_bytes: of the device's memory, which training will take and the KV cache must leave.
        longest_draft: of the drafters that it will be given, which vLLM has to know before; 0: it will get none.
        ranks: all of them make an engine together; None: one process.
        note: tells the user what may not be meant so.

    Raises:
        UserError: the engine cannot run this model, or not in as many processes, or vLLM is not there as it must be.
    """
    options: dict[str, Any] = {
        "eos_token_ids": policy.eos_token_ids,
        "tokenizer": policy.tokenizer,
        "lengths": LengthHistory() if rollout.schedule == "history" else None,
    }
    sizes: dict[str, Any] = {"memory_bytes": rollout.memory_bytes}
    if rollout.servers:
        return _on_servers(rollout, policy, output_dir / ".vllm", ranks, note, options)
    if rollout.engine == "vllm":
        from python_trainer.rollout.vllm.engine import VLLMEngine
        from python_trainer.rollout.vllm.in_process import InProcess, import_vllm

        trust = model.trust_remote_code
        if ranks is not None:  # what one of them alone would stumble over before all meet in vLLM
            with ranks.together():
                import_vllm()
        policy.lean = ranks is not None and ranks.sharded
        in_process = InProcess(
            policy.whole,
            policy.name,
            trust_remote_code=trust,
            reserved_bytes=reserved_bytes,
            gathered=partial(gathered_checkpoint, policy) if policy.lean else None,
            longest_draft=longest_draft,
            **sizes,
        )
        return VLLMEngine(policy.whole, in_process, **options)
    with nullcontext() if ranks is None else ranks.together():
        from python_trainer.rollout.paged.engine import PagedEngine

        return PagedEngine(policy.whole, traits=policy.traits, reserved_bytes=reserved_bytes, **sizes, **options)


def _on_servers(
    rollout: RolloutConfig,
    policy: Policy,
    folder: Path,
    ranks: Processes | None,
    note: Callable[[str], object],
    options: dict[str, Any],
) -> "VLLMEngine":
    """Of several processes the first one asks the servers; the others' engine knows what it is limited to."""
    from python_trainer.rollout.vllm.engine import VLLMEngine
    from python_trainer.rollout.vllm.servers import Elsewhere, Servers

    def connected() -> VLLMEngine:
        adapters = _adapter_files(policy, folder, note)
        transfer = None if adapters is not None or rollout.vllm_transfer == "files" else rollout.vllm_transfer
        servers = Servers(policy.whole, rollout.servers, folder, adapters, transfer)
        return VLLMEngine(policy.whole, servers, **options)

    if ranks is None:
        return connected()
    engine = None
    with ranks.together():
        if ranks.rank == 0:
            engine = connected()
    limits = ranks.first(None if engine is None else (engine.max_positions, engine.limited_by))
    if engine is None:
        assert limits is not None  # the first one has an engine, or together() has raised
        engine = VLLMEngine(policy.whole, Elsewhere(*limits), **options)
    return engine


def _adapter_files(policy: Policy, folder: Path, note: Callable[[str], object]) -> "AdapterFiles | None":
    """For servers that merge a policy's adapters themselves; None where they are sent all its weights each time."""
    if not policy.adapted:
        return None
    from python_trainer.model.lora import adapted_layers
    from python_trainer.rollout.vllm.adapters import AdapterFiles, names_in_checkpoint

    names = names_in_checkpoint(policy.whole, [f"{name}.weight" for name, _ in adapted_layers(policy.model)])
    if names is None:
        note("rollout.vllm_server gets all weights after each update: not all adapted ones are in a checkpoint as such")
        return None
    files = AdapterFiles(names, folder.absolute())
    policy.on_merge = files.see
    return files
