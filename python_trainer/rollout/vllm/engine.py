"""VLLMEngine: rollouts by vLLM, in the trainer's process or on a server."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from python_trainer.data import Request, Rollout
from python_trainer.errors import UserError
from python_trainer.keyed import keyed_seed
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import (
    Engine,
    SamplingParams,
    StopStrings,
    check_requests,
    check_sampling,
    new_rollouts,
)
from python_trainer.rollout.ordering import LengthHistory, expectations, longest_first, remember

OLDEST = (0, 32)
WORKER = "rlkernels.integrations.vllm_worker.PolicyWorker"
LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to this
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
    expected: float  # tokens of one, by earlier answers; max_tokens where nothing is known


class Drawn(NamedTuple):
    """One continuation, by vLLM."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str


class Backend(ABC):
    """Where vLLM runs.

    Attributes:
        max_positions, limited_by, on_first_rank: as of ``Engine``.
    """

    max_positions: int
    limited_by: str
    on_first_rank = False

    @abstractmethod
    def load(self, model: PreTrainedModel) -> int:
        """Gives vLLM the weights of the model -> how many bytes that took."""

    @abstractmethod
    def complete(self, asked: Sequence[Continuation], settings: dict[str, Any], salt: str) -> list[list[Drawn]]:
        """The samples of each; ``settings`` are those that all have in common, by vLLM's names."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Counts since vLLM was started, by the keys of ``COUNTERS``, and of ``DRAFT_COUNTERS`` where it can draft."""

    def draft_from(self, drafter: Drafter | None) -> None:  # noqa: B027
        """Lets vLLM draft from the drafter's history, where it can, until this is called again; None: no drafts."""

    def sleep(self) -> bool:
        """Frees memory until :meth:`load`, where it can -> whether it did, and has no weights any more."""
        return False

    def close(self) -> None:  # noqa: B027
        """Lets go of files and of what it drafts from."""


class VLLMEngine(Engine):
    """The trainer's engine over vLLM 0.32 or newer: :class:`PagedEngine` in what it takes and gives.

    vLLM gets the weights before it generates for the first time and after each ``policy_updated``. Its prefix cache is
    salted with the policy's version, so no key or value computed with other weights is ever used. Sample ``j`` of a
    request draws with a seed made of (``sampling.seed``, ``sample_id + j``): the same one for the same numbers, but
    not the one of :class:`PagedEngine`, and on a GPU only as reproducible as vLLM's batches are.

    Args:
        model: the policy, trained elsewhere; the weights are read from it, and it is never run.
        backend: vLLM in this process (``in_process.InProcess``) or on servers (``servers.Servers``).
        eos_token_ids: tokens that end an answer.
        tokenizer: needed for stop strings only.
        lengths: of earlier answers; with it, vLLM is asked for long ones first. None: in the order of the requests.
    """

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
        self.on_first_rank = backend.on_first_rank
        self.lengths = lengths
        self._waiting: list[tuple[Sequence[Request], list[Rollout]]] = []  # submitted, with one and the same sampling
        self._sampling = SamplingParams()
        self._name = uuid4().hex  # of this run: a server may have served others
        self._loaded: int | None = None  # version of the policy that vLLM has
        self._seen = backend.counters()
        steps = ["sample_steps"] if "accepted_tokens" in self._seen else []
        self._stats: dict[str, float] = dict.fromkeys((*OWN_COUNTERS, *self._seen, *steps), 0)

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the engine was made.

        ``generated_tokens``; ``prompt_tokens`` of prompts and prefixes, once per sample; ``cached_tokens`` of those,
        found in vLLM's prefix cache; ``prefill_tokens``, the others; ``forward_passes``; ``preemptions``;
        ``weight_bytes`` of weights that were written for servers or handed to vLLM in this process. But for the first
        and the last they are vLLM's own counts: on a server they include what others ask it meanwhile. Where it can
        draft also ``draft_tokens``, ``accepted_tokens``, ``sample_steps`` (a sample's part in a pass) and
        ``draft_steps``, those with a draft.
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
        self.load_weights()
        self.backend.draft_from(self.drafter)
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
        """Makes the rollouts what other engines give."""
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
        now, generated = self.backend.counters(), sum(len(rollout.logprobs) for rollout in rollouts)
        spent = {name: count - self._seen[name] for name, count in now.items()} | {"generated_tokens": generated}
        self._seen = now
        if "accepted_tokens" in spent:
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
    """Ends an answer at its first stop string; vLLM does not see one that begins in the prefix."""
    for end in range(rollout.prefix_len + 1, len(rollout.response_ids) + 1):
        if stop.ends(rollout.response_ids[max(end - stop.window, 0) : end]):
            del rollout.response_ids[end:], rollout.logprobs[end - rollout.prefix_len :]
            rollout.finish_reason = "stop"
            return


def check_version(version: str, what: str) -> None:
    """Raises UserError for a vLLM that is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(f"rollout.engine vllm needs vllm >= {oldest}; {what} is {version}")
