"""What the settings of a run mean on this machine, and the policy and the engine that follow from them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import rlkernels.backend
from python_trainer.config import Config
from python_trainer.distributed import RankGroup
from python_trainer.distributed.ranked_engine import RankedEngine
from python_trainer.environment import ENVIRONMENTS
from python_trainer.errors import UserError
from python_trainer.loop.memory import RECOMPUTES, device_here, needs_recomputing, plan_memory
from python_trainer.loop.origin import Origin, find_origin
from python_trainer.model.loading import base_folder, ignored_settings, recurrent_layers, run_dtype
from python_trainer.model.lora import adapted_layers
from python_trainer.model.policy import Policy, recomputes
from python_trainer.model.precision import set_matmul_precision
from python_trainer.rollout.engine import Engine
from python_trainer.rollout.episodes import EpisodeEngine
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.paged.engine import PagedEngine, memory_limit
from python_trainer.rollout.settings import RolloutConfig, vllm_logprobs_modes
from python_trainer.rollout.vllm.engine import Backend, InProcess, VLLMEngine, import_vllm
from python_trainer.rollout.vllm.servers import AdapterFiles, Servers


def load_run_policy(resolved: Config, ranks: RankGroup, note: Callable[[str], None]) -> tuple[Policy, Origin]:
    """Load the policy that trains, set the precision of this process for it, and return it with the run's origin.

    Args:
        resolved: settings as :func:`resolve_settings` returns them.
    """
    policy = ranks.load(resolved.model, offload=resolved.optimizer.offload)
    if ignored := ignored_settings(policy.inference_model):
        note(ignored)
    if resolved.model.gradient_checkpointing is True and not recomputes(policy.model):
        note("model.gradient_checkpointing has no effect: no layer of this model can recompute its activations")
    origin = find_origin(resolved, policy, ranks)
    set_matmul_precision(resolved.model.matmul_precision)
    return policy, origin


def resolve_engine(config: Config) -> Config:
    """Replace ``rollout.engine: auto``, and ``algorithm.importance_sampling: auto``, which follows from the engine.

    vLLM generates where servers are named or the model is recurrent. The trainer's engine needs no memory for a second
    copy of the weights.

    Raises:
        UserError: a setting excludes vLLM; there is no such model.
    """
    if config.rollout.engine == "auto":
        needs_vllm = bool(config.rollout.vllm_server or recurrent_layers(config.model))
        config = config.with_changes("rollout", engine="vllm" if needs_vllm else "paged")
        if needs_vllm and (conflicts := list(config.conflicts())):  # an accelerator may exclude vLLM
            raise UserError("; ".join(conflicts))
    return config.model_copy(update={"algorithm": config.algorithm.with_sampler(config.rollout.engine)})


def resolve_settings(
    config: Config,
    saved: Mapping[str, Any] | None,
    ranks: RankGroup,
    note: Callable[[str], None],
    *,
    generates: bool = True,
) -> Config:
    """Replace every ``auto`` by what it means on this machine.

    Args:
        saved: the checkpoint that the run continues from; None: it begins anew.
        generates: False for supervised training.

    Raises:
        UserError: the environment asks for kernels that are not there; torch's default device is not the CPU.
    """
    with ranks.fail_together():
        if (default := torch.get_default_device()).type != "cpu":
            raise UserError(
                f"torch's default device must be cpu, got {default}: model.device sets where a run computes"
            )
        try:
            rlkernels.backend.environment_backend()
        except ValueError as error:
            raise UserError(str(error)) from error
        resolved = resolve_engine(config)
    # rank 0 decides, since another rank's processor may suit another type
    resolved = resolved.with_changes("model", dtype=ranks.on_rank0(lambda: run_dtype(resolved.model, saved)))
    device = device_here(resolved.model.device, ranks.size)
    if ranks.on_rank0(lambda: needs_recomputing(resolved, device, generates=generates)):
        note(RECOMPUTES)
        return resolved.with_changes("model", gradient_checkpointing=True)
    return resolved


def make_engine(
    resolved: Config,
    policy: Policy,
    output_dir: Path,
    ranks: RankGroup,
    on_progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Make the engine that follows the policy, with turns of the environment if there is one.

    All ranks make one together. The policy learns from it: its longest sequence becomes that of the engine, if that is
    shorter; whether it streams its weights; and where merged adapters go.

    Args:
        output_dir: a folder in it holds the files that servers read.
        on_progress: as of :class:`Engine`; among several ranks each reports its own part.

    Raises:
        UserError: the engine cannot run this model, or vLLM is not there as it must be.
    """
    rollout, model, task = resolved.rollout, policy.inference_model, resolved.task
    backend: Backend | None = None
    options: dict[str, Any] = {"eos_token_ids": policy.eos_token_ids, "tokenizer": policy.tokenizer}
    reserved = 0  # bytes of the device that training will take and the KV cache must leave
    if policy.device.type != "cpu":
        reserved = plan_memory(resolved, device_here("cuda", ranks.size), model=policy.model).reserved
    if urls := rollout.vllm_server:
        backend = ranks.on_rank0(lambda: _find_servers(urls, policy, output_dir / ".vllm", rollout))
    elif rollout.engine == "vllm":
        with ranks.fail_together():
            import_vllm()  # here, because a rank that fails within vLLM would leave the others waiting
        policy.streams_weights = ranks.sharded
        backend = InProcess(
            model,
            base_folder(Path(policy.name)),
            trust_remote_code=resolved.model.trust_remote_code,
            gathered=policy.stream_checkpoint if policy.streams_weights else None,
            longest_draft=max((settings.longest_draft() for settings in resolved.accelerators.chosen()), default=0),
            memory_bytes=rollout.memory_bytes or memory_limit(policy.device, reserved),
            logprobs_mode=next(iter(vllm_logprobs_modes(rollout)), "processed_logprobs"),
        )
    with ranks.fail_together():
        if backend is None:
            engine: Engine = PagedEngine(
                model, traits=policy.traits, memory_bytes=rollout.memory_bytes, reserved_bytes=reserved, **options
            )
        else:
            engine = VLLMEngine(model, backend, **options)
    engine.lengths = LengthHistory() if rollout.schedule == "history" else None
    if task.environment is not None:
        engine = EpisodeEngine(engine, ENVIRONMENTS.resolve(task.environment), policy, max_turns=task.max_turns)
    engine.on_progress = on_progress
    if ranks.size > 1 or model is not policy.model:
        engine = RankedEngine(engine, policy, ranks)
    if engine.max_positions < policy.max_length:  # answers would otherwise end early without a word
        policy.max_length = engine.max_positions
        policy.limited_by = engine.limited_by
    return engine


def _find_servers(urls: list[str], policy: Policy, folder: Path, settings: RolloutConfig) -> Servers:
    """Check the servers, and let them follow the policy's adapters."""
    adapters = None
    if policy.adapted:
        names = [f"{name}.weight" for name, _ in adapted_layers(policy.model)]
        adapters = AdapterFiles(policy.inference_model, names, folder)
        policy.on_merge = adapters.remember
    return Servers(policy.inference_model, urls, folder, adapters, settings)
