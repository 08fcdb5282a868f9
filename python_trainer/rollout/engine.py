"""The interface of engines, which generate answers with the current policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from python_trainer.data import Request, Rollout
from python_trainer.errors import UserError
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.ordering import LengthHistory

PROGRESS_REPORTS = 50  # within one call of generate


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Order: temperature, top-k, top-p. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0  # all noise is keyed by (seed, sample id, position)
    stop: tuple[str, ...] = ()  # stop strings; need the engine's tokenizer


class Engine(ABC):
    """Answers requests: :meth:`submit` queues them, :meth:`poll` generates and returns finished answers.

    After an error during generation an engine must not be used again.

    Attributes:
        max_positions: most tokens of a sequence, prompt and answer together; an answer that reaches it ends there.
        limited_by: name of that limit, for messages: "the limit of ...".
        policy_version: how often the weights have changed.
        drafter: guesses tokens that the engine then verifies; None: no drafts.
        keep_answers: later requests continue the answers, so their keys and values stay in the cache if possible.
        lengths: of earlier answers; longer ones are generated first. None: the order of the requests.
        on_first_rank: rank 0 alone calls the engine, for all ranks.
        on_progress: called within :meth:`generate` with the numbers of finished and of all answers; None: not called.
    """

    max_positions: int
    limited_by: str
    policy_version = 0
    drafter: Drafter | None = None
    keep_answers = False
    lengths: LengthHistory | None = None
    on_first_rank = False
    on_progress: Callable[[int, int], None] | None = None

    def __init__(self, counters: Iterable[str] = ()):
        self._ready: list[Rollout] = []  # finished, and not handed out yet
        self._stats: dict[str, float] = dict.fromkeys(counters, 0)

    @property
    def stats(self) -> dict[str, float]:
        """Return counts since the engine was made.

        ``generated_tokens``; ``prefill_tokens`` computed of prompts and prefixes; ``cached_tokens`` of those that were
        found in the cache or shared; ``forward_passes``; ``preemptions``; with drafts ``sample_steps``, each pass once
        for every sample that drew from it, ``draft_steps`` of those with a draft, ``draft_tokens`` offered and
        ``accepted_tokens`` of those.
        """
        return dict(self._stats)

    @abstractmethod
    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        """Queue requests; return the rollouts that :meth:`poll` will fill, those of one request side by side.

        Further requests may be submitted during generation, with the same ``sampling``.

        Raises:
            UserError: a request does not fit into the KV cache. Nothing has been queued then.
        """

    @abstractmethod
    def _work(self, count: int) -> list[Rollout]:
        """Generate until at least ``count`` rollouts are finished, or all; return those."""

    def poll(self, at_least: int = 1) -> list[Rollout]:
        """Generate until so many rollouts are finished, or all; return those, each once, or none at the end."""
        finished, self._ready = self._ready, []
        if len(finished) < at_least:
            finished += self._work(at_least - len(finished))
        return finished

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        """Submit requests, and poll until all are finished; return the rollouts in the order of the requests."""
        rollouts = self.submit(requests, sampling)
        missing = set(rollouts)
        earlier: list[Rollout] = []  # answers to earlier submissions, for the next poll
        per_poll = len(missing) if self.on_progress is None else -(-len(missing) // PROGRESS_REPORTS)
        while missing:
            for rollout in self.poll(min(per_poll, len(missing))):
                if rollout not in missing:
                    earlier.append(rollout)
                missing.discard(rollout)
            if self.on_progress is not None:
                self.on_progress(len(rollouts) - len(missing), len(rollouts))
        self._ready += earlier
        return rollouts

    def policy_updated(self) -> None:
        """Forget everything that was computed with the old weights, because the weights have changed.

        To be called when every answer is finished.
        """
        self.policy_version += 1

    def pass_seconds(self, sequences: int, tokens: int) -> float | None:
        """Measure a forward pass over so many new tokens of each of so many sequences, in seconds; None: unknown."""
        return None

    def load_weights(self) -> None:  # noqa: B027
        """Take over the policy's weights if they have changed; ranks with an engine each call it together."""

    def sleep(self) -> None:  # noqa: B027
        """Free as much memory of the device as possible; the next request wakes the engine."""

    def close(self) -> None:  # noqa: B027
        """Close files and connections; a later call opens them again."""


def _of_inner(name: str) -> Any:
    """Forward an attribute to ``self.inner``."""
    return property(lambda self: getattr(self.inner, name), lambda self, value: setattr(self.inner, name, value))


class WrappedEngine(Engine):
    """An engine that lets another one, ``inner``, generate."""

    max_positions, limited_by, on_first_rank = map(_of_inner, ("max_positions", "limited_by", "on_first_rank"))
    policy_version, drafter, lengths = map(_of_inner, ("policy_version", "drafter", "lengths"))
    stats, pass_seconds = map(_of_inner, ("stats", "pass_seconds"))
    policy_updated, load_weights, sleep, close = map(_of_inner, ("policy_updated", "load_weights", "sleep", "close"))

    def __init__(self, inner: Engine):
        super().__init__()
        self.inner = inner


class StopStrings:
    """Find stop strings in the text of the last few tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, strings: Sequence[str]):
        assert tokenizer is not None, "stop strings need the engine's tokenizer"
        self.tokenizer = tokenizer
        self.strings = strings
        # a token brings at least one byte; a few more tokens for a character that starts before the string
        self.window = max(len(string.encode()) for string in strings) + 4

    def ends(self, response_ids: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string; an earlier stop string does not count."""
        tail = list(response_ids[-self.window :])
        text, shorter = (
            str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in (tail, tail[:-1])
        )
        return any(text.rfind(string) > shorter.rfind(string) for string in self.strings)


def new_rollouts(request: Request) -> list[Rollout]:
    """Return the rollouts that an engine fills for a request; each begins with the given prefix."""
    return [
        Rollout(request.prompt_ids, list(request.prefix_ids), len(request.prefix_ids), stops_from=request.stops_from)
        for _ in range(request.num_generations)
    ]


def check_requests(
    requests: Sequence[Request], sampling: SamplingParams, *, max_positions: int, vocab_size: int, room: int
) -> None:
    """Raise UserError for a request that does not fit into the KV cache, which holds ``room`` tokens."""
    assert sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0, sampling
    for request in requests:
        assert request.num_generations >= 0 and request.max_new_tokens >= 0, request
        context = [*request.prompt_ids, *request.prefix_ids]
        assert 0 < len(context) <= max_positions and 0 <= min(context) <= max(context) < vocab_size, request
        longest = min(len(context) + request.max_new_tokens, max_positions)
        if longest > room:
            raise UserError(
                f"an answer of {longest} tokens, prompt included, does not fit into a KV cache of {room} tokens; raise "
                "rollout.memory_bytes"
            )
