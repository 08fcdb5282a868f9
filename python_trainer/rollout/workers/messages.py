"""What the rollout workers and the process that they work for tell each other."""

from dataclasses import dataclass
from typing import NamedTuple

from python_trainer.data import Request, Rollout
from python_trainer.rollout.drafting import HistoryEntry
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.ordering import Work


class Piece(NamedTuple):
    """Answers that stay together: a request, or the rest of one answer that comes from another worker."""

    number: int  # of the first answer, among all that were submitted
    request: Request
    expected: float  # new tokens of each answer
    begun: Rollout | None = None  # the only answer, where it has tokens already


@dataclass(frozen=True)
class HistoryUpdate:
    """What a worker's own copy of the history needs to know."""

    history: bytes | None  # all of it, as of ``RolloutHistory.to_bytes``; None: as it was, and ``news``
    news: list[HistoryEntry]
    max_tokens: int
    pass_overhead: float | None


@dataclass(frozen=True)
class Begin:
    """To a worker: answers will come, until :class:`End`."""

    sampling: SamplingParams
    overhead: float  # of a pass, in tokens
    spread: float  # of answers about their expected length, as a share of it
    drafts: HistoryUpdate | None


@dataclass(frozen=True)
class Add:
    """To a worker: what it is to generate."""

    pieces: list[Piece]


@dataclass(frozen=True)
class Give:
    """Asks for work that another worker could do; answered by Given."""


@dataclass(frozen=True)
class End:
    """To a worker: all is generated; answered by Ended."""


@dataclass(frozen=True)
class Updated:
    """The shared weights have changed."""


@dataclass(frozen=True)
class Measure:
    """Asks for the time of a pass; answered by a float."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class Done:
    """From a worker: finished answers by number."""

    answers: list[tuple[int, Rollout]]
    left: Work  # of this worker, as expected


@dataclass(frozen=True)
class Given:
    """From a worker: what it gives away."""

    pieces: list[Piece]
    left: Work


@dataclass(frozen=True)
class Ended:
    """From a worker: what it did since Begin."""

    stats: dict[str, float]
    cpu_s: float
    busy_s: float  # wall time in passes


@dataclass(frozen=True)
class Ready:
    """From a worker that has started: the limits of its engine."""

    max_positions: int
    limited_by: str  # as of ``Engine``
    vocab_size: int
    room: int  # tokens in the KV cache


@dataclass(frozen=True)
class Failed:
    """From a worker that ends."""

    message: str
    error: type[Exception]  # as of ``kind_of``; RuntimeError, with the traceback as its message, where that is None
