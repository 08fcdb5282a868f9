"""What goes into a rollout engine and what comes out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from python_trainer.data import Completion

if TYPE_CHECKING:
    from python_trainer.rollout.drafting import Drafter
    from python_trainer.rollout.ordering import LengthHistory


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Order: temperature, top-k, top-p. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0  # all noise is keyed by (seed, sample id, position)
    stop: tuple[str, ...] = ()  # stop strings; need the engine's tokenizer


@dataclass(frozen=True)
class Request:
    """One prompt to continue, ``num_samples`` times.

    Sample ``j`` draws its noise with sample id ``sample_id + j``, so give requests ids ``num_samples`` apart.
    """

    prompt_ids: Sequence[int]
    prefix_ids: Sequence[int] = ()  # the start of the answer, kept as it is; not part of the completion
    num_samples: int = 1
    max_new_tokens: int = 256
    sample_id: int = 0


class Engine(Protocol):
    """Generates completions with the current policy."""

    drafter: "Drafter | None"
    """Guesses tokens that the engine then verifies; None: no drafts."""

    lengths: "LengthHistory | None"
    """How long earlier answers were, which decides the order of work; None: the order of the requests."""

    @property
    def max_positions(self) -> int:
        """Most tokens of a sequence, prompt and answer together: an answer that comes so far ends there."""
        ...

    @property
    def limited_by(self) -> str:
        """What that limit is, for messages: "the limit of ..."."""
        ...

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Completions in the order of the requests, the samples of one request side by side."""
        ...

    def pass_seconds(self, sequences: int, tokens: int) -> float:
        """Time of a forward pass over so many new tokens of each of so many sequences."""
        ...

    def policy_updated(self) -> None:
        """The weights have changed: nothing computed with the old ones may be used again."""
        ...

    def close(self) -> None:
        """Lets go of processes that the engine has started; a later call starts them again."""
        ...

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the engine was made: generated_tokens, prefill_tokens, forward_passes, ..."""
        ...
