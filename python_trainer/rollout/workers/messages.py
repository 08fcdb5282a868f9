"""What the rollout workers and the process that they work for tell each other."""

from dataclasses import dataclass
from typing import NamedTuple

from python_trainer.data import Completion
from python_trainer.rollout.drafting import Answer
from python_trainer.rollout.engine import Request, SamplingParams
from python_trainer.rollout.ordering import Work


class Piece(NamedTuple):
    """Answers that stay together: a request, or the rest of one answer that comes from another worker."""

    number: int  # of the first answer, among all of this call
    request: Request
    expected: float  # new tokens of each answer
    out: Completion | None = None  # what the only answer has already


# to a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafts:
    """What a worker's own copy of the history needs to know."""

    history: bytes | None  # all of it, as of ``RolloutHistory.to_bytes``; None: as it was, and ``news``
    news: list[Answer]
    max_tokens: int
    pass_overhead: float


@dataclass(frozen=True)
class Begin:
    """A call of ``generate``."""

    sampling: SamplingParams
    longest: int  # tokens of a sequence
    overhead: float  # of a pass, in tokens
    spread: float  # of answers about their expected length, as a share of it
    drafts: Drafts | None


@dataclass(frozen=True)
class Add:
    pieces: list[Piece]


@dataclass(frozen=True)
class Give:
    """Asks for work that another worker could do; answered by Given."""


@dataclass(frozen=True)
class End:
    """Of a call of ``generate``; answered by Ended."""


@dataclass(frozen=True)
class Updated:
    """The shared weights have changed."""


@dataclass(frozen=True)
class Measure:
    """Asks for the time of a pass; answered by a float."""

    sequences: int
    tokens: int


# from a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    answers: list[tuple[int, Completion]]
    left: Work  # of this worker, as expected


@dataclass(frozen=True)
class Given:
    pieces: list[Piece]
    left: Work


@dataclass(frozen=True)
class Ended:
    stats: dict[str, float]  # of this call
    cpu_s: float
    busy_s: float  # wall time in passes


@dataclass(frozen=True)
class Ready:
    max_positions: int
    limited_by: str  # as of ``Engine``
    vocab_size: int
    room: int  # tokens in the KV cache


@dataclass(frozen=True)
class Failed:
    message: str
    user: bool  # a UserError, which needs no traceback
