"""The place of this process among those of a run: the environment variables that torchrun sets."""

import os
from dataclasses import dataclass

from python_trainer.errors import UserError

# Seconds that processes wait for one another: while the first one asks vLLM's servers the others do nothing. One that
# ends is noticed at once.
DDP_TIMEOUT = 7200.0
LAUNCHER = "torchrun sets it; a process that starts without torchrun needs none"


@dataclass(frozen=True)
class Launch:
    """Process ``rank`` out of ``size``, and process ``local_rank`` of its host."""

    rank: int
    local_rank: int
    size: int


def read_launch() -> Launch:
    """Read the place of this process; without any variable it is the only one.

    Raises:
        UserError: a variable is no number in its range.
    """
    size = _number("WORLD_SIZE", 1, minimum=1)
    return Launch(_number("RANK", 0, maximum=size - 1), _number("LOCAL_RANK", 0), size)


def meeting_point() -> str:
    """Return ``address:port`` where several processes find each other.

    Raises:
        UserError: a variable is missing or wrong.
    """
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(f"{name} must be set where WORLD_SIZE is above 1: {LAUNCHER}")
    return f"{os.environ['MASTER_ADDR']}:{_number('MASTER_PORT', 0, minimum=1, maximum=(1 << 16) - 1)}"


def _number(name: str, default: int, *, minimum: int = 0, maximum: int | None = None) -> int:
    text = os.environ.get(name, str(default))
    is_number = text.isascii() and text.isdecimal()
    if not is_number or int(text) < minimum or (maximum is not None and int(text) > maximum):
        bound = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise UserError(f"{name} must be an integer {bound}, got {text!r}: {LAUNCHER}")
    return int(text)
