"""Build the parts of a trainer from the settings."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlkernels.backend
from python_trainer.accelerators.base import Accelerator
from python_trainer.config import Config
from python_trainer.distributed import RankGroup
from python_trainer.distributed.ranked_engine import RankedEngine
from python_trainer.environment import ENVIRONMENTS
from python_trainer.errors import UserError
from python_trainer.loop.checkpointer import Checkpointer
from python_trainer.loop.evaluation import Evaluator, Scorer
from python_trainer.loop.kernels import settle_kernels
from python_trainer.loop.learner import Learner
from python_trainer.loop.memory import RECOMPUTES, device_here, needs_recomputing, plan_memory
from python_trainer.loop.origin import Origin, compare_inputs, find_origin
from python_trainer.loop.prompts import Prompts, load_tasks
from python_trainer.model.loading import base_folder, choose_device, ignored_settings, recurrent_layers, run_dtype
from python_trainer.model.lora import adapted_layers
from python_trainer.model.policy import Policy
from python_trainer.model.precision import set_matmul_precision
from python_trainer.rollout.engine import Engine
from python_trainer.rollout.episodes import EpisodeEngine
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.paged.engine import PagedEngine, memory_limit
from python_trainer.rollout.settings import RolloutConfig, vllm_logprobs_modes
from python_trainer.rollout.vllm.engine import Backend, InProcess, VLLMEngine, import_vllm
from python_trainer.rollout.vllm.servers import AdapterFiles, Servers
from python_trainer.run.logger import Logger
from python_trainer.run.run_state import RunState


@dataclass
class Parts:
    """The parts of a trainer that need its task or its model.

    Attributes:
        kernels: what checkpoints hold about the kernels of the run.
        origin: what a resumed run must find as it was.
    """

    kernels: dict[str, Any]
    policy: Policy
    origin: Origin
    engine: Engine
    prompts: Prompts
    learner: Learner
    accelerators: list[Accelerator]
    scorer: Scorer
    evaluator: Evaluator


@dataclass
class Builder:
    """Builds the parts of a trainer; all ranks build together.

    Attributes:
        output_dir: the run directory.
        notify: calls a method of all callbacks.
    """

    config: Config
    output_dir: Path
    ranks: RankGroup
    state: RunState
    logger: Logger
    checkpointer: Checkpointer
    notify: Callable[..., None]

    def build(self) -> Parts:
        """Load task and model, and make all parts; if one cannot be made, the engine is closed again.

        Raises:
            UserError: something in the settings, files or model cannot be used.
        """
        config, ranks, note = self.config, self.ranks, self.logger.note
        with ranks.fail_together():
            tasks = load_tasks(config, choose_device(config.model.device))
        chosen = resolve_settings(config, self.checkpointer.saved, ranks, note)
        kernels = settle_kernels(chosen, self.checkpointer.saved, ranks, note)
        policy, origin = load_run_policy(chosen, ranks, note)
        engine = make_engine(chosen, policy, self.output_dir, ranks)
        with ExitStack() as unless_built:
            unless_built.callback(engine.close)
            engine.on_progress = self.logger.log_work  # rank 0 reports its own part
            with ranks.fail_together():
                prompts = Prompts(config, tasks, policy, self.state, note)
                learner = Learner(policy, chosen, ranks)
                accelerators = config.accelerators.make()
            compare_inputs(config, policy, prompts, origin, self.checkpointer.newest, ranks)
            scorer = Scorer(config, prompts, ranks)
            evaluator = Evaluator(scorer, engine, self.logger, self.notify)
            unless_built.pop_all()
        return Parts(kernels, policy, origin, engine, prompts, learner, accelerators, scorer, evaluator)


def load_run_policy(chosen: Config, ranks: RankGroup, note: Callable[[str], None]) -> tuple[Policy, Origin]:
    """Load the policy that trains, set the precision of this process for it, and return it with the run's origin.

    Args:
        chosen: settings as :func:`resolve_settings` returns them.
    """
    policy = ranks.load(chosen.model, offload=chosen.optimizer.offload)
    if ignored := ignored_settings(policy.inference_model):
        note(ignored)
    origin = find_origin(chosen, policy, ranks)
    set_matmul_precision(chosen.model.matmul_precision)
    return policy, origin


def resolve_engine(config: Config) -> Config:
    """Replace ``rollout.engine: auto``: vLLM where servers are named or the model is recurrent, else the own engine.

    That one needs no memory for a second copy of the weights.

    Raises:
        UserError: a setting does not go with vLLM; there is no such model.
    """
    if config.rollout.engine != "auto":
        return config
    takes_vllm = config.rollout.vllm_server or recurrent_layers(config.model)
    chosen = config.with_changes("rollout", engine="vllm" if takes_vllm else "paged")
    if takes_vllm and (conflict := next(chosen.conflicts(), None)) is not None:  # of a plug-in
        raise UserError(conflict)
    return chosen


def resolve_settings(
    config: Config,
    saved: Mapping[str, Any] | None,
    ranks: RankGroup,
    note: Callable[[str], None],
    *,
    generates: bool = True,
) -> Config:
    """Replace settings that are ``auto`` by what they mean on this machine.

    Args:
        saved: the checkpoint that the run continues from; None: it begins anew.
        generates: False for supervised training.

    Raises:
        UserError: the environment asks for kernels that are not there.
    """
    with ranks.fail_together():
        try:
            rlkernels.backend.wanted()
        except ValueError as error:
            raise UserError(str(error)) from error
        chosen = resolve_engine(config)
    # rank 0 decides, since another rank's processor may suit another type
    chosen = chosen.with_changes("model", dtype=ranks.on_rank0(lambda: run_dtype(chosen.model, saved)))
    device = device_here(chosen.model.device, ranks.size)
    if ranks.on_rank0(lambda: needs_recomputing(chosen, device, generates=generates)):
        note(RECOMPUTES)
        return chosen.with_changes("model", gradient_checkpointing=True)
    return chosen


def make_engine(chosen: Config, policy: Policy, output_dir: Path, ranks: RankGroup) -> Engine:
    """Make the engine that follows the policy, with turns of the environment if there is one.

    All ranks make one together. The policy's longest sequence becomes that of the engine, if that is shorter.

    Args:
        output_dir: a folder in it holds the files that servers read.

    Raises:
        UserError: the engine cannot run this model, or vLLM is not there as it must be.
    """
    rollout, model, task = chosen.rollout, policy.inference_model, chosen.task
    backend: Backend | None = None
    options: dict[str, Any] = {"eos_token_ids": policy.eos_token_ids, "tokenizer": policy.tokenizer}
    reserved = 0  # bytes of the device that training will take and the KV cache must leave
    if policy.device.type != "cpu":
        reserved = plan_memory(chosen, device_here("cuda", ranks.size), model=policy.model).reserved
    if urls := rollout.vllm_server:
        backend = ranks.on_rank0(lambda: _find_servers(urls, policy, output_dir / ".vllm", rollout))
    elif rollout.engine == "vllm":
        with ranks.fail_together():
            import_vllm()  # here, because a rank that fails within vLLM would leave the others waiting
        policy.streams_weights = ranks.sharded
        backend = InProcess(
            model,
            base_folder(Path(policy.name)),
            trust_remote_code=chosen.model.trust_remote_code,
            gathered=policy.stream_checkpoint if policy.streams_weights else None,
            longest_draft=max((settings.longest_draft() for settings in chosen.accelerators.chosen()), default=0),
            memory_bytes=rollout.memory_bytes or memory_limit(policy.device, reserved),
            logprobs_mode=next(iter(vllm_logprobs_modes(rollout)), "processed_logprobs"),
        )
    with ranks.fail_together():
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
