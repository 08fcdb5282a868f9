"""Ctrl-C and SIGTERM let the current step finish; a second one does not wait."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Within it the first signal is noted; the next raises KeyboardInterrupt, as Ctrl-C does without it.

    Signals reach the main thread only; in any other one this does nothing. ``loud`` says on standard error that one
    came.

    Attributes:
        name: of the signal that came, None before.
    """

    def __init__(self, *, loud: bool = True) -> None:
        self.name: str | None = None
        self.loud = loud
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if self.loud:
            print(f"{self.name}: finishing the step, then saving; once more stops at once", file=sys.stderr)
