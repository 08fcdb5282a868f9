"""Makes the parts of a trainer from the settings."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rlkernels.backend
from python_trainer.config import Config
from python_trainer.distributed import RankGroup
from python_trainer.distributed.ranked_engine import RankedEngine
from python_trainer.environment import ENVIRONMENTS
from python_trainer.errors import UserError
from python_trainer.memory import RECOMPUTES, device_here, needs_recomputing, plan_memory
from python_trainer.model.loading import base_folder, run_dtype
from python_trainer.model.lora import adapted_layers
from python_trainer.model.policy import Policy
from python_trainer.rollout.engine import Engine
from python_trainer.rollout.episodes import EpisodeEngine
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.paged.engine import PagedEngine, memory_limit
from python_trainer.rollout.settings import RolloutConfig, vllm_logprobs_modes
from python_trainer.rollout.vllm.engine import Backend, InProcess, VLLMEngine, import_vllm
from python_trainer.rollout.vllm.servers import AdapterFiles, Servers


def resolve_engine(config: Config) -> Config:
    """Replace ``rollout.engine: auto``: vLLM where servers are named, else the trainer's own engine.

    Every model that the trainer accepts runs in its own engine, which needs no memory for a second copy of the weights.

    Raises:
        UserError: a setting does not go with the servers.
    """
    if config.rollout.engine != "auto":
        return config
    chosen = config.with_changes("rollout", engine="vllm" if config.rollout.vllm_server else "paged")
    if config.rollout.vllm_server and (conflict := next(chosen.conflicts(), None)) is not None:  # what a plug-in asks
        raise UserError(conflict)
    return chosen


def resolve_settings(
    config: Config, saved: Mapping[str, Any] | None, ranks: RankGroup, note: Callable[[str], None]
) -> Config:
    """Replaces settings that are ``auto`` by what they mean on this machine.

    Raises:
        UserError: the environment asks for kernels that are not there.
    """
    with ranks.together():
        try:
            rlkernels.backend.wanted()
        except ValueError as error:
            raise UserError(str(error)) from error
        chosen = resolve_engine(config)
    # of rank 0, since another's processor may suit another type
    chosen = chosen.with_changes("model", dtype=ranks.once(lambda: run_dtype(chosen.model, saved)))
    if ranks.once(lambda: needs_recomputing(chosen, device_here(chosen.model.device, ranks.size))):
        note(RECOMPUTES)
        return chosen.with_changes("model", gradient_checkpointing=True)
    return chosen


def make_engine(chosen: Config, policy: Policy, output_dir: Path, ranks: RankGroup) -> Engine:
    """Makes the engine that follows the policy, with turns of the environment if there is one.

    All ranks make one together. The policy's longest sequence becomes that of the engine, if that is shorter.

    Args:
        output_dir: what a server has to read goes through a folder of it.

    Raises:
        UserError: the engine cannot run this model, or vLLM is not there as it must be.
    """
    rollout, model, task = chosen.rollout, policy.inference_model, chosen.task
    backend: Backend | None = None
    options: dict[str, Any] = {"eos_token_ids": policy.eos_token_ids, "tokenizer": policy.tokenizer}
    reserved = 0  # of the device's memory, which training will take and the KV cache must leave
    if policy.device.type != "cpu":
        reserved = plan_memory(chosen, device_here("cuda", ranks.size), model=policy.model).reserved
    if urls := rollout.vllm_server:
        backend = ranks.once(lambda: _find_servers(urls, policy, output_dir / ".vllm", rollout))
    elif rollout.engine == "vllm":
        with ranks.together():
            import_vllm()  # where that fails on one rank the others would wait for it in vLLM
        policy.streams_weights = ranks.sharded
        backend = InProcess(
            model,
            base_folder(Path(policy.name)),
            trust_remote_code=chosen.model.trust_remote_code,
            gathered=policy.stream_checkpoint if policy.streams_weights else None,
            longest_draft=max((x.longest_draft() for x in chosen.accelerators.chosen()), default=0),
            memory_bytes=rollout.memory_bytes or memory_limit(policy.device, reserved),
            logprobs_mode=next(iter(vllm_logprobs_modes(rollout)), "processed_logprobs"),
        )
    with ranks.together():
        if backend is None:
            options |= {"memory_bytes": rollout.memory_bytes, "reserved_bytes": reserved}
            engine: Engine = PagedEngine(model, traits=policy.traits, **options)
        else:
            engine = VLLMEngine(model, backend, **options)
    engine.lengths = LengthHistory() if rollout.schedule == "history" else None
    if task.environment is not None:
        engine = EpisodeEngine(engine, ENVIRONMENTS.resolve(task.environment), policy, max_turns=task.max_turns)
    if ranks.size > 1 or model is not policy.model:
        engine = RankedEngine(engine, policy, ranks if ranks.size > 1 else None)
    if engine.max_positions < policy.max_length:  # answers would otherwise end early without a word
        policy.max_length, policy.limited_by = engine.max_positions, engine.limited_by
    return engine


def _find_servers(urls: list[str], policy: Policy, folder: Path, settings: RolloutConfig) -> Servers:
    """Checks the servers, and keeps the policy's adapters for them."""
    adapters = None
    if policy.adapted:
        names = [f"{name}.weight" for name, _ in adapted_layers(policy.model)]
        adapters = AdapterFiles(policy.inference_model, names, folder)
        policy.on_merge = adapters.remember
    return Servers(policy.inference_model, urls, folder, adapters, settings)
