"""VLLMEngine: rollouts by vLLM, in the trainer's process or on a server."""

import importlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from python_trainer.data import Request, Rollout
from python_trainer.errors import UserError
from python_trainer.keyed import keyed_seed
from python_trainer.rollout.engine import Engine, SamplingParams, check_requests, check_sampling, new_rollouts
from python_trainer.rollout.ordering import LengthHistory, expectations, longest_first, remember
from python_trainer.rollout.paged.engine import memory_limit
from python_trainer.rollout.stopping import StopStrings

OLDEST = (0, 32)
WORKER = "rlkernels.integrations.vllm_worker.PolicyWorker"
LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to this
CPU_BLOCK = 32  # vLLM's attention on a CPU takes multiples of it
# The engine's counter -> vLLM's
COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens",
    "cached_tokens": "vllm:prompt_tokens_cached",
    "preemptions": "vllm:num_preemptions",
    "forward_passes": "vllm:iteration_tokens_total",  # a histogram over passes: its count
}


@dataclass(frozen=True)
class Continuation:
    """What vLLM is asked for at once: ``n`` continuations of the same tokens, sample j with seed ``seed + j``."""

    ids: list[int]
    n: int
    max_tokens: int
    seed: int
    expected: float  # tokens of one, by earlier answers; max_tokens where nothing is known


class Drawn(NamedTuple):
    """One continuation, by vLLM."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str


class Backend(Protocol):
    """Where vLLM runs."""

    max_positions: int
    limited_by: str  # as of ``Engine``

    def load(self, model: PreTrainedModel) -> None:
        """Gives vLLM the weights of the model."""
        ...

    def complete(self, asked: Sequence[Continuation], settings: dict[str, Any], salt: str) -> list[list[Drawn]]:
        """The samples of each; ``settings`` are those that all have in common, by vLLM's names."""
        ...

    def counters(self) -> dict[str, float]:
        """Counts since vLLM was started, by the keys of ``COUNTERS``."""
        ...


class VLLMEngine(Engine):
    """The trainer's engine over vLLM 0.32 or newer: :class:`PagedEngine` in what it takes and gives.

    vLLM gets the weights before it generates for the first time and after each ``policy_updated``. Its prefix cache is
    salted with the policy's version, so no key or value computed with other weights is ever used. Sample ``j`` of a
    request draws with a seed made of (``sampling.seed``, ``sample_id + j``): the same one for the same numbers, but
    not the one of :class:`PagedEngine`, and on a GPU only as reproducible as vLLM's batches are.

    Args:
        model: the policy, trained elsewhere; the weights are read from it, and it is never run.
        backend: vLLM in this process (:class:`InProcess`) or on servers (``servers.Servers``).
        eos_token_ids: tokens that end an answer.
        tokenizer: needed for stop strings only.
        lengths: of earlier answers; with it, vLLM is asked for long ones first. None: in the order of the requests.
    """

    on_first_rank = True

    def __init__(
        self,
        model: PreTrainedModel,
        backend: Backend,
        *,
        eos_token_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        lengths: LengthHistory | None = None,
    ):
        super().__init__()
        self.model, self.backend, self.tokenizer = model, backend, tokenizer
        self.eos_token_ids = sorted(eos_token_ids)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.max_positions, self.limited_by = backend.max_positions, backend.limited_by
        self.lengths = lengths
        self._waiting: list[tuple[Sequence[Request], list[Rollout]]] = []  # submitted, with one and the same sampling
        self._sampling = SamplingParams()
        self._name = uuid4().hex  # of this run: a server may have served others
        self._loaded = -1  # version of the policy that vLLM has
        self._stats: dict[str, float] = dict.fromkeys(("generated_tokens", "prefill_tokens", *COUNTERS), 0)
        self._seen = backend.counters()

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the engine was made.

        ``generated_tokens``; ``prompt_tokens`` of prompts and prefixes, once per sample; ``cached_tokens`` of those,
        found in vLLM's prefix cache; ``prefill_tokens``, the others; ``forward_passes``; ``preemptions``. All but the
        first are vLLM's own counts: on a server they include what others ask it meanwhile.
        """
        return dict(self._stats)

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        """As of :class:`Engine`. vLLM is asked when :meth:`poll` needs it, for all that was submitted until then."""
        check_sampling(sampling, has_tokenizer=self.tokenizer is not None)
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise UserError(
                f"temperature must be 0 or at least {LOWEST_TEMPERATURE} with vLLM, got {sampling.temperature}"
            )
        limit = self.max_positions
        check_requests(requests, max_positions=limit, vocab_size=self.vocab_size, room=limit)
        if self._waiting and sampling != self._sampling:
            raise UserError(f"sampling must be {self._sampling} until all is generated, got {sampling}")
        self._sampling = sampling
        rollouts = [rollout for request in requests for rollout in new_rollouts(request, self.policy_version)]
        if rollouts:  # otherwise nobody polls, and the next submission could not have other sampling
            self._waiting.append((list(requests), rollouts))
        return rollouts

    def _work(self, count: int) -> list[Rollout]:
        submitted, self._waiting = self._waiting, []
        requests = [request for part, _ in submitted for request in part]
        rollouts = [rollout for _, part in submitted for rollout in part]
        if not rollouts:
            return []
        if self._loaded != self.policy_version:
            self.backend.load(self.model)
            self._loaded = self.policy_version
        asked, owners = self._continuations(requests, self._sampling)
        salt = f"{self._name}-{self.policy_version}"
        found = self.backend.complete(asked, self._settings(self._sampling), salt) if asked else []
        drawn: list[list[Drawn]] = [[] for _ in requests]
        for owner, samples in zip(owners, found, strict=True):
            drawn[owner] += samples
        # a request that has no room for a token has drawn nothing
        answers = [one for r, own in zip(requests, drawn) for one in own or [Drawn([], [], "length")] * r.num_samples]
        for rollout, (ids, logprobs, reason) in zip(rollouts, answers, strict=True):
            rollout.response_ids += ids
            rollout.logprobs, rollout.finish_reason = list(logprobs), reason
        self._finish(rollouts)
        if self.lengths:
            remember(self.lengths, requests, rollouts)
        return rollouts

    def _finish(self, rollouts: Sequence[Rollout]) -> None:
        """What vLLM does otherwise than the other engines."""
        if self._sampling.stop and self.tokenizer is not None:
            stop = StopStrings(self.tokenizer, self._sampling.stop)
            for rollout in rollouts:
                _cut_at_stop(rollout, stop)
        if self._sampling.temperature == 0:
            for rollout in rollouts:  # the distribution sampled from has one token
                rollout.logprobs = [0.0] * len(rollout.logprobs)
        self._count(rollouts)

    def _continuations(
        self, requests: Sequence[Request], sampling: SamplingParams
    ) -> tuple[list[Continuation], list[int]]:
        """What to ask for, and the index of the request that each belongs to."""
        asked, owners = [], []
        works = expectations(self.lengths, requests) if self.lengths else None
        for i in range(len(requests)) if works is None else longest_first(works):
            request = requests[i]
            ids = [*request.prompt_ids, *request.prefix_ids]
            room = min(request.max_new_tokens, self.max_positions - len(ids))
            if room <= 0 or not request.num_samples:
                continue
            # a later turn of an answer has other noise than the first; room for the sample ids in 63 bits
            turn = [len(request.prefix_ids)] if request.prefix_ids else []
            base = keyed_seed(sampling.seed, "vllm", *turn) >> 1
            # vLLM refuses several greedy samples
            repeats, n = (request.num_samples, 1) if sampling.temperature == 0 else (1, request.num_samples)
            expected = float(room) if works is None else min(works[i].longest, float(room))
            asked += [Continuation(ids, n, room, base + request.sample_id, expected)] * repeats
            owners += [i] * repeats
        return asked, owners

    def _settings(self, sampling: SamplingParams) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "stop_token_ids": self.eos_token_ids,
            "ignore_eos": True,  # those above are all
            "skip_special_tokens": False,  # stop strings may hold them
            "spaces_between_special_tokens": False,
            "logprobs": 0,  # those of the sampled tokens
        }

    def _count(self, rollouts: Sequence[Rollout]) -> None:
        self._stats["generated_tokens"] += sum(len(rollout.logprobs) for rollout in rollouts)
        now = self.backend.counters()
        for name in COUNTERS:
            self._stats[name] += now[name] - self._seen[name]
        self._seen = now
        self._stats["prefill_tokens"] = self._stats["prompt_tokens"] - self._stats["cached_tokens"]

    def pass_seconds(self, sequences: int, tokens: int) -> float:
        """Not known of vLLM: it schedules on its own."""
        raise UserError(
            "rollout.engine vllm schedules on its own and does not tell what a forward pass costs; paged does"
        )


def _cut_at_stop(rollout: Rollout, stop: StopStrings) -> None:
    """Ends an answer at its first stop string; vLLM does not see one that begins in the prefix."""
    for end in range(rollout.prefix_len + 1, len(rollout.response_ids) + 1):
        if stop.ends(rollout.response_ids[max(end - stop.window, 0) : end]):
            del rollout.response_ids[end:], rollout.logprobs[end - rollout.prefix_len :]
            rollout.finish_reason = "stop"
            return


class InProcess:
    """vLLM's engine in this process, on the device of the model.

    Args:
        model: gives device and type of the weights.
        folder: configuration and tokenizer of the model; its weights are not read.
        memory_bytes: size of vLLM's KV cache; by default 1 GiB on a CPU and on a GPU 40 % of the memory that is free
            and not reserved.
        block_size: tokens per block of it; on a CPU rounded up to a multiple of 32.
        trust_remote_code: run Python code that comes with the folder.
        reserved_bytes: of the device's memory, for what comes later, such as an optimizer.

    Raises:
        UserError: vLLM is missing or too old, or cannot run the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str | Path,
        *,
        memory_bytes: int | None = None,
        block_size: int = 16,
        trust_remote_code: bool = False,
        reserved_bytes: int = 0,
    ):
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise UserError(
                "rollout.engine vllm runs on one device inside the trainer, which has several: start a server and set "
                "rollout.vllm_server"
            )
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._vllm: Any = import_vllm()
        device = next(model.parameters()).device
        if device.type == "cpu":
            block_size = -(-block_size // CPU_BLOCK) * CPU_BLOCK
        set_threads = torch.set_num_threads
        try:
            self._llm = self._vllm.LLM(
                str(folder),
                load_format="dummy",
                dtype=str(model.dtype).removeprefix("torch."),
                seed=0,
                max_model_len=-1,  # the model's, or what fits into the memory
                kv_cache_memory_bytes=memory_limit(device, reserved_bytes) if memory_bytes is None else memory_bytes,
                gpu_memory_utilization=0.01,  # nothing but a start-up check of vLLM looks at it
                block_size=block_size,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                worker_extension_cls=WORKER,
                disable_log_stats=False,
                trust_remote_code=trust_remote_code,
                enforce_eager=device.type == "cpu",
            )
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"vLLM cannot run the model {folder}: {reason}") from error
        finally:
            torch.set_num_threads = set_threads  # on a CPU vLLM takes it away
        self.max_positions: int = self._llm.model_config.max_model_len
        self.limited_by = "the limit of rollout.engine vllm (the model's, or what rollout.memory_bytes has room for)"

    def load(self, model: PreTrainedModel) -> None:
        self._llm.collective_rpc("load_policy", args=(checkpoint_weights(model),))

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
        values = {name: found[theirs] for name, theirs in COUNTERS.items()}
        return {name: float(one.value if hasattr(one, "value") else one.count) for name, one in values.items()}


def import_vllm() -> Any:
    """The package; UserError where it is missing or too old."""
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise UserError(
            f"rollout.engine vllm needs the package vllm >= {'.'.join(map(str, OLDEST))} here, or a server "
            f"(rollout.vllm_server); importing it says: {error}"
        ) from error
    check_version(vllm.__version__, "the package vllm")
    return vllm


def check_version(version: str, what: str) -> None:
    """Raises UserError for a vLLM that is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(f"rollout.engine vllm needs vllm >= {oldest}; {what} is {version}")


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
