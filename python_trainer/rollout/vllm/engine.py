"""VLLMEngine: rollouts by vLLM, in the trainer's process or on servers (``servers.py``)."""

import importlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from python_trainer.data import Request, Rollout
from python_trainer.errors import UserError, on_one_line
from python_trainer.model.weights import checkpoint_weights, named_weights
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import Engine, SamplingParams, StopStrings, check_requests, new_rollouts
from python_trainer.rollout.ordering import longest_first
from python_trainer.rollout.settings import vllm_logprobs_modes
from rlkernels import RolloutHistory
from rlkernels.integrations.transformers_attention import rotary_limit
from rlkernels.sampling.keys import keyed_seed

OLDEST_VERSION = (0, 32)  # of vLLM
SLEEPLESS = ("cpu",)  # types of devices on which vLLM keeps its memory
PROPOSER = "rlkernels.integrations.vllm.HistoryProposer"
WORKER = "rlkernels.integrations.vllm_worker.PolicyWorker"
OWN_COUNTERS = ("generated_tokens", "prefill_tokens", "weight_bytes")
# The engine's counter -> vLLM's
COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens",
    "cached_tokens": "vllm:prompt_tokens_cached",
    "preemptions": "vllm:num_preemptions",
    "forward_passes": "vllm:iteration_tokens_total",  # a histogram over passes: its count
}
DRAFT_COUNTERS = {
    "draft_steps": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}


@dataclass(frozen=True)
class Continuation:
    """A request to vLLM: ``n`` continuations of the same tokens, sample j with seed ``seed + j``."""

    ids: list[int]
    n: int
    max_tokens: int
    seed: int
    expected_tokens: float  # of one, by earlier answers; max_tokens without any


class Drawn(NamedTuple):
    """One continuation, by vLLM."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str


class Backend(ABC):
    """Where vLLM runs; its attributes are those of :class:`Engine`."""

    max_positions: int
    limited_by: str
    on_first_rank = False
    drafts = False  # it can draft
    logprobs_mode = "processed_logprobs"  # vLLM's

    @abstractmethod
    def load(self, model: PreTrainedModel) -> int:
        """Give vLLM the weights of the model; return how many bytes that took."""

    @abstractmethod
    def complete(self, continuations: Sequence[Continuation], settings: dict[str, Any], salt: str) -> list[list[Drawn]]:
        """Generate the samples of each; ``settings`` are those that all have in common, by vLLM's names."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Read counts since vLLM was started, by the keys of ``COUNTERS`` and, if it drafts, ``DRAFT_COUNTERS``."""

    def draft_from(self, drafter: Drafter | None) -> None:  # noqa: B027
        """Let vLLM draft from the drafter's history, where it can, until this is called again; None: no drafts."""

    def sleep(self) -> bool:
        """Free memory until :meth:`load`, if possible; return whether the weights are gone."""
        return False

    def close(self) -> None:  # noqa: B027
        """Let go of files and of what it drafts from."""


class VLLMEngine(Engine):
    """The trainer's engine over vLLM 0.32 or newer: :class:`PagedEngine` in what it takes and gives.

    vLLM gets the weights before it generates for the first time and after each ``policy_updated``. Its prefix cache is
    salted with the policy's version, so no key or value computed with other weights is ever used. Sample ``j`` of a
    request draws with a seed made of (``sampling.seed``, ``sample_id + j``): the same one for the same numbers, but
    not the one of :class:`PagedEngine`, and on a GPU only as reproducible as vLLM's batches are.

    ``stats`` are by vLLM's own counters: a server's include what others ask it meanwhile. Further ones are
    ``prompt_tokens`` of prompts and prefixes, once per sample, and ``weight_bytes`` written for servers or handed to
    vLLM in this process.

    Args:
        model: the policy, trained elsewhere; the weights are read from it, and it is never run.
        backend: vLLM in this process (:class:`InProcess`) or on servers (``servers.Servers``).
        eos_token_ids: tokens that end an answer.
        tokenizer: needed for stop strings only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: Backend,
        *,
        eos_token_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        drafting = (*DRAFT_COUNTERS, "sample_steps") if backend.drafts else ()
        super().__init__((*OWN_COUNTERS, *COUNTERS, *drafting))
        self.model = model
        self.backend = backend
        self.tokenizer = tokenizer
        self.eos_token_ids = sorted(eos_token_ids)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.max_positions = backend.max_positions
        self.limited_by = backend.limited_by
        self.on_first_rank = backend.on_first_rank
        self._requests: list[Request] = []  # submitted, all with the same sampling
        self._rollouts: list[Rollout] = []
        self._sampling = SamplingParams()
        self._name = uuid4().hex  # of this run: a server may have served others
        self._loaded: int | None = None  # version of the policy that vLLM has

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        """Queue requests as :class:`Engine` does; :meth:`poll` asks vLLM for all that was submitted until then."""
        limit = self.max_positions
        check_requests(requests, sampling, max_positions=limit, vocab_size=self.vocab_size, room=limit)
        assert not self._rollouts or sampling == self._sampling, (self._sampling, sampling)
        self._sampling = sampling
        rollouts = [rollout for request in requests for rollout in new_rollouts(request)]
        self._requests += requests
        self._rollouts += rollouts
        return rollouts

    def _work(self, count: int) -> list[Rollout]:
        requests, self._requests = self._requests, []
        rollouts, self._rollouts = self._rollouts, []
        if not rollouts:
            return []
        self.load_weights()
        counters_before = self.backend.counters()
        self.backend.draft_from(self.drafter)
        continuations = self._continuations(requests)
        salt = f"{self._name}-{self.policy_version}"
        completed: list[list[Drawn]] = []
        if continuations:
            completed = self.backend.complete(list(continuations.values()), self._settings(), salt)
        drawn = dict(zip(continuations, completed, strict=True))
        answers = iter(rollouts)
        for i, request in enumerate(requests):
            samples = drawn.get(i, [Drawn([], [], "length")])  # without room for a token
            samples = samples * (request.num_generations // len(samples))  # greedy samples are alike
            for ids, logprobs, finish_reason in samples:
                rollout = next(answers)
                rollout.response_ids += ids
                rollout.logprobs = list(logprobs)
                rollout.finish_reason = finish_reason
        if self._sampling.stop:
            stop = StopStrings(self.tokenizer, self._sampling.stop)
            for rollout in rollouts:
                _cut_at_stop(rollout, stop)
        greedy = self._sampling.temperature == 0  # the distribution sampled from has one token
        if greedy or self.backend.logprobs_mode not in vllm_logprobs_modes(self._sampling):
            for rollout in rollouts:
                rollout.logprobs = [0.0 if greedy else math.nan] * len(rollout.logprobs)
        self._count(counters_before, sum(len(rollout.logprobs) for rollout in rollouts))
        return rollouts

    def _continuations(self, requests: Sequence[Request]) -> dict[int, Continuation]:
        """Return what vLLM is to generate, by the index of the request, longest answers first if lengths are known."""
        continuations = {}
        lengths = self.lengths.predict(requests) if self.lengths else None
        for i in range(len(requests)) if lengths is None else longest_first(lengths):
            request = requests[i]
            ids = [*request.prompt_ids, *request.prefix_ids]
            room = min(request.max_new_tokens, self.max_positions - len(ids))
            if room <= 0 or not request.num_generations:
                continue
            # a later turn of an answer has other noise than the first; room for the sample ids in 63 bits
            turn = [len(request.prefix_ids)] if request.prefix_ids else []
            base = keyed_seed(self._sampling.seed, "vllm", *turn) >> 1
            n = request.num_generations if self._sampling.temperature else 1  # vLLM refuses several greedy samples
            expected_tokens = float(room) if lengths is None else min(lengths[i], float(room))
            continuations[i] = Continuation(ids, n, room, base + request.sample_id, expected_tokens)
        return continuations

    def _settings(self) -> dict[str, Any]:
        sampling = self._sampling
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # a server takes what is left out from the model's generation_config.json
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(sampling.stop),
            "stop_token_ids": self.eos_token_ids,
            "ignore_eos": True,  # those above are all
            "skip_special_tokens": False,  # stop strings may hold them
            "spaces_between_special_tokens": False,
            "logprobs": 0,  # those of the sampled tokens
        }

    def _count(self, counters_before: dict[str, float], generated: int) -> None:
        spent = {name: count - counters_before[name] for name, count in self.backend.counters().items()}
        spent["generated_tokens"] = generated
        if self.backend.drafts:
            # a step gives one token more than it accepts, but what it accepts behind an answer's end counts too
            spent["sample_steps"] = max(generated - spent["accepted_tokens"], spent["draft_steps"])
        for name, count in spent.items():
            self._stats[name] += count
        self._stats["prefill_tokens"] = self._stats["prompt_tokens"] - self._stats["cached_tokens"]

    def load_weights(self) -> None:
        if self._loaded != self.policy_version:
            self._stats["weight_bytes"] += self.backend.load(self.model)
            self._loaded = self.policy_version

    def sleep(self) -> None:
        if self.backend.sleep():
            self._loaded = None

    def close(self) -> None:
        self.backend.close()


def _cut_at_stop(rollout: Rollout, stop: StopStrings) -> None:
    """End an answer at its first stop string; vLLM does not see one that begins in the prefix."""
    for end in range(rollout.prefix_len + 1, len(rollout.response_ids) + 1):
        if stop.ends(rollout.response_ids[max(end - stop.window, rollout.stops_from) : end]):
            del rollout.response_ids[end:], rollout.logprobs[end - rollout.prefix_len :]
            rollout.finish_reason = "stop"
            return


def check_version(version: str, place: str) -> None:
    """Raise UserError for a vLLM that is too old."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise UserError(f"rollout.engine vllm needs vllm >= {oldest}; {place} is {version}")


class InProcess(Backend):
    """vLLM's engine in this process, on the device of the model.

    Where several processes train together each has an engine of its own; all must make theirs at the same time.

    On a GPU it can sleep: it then has neither weights nor a cache, and :meth:`load` wakes it: room for weights, the
    transfer, room for the cache, so that the cache is not there yet while weights are gathered.

    Args:
        model: gives device and type of the weights.
        folder: configuration and tokenizer of the model; its weights are not read.
        memory_bytes: size of vLLM's KV cache.
        logprobs_mode: vLLM's, one of ``vllm_logprobs_modes``.
        trust_remote_code: run Python code that comes with the folder.
        gathered: makes the weights, by their names in a checkpoint, where the model does not have them.
        longest_draft: most tokens that vLLM verifies at once; 0: it is made without drafts, and :meth:`draft_from` has
            no effect.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str | Path,
        *,
        memory_bytes: int,
        logprobs_mode: str = "processed_logprobs",
        trust_remote_code: bool = False,
        gathered: Callable[[], Iterator[tuple[str, torch.Tensor]]] | None = None,
        longest_draft: int = 0,
    ):
        self._gathered, self.logprobs_mode = gathered, logprobs_mode
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._vllm: Any = import_vllm()
        device = next(model.parameters()).device
        self.drafts = longest_draft > 0
        self._sleeps, self._asleep = device.type not in SLEEPLESS, False
        try:
            self._llm = self._vllm.LLM(
                str(folder),
                load_format="dummy",
                # of a base model whose adapter has trained one of the two, the folder says otherwise
                hf_overrides={"tie_word_embeddings": getattr(model.config, "tie_word_embeddings", False)},
                dtype=str(model.dtype).removeprefix("torch."),
                seed=0,
                # else the model's, or what fits into the memory; beyond the limit vLLM takes other factors for all
                max_model_len=rotary_limit(model.config.get_text_config()) or -1,
                kv_cache_memory_bytes=memory_bytes,
                gpu_memory_utilization=0.01,  # nothing but a start-up check of vLLM looks at it
                block_size=32 if device.type == "cpu" else 16,  # attention on a CPU takes multiples of 32
                enable_prefix_caching=True,
                # vLLM 0.32 cannot rewind a CPU's seeded generator after a chunk, and ends
                enable_chunked_prefill=device.type != "cpu",
                logprobs_mode=logprobs_mode,
                worker_extension_cls=WORKER,
                disable_log_stats=False,
                trust_remote_code=trust_remote_code,
                enforce_eager=device.type == "cpu",
                enable_sleep_mode=self._sleeps,
                **_place_among_ranks(device),
                **_drafting(longest_draft),
            )
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise UserError(f"vLLM cannot run the model {folder}: {on_one_line(error)}") from error
        self.max_positions: int = self._llm.model_config.max_model_len
        self.limited_by = "the limit of rollout.engine vllm (the model's, or what rollout.memory_bytes has room for)"

    def sleep(self) -> bool:
        """Drop weights and cache (level 2): :meth:`load` sends all weights again."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True
        return self._asleep

    def load(self, model: PreTrainedModel) -> int:
        """Send the weights straight from the memory of the policy; return their bytes."""
        if self._asleep:
            torch.cuda.empty_cache()  # vLLM takes memory without torch, which holds what the update has used
            self._llm.wake_up(tags=["weights"])
        weights = checkpoint_weights(model) if self._gathered is None else self._gathered()
        self._llm.collective_rpc("load_policy", args=(weights,))
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        return sum(weight.nbytes for _, weight in named_weights(model))

    def draft_from(self, drafter: Drafter | None) -> None:
        if not self.drafts:
            return
        from rlkernels.integrations.vllm import share_history

        share_history(None if drafter is None else drafter.history)

    def close(self) -> None:
        self.draft_from(None)

    def complete(self, continuations: Sequence[Continuation], settings: dict[str, Any], salt: str) -> list[list[Drawn]]:
        prompts = [{"prompt_token_ids": request.ids, "cache_salt": salt} for request in continuations]
        params = [
            self._vllm.SamplingParams(
                **settings,
                n=request.n,
                seed=request.seed,
                max_tokens=request.max_tokens,
                detokenize=bool(settings["stop"]),
            )
            for request in continuations
        ]
        try:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        except BaseException:  # such as KeyboardInterrupt; the next call would wait for these requests for ever
            engine = self._llm.llm_engine
            requests = engine.output_processor
            engine.abort_request([*requests.request_states, *requests.parent_requests], internal=True)
            raise
        return [[_drawn(sample) for sample in output.outputs] for output in outputs]

    def counters(self) -> dict[str, float]:
        metrics: dict[str, Any] = {metric.name: metric for metric in self._llm.get_metrics()}
        counts = {}
        for name, vllm_name in (COUNTERS | (DRAFT_COUNTERS if self.drafts else {})).items():
            metric = metrics[vllm_name]
            counts[name] = float(metric.value if hasattr(metric, "value") else metric.count)
        return counts


def _drawn(sample: Any) -> Drawn:
    """Return a sample of vLLM's output."""
    logprobs = [candidates[token].logprob for token, candidates in zip(sample.token_ids, sample.logprobs)]
    return Drawn(list(sample.token_ids), logprobs, sample.finish_reason)


def _drafting(longest: int) -> dict[str, Any]:
    """Return options of an engine that will get drafters; none if it will not."""
    if not longest:
        return {}
    from rlkernels.integrations.vllm import share_history

    share_history(RolloutHistory())  # there has to be one when the engine is made
    return {"speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": longest}}


def _place_among_ranks(device: torch.device) -> dict[str, Any]:
    """Return options of an engine of one process among several; none if it is alone."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return {}
    # vLLM joins the group of processes that is there, and asks these which one it is. With tensor parallelism of 1 each
    # is a replica of its own: nothing passes between them afterwards.
    rank = torch.distributed.get_rank()
    os.environ["RANK"] = str(rank)
    os.environ["LOCAL_RANK"] = str(rank if device.index is None else device.index)
    return {"distributed_executor_backend": "external_launcher"}


def import_vllm() -> Any:
    """Import vLLM."""
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise UserError(
            f"rollout.engine vllm needs the package vllm >= {'.'.join(map(str, OLDEST_VERSION))} here, or a server "
            f"(rollout.vllm_server); importing it says: {error}"
        ) from error
    check_version(vllm.__version__, "the package vllm")
    return vllm
