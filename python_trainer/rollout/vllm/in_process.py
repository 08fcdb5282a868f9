"""vLLM's engine in the trainer's process."""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.paged.engine import memory_limit
from python_trainer.rollout.vllm.engine import (
    COUNTERS,
    DRAFT_COUNTERS,
    OLDEST,
    WORKER,
    Backend,
    Continuation,
    Drawn,
    check_version,
)
from rlkernels import RolloutHistory
from rlkernels.integrations.transformers_attention import rotary_limit

PROPOSER = "rlkernels.integrations.vllm.HistoryProposer"


class InProcess(Backend):
    """vLLM's engine in this process, on the device of the model.

    Where several processes train together each has an engine of its own; all must make theirs at the same time.

    On a GPU it can sleep: it then has neither weights nor a cache, and :meth:`load` wakes it: room for weights, the
    transfer, room for the cache, so that the cache is not there yet while weights are gathered.

    Args:
        model: gives device and type of the weights.
        folder: configuration and tokenizer of the model; its weights are not read.
        memory_bytes: size of vLLM's KV cache; by default 1 GiB on a CPU and on a GPU 40 % of the memory that is free
            and not reserved.
        trust_remote_code: run Python code that comes with the folder.
        reserved_bytes: of the device's memory, for what comes later, such as an optimizer.
        gathered: makes the weights, by their names in a checkpoint, where the model does not have them.
        longest_draft: most tokens that vLLM verifies at once; 0: it is made without drafts, and :meth:`draft_from` has
            no effect.

    Raises:
        UserError: vLLM is missing or too old, or cannot run the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str | Path,
        *,
        memory_bytes: int | None = None,
        trust_remote_code: bool = False,
        reserved_bytes: int = 0,
        gathered: Callable[[], Iterator[tuple[str, torch.Tensor]]] | None = None,
        longest_draft: int = 0,
    ):
        self._gathered = gathered
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._vllm: Any = import_vllm()
        device = next(model.parameters()).device
        self._drafts = longest_draft > 0
        self._sleeps, self._asleep = _can_sleep(device), False
        set_threads = torch.set_num_threads
        try:
            self._llm = self._vllm.LLM(
                str(folder),
                load_format="dummy",
                dtype=str(model.dtype).removeprefix("torch."),
                seed=0,
                # else the model's, or what fits into the memory; beyond the limit vLLM takes other factors for all
                max_model_len=rotary_limit(model.config.get_text_config()) or -1,
                kv_cache_memory_bytes=memory_limit(device, reserved_bytes) if memory_bytes is None else memory_bytes,
                gpu_memory_utilization=0.01,  # nothing but a start-up check of vLLM looks at it
                block_size=32 if device.type == "cpu" else 16,  # attention on a CPU takes multiples of 32
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                worker_extension_cls=WORKER,
                disable_log_stats=False,
                trust_remote_code=trust_remote_code,
                enforce_eager=device.type == "cpu",
                enable_sleep_mode=self._sleeps,
                **_place_among_ranks(device),
                **_drafting(longest_draft),
            )
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"vLLM cannot run the model {folder}: {reason}") from error
        finally:
            torch.set_num_threads = set_threads  # on a CPU vLLM takes it away
        self.max_positions: int = self._llm.model_config.max_model_len
        self.limited_by = "the limit of rollout.engine vllm (the model's, or what rollout.memory_bytes has room for)"

    def sleep(self) -> bool:
        """All weights are sent again when it wakes, so none are kept in the memory of the host (level 2)."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True
        return self._asleep

    def load(self, model: PreTrainedModel) -> int:
        if not self._asleep:
            return self._send(model)
        torch.cuda.empty_cache()  # vLLM takes memory without torch, which holds what the update has used
        self._llm.wake_up(tags=["weights"])
        sent = self._send(model)
        self._llm.wake_up(tags=["kv_cache"])
        self._asleep = False
        return sent

    def _send(self, model: PreTrainedModel) -> int:
        """The weights, straight from the memory of the policy -> their bytes."""
        sent = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal sent
            for name, weight in checkpoint_weights(model) if self._gathered is None else self._gathered():
                sent += weight.nbytes
                yield name, weight

        self._llm.collective_rpc("load_policy", args=(counted(),))
        return sent

    def draft_from(self, drafter: Drafter | None) -> None:
        if not self._drafts:
            return
        from rlkernels.integrations.vllm import share_history

        if drafter is None:
            share_history(None)
        else:
            share_history(drafter.history, drafter.token_cost)

    def close(self) -> None:
        self.draft_from(None)

    def complete(self, asked: Sequence[Continuation], settings: dict[str, Any], salt: str) -> list[list[Drawn]]:
        prompts = [{"prompt_token_ids": one.ids, "cache_salt": salt} for one in asked]
        params = [
            self._vllm.SamplingParams(
                **settings, n=one.n, seed=one.seed, max_tokens=one.max_tokens, detokenize=bool(settings["stop"])
            )
            for one in asked
        ]
        found = self._llm.generate(prompts, params, use_tqdm=False)
        return [
            [
                Drawn(
                    list(one.token_ids), [p[t].logprob for t, p in zip(one.token_ids, one.logprobs)], one.finish_reason
                )
                for one in output.outputs
            ]
            for output in found
        ]

    def counters(self) -> dict[str, float]:
        found: dict[str, Any] = {metric.name: metric for metric in self._llm.get_metrics()}
        named = COUNTERS | (DRAFT_COUNTERS if self._drafts else {})
        values = {name: found[theirs] for name, theirs in named.items()}
        return {name: float(one.value if hasattr(one, "value") else one.count) for name, one in values.items()}


def _drafting(longest: int) -> dict[str, Any]:
    """Options of an engine that will be given drafters; none where it will not."""
    if not longest:
        return {}
    from rlkernels.integrations.vllm import share_history

    share_history(RolloutHistory())  # there has to be one when the engine is made
    return {"speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": longest}}


def _can_sleep(device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    return bool(platform.is_sleep_mode_available())


def _place_among_ranks(device: torch.device) -> dict[str, Any]:
    """Options of an engine of one process among several; none where there is one."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return {}
    # vLLM joins the group of processes that is there, and asks these which one it is. With tensor parallelism of 1 each
    # is a replica of its own: nothing passes between them afterwards.
    rank = torch.distributed.get_rank()
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(rank if device.index is None else device.index)
    return {"distributed_executor_backend": "external_launcher"}


def import_vllm() -> Any:
    """Imports vLLM.

    Raises:
        UserError: it is missing or too old.
    """
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise UserError(
            f"rollout.engine vllm needs the package vllm >= {'.'.join(map(str, OLDEST))} here, or a server "
            f"(rollout.vllm_server); importing it says: {error}"
        ) from error
    check_version(vllm.__version__, "the package vllm")
    return vllm


def checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by their names in a checkpoint, tied ones once."""
    from transformers.core_model_loading import revert_weight_conversion

    seen, state = set(), {}
    for name, tensor in model.state_dict().items():
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        if key not in seen or not tensor.numel():
            seen.add(key)
            state[name] = tensor.detach()
    yield from revert_weight_conversion(model, state).items()
