"""Signals: those that end a run, which let the step finish, and the one that ends a call which takes too long."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from python_trainer.errors import tell

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN = 1.0  # seconds until a call that caught OutOfTime gets the next one


class OutOfTime(BaseException):
    """A call took longer than its limit. It is no Exception, so that a loop of retries does not catch it."""


def call_within(seconds: float | None, function: Callable[[], T]) -> T:
    """Return what a function returns.

    The main thread calls it itself, since some functions need that for signals of their own. Any other thread lets a
    new one call it, which is left behind if it is late.

    Raises:
        OutOfTime: it took longer than so many seconds; None: there is no limit.
    """
    if seconds is None:
        return function()
    if threading.current_thread() is threading.main_thread():
        with _time_limit(seconds):
            return function()
    result = Future[T]()

    def work() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        raise error if result.done() else OutOfTime from None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread within the block once the time is over, and then every AGAIN seconds.

    A thread sends the signal, which interrupts sleeping and waiting. Code that never lets another thread run, such as
    a regular expression, is interrupted by the timer of the system. It counts processor time, so no signal comes to a
    program that waits, and it leaves the timer of wall time to the function.
    """
    deadline, ended = time.monotonic() + seconds, threading.Event()

    def expire(number: int, frame: FrameType | None) -> None:
        left = deadline - time.monotonic()
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left, AGAIN))
        if left <= 0 and not ended.is_set():
            raise OutOfTime

    def insist() -> None:
        patience = seconds
        while not ended.wait(patience):
            signal.pthread_kill(main, signal.SIGVTALRM)
            patience = AGAIN

    main, thread = threading.get_ident(), threading.Thread(target=insist, daemon=True)
    before = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # it sends nothing any more, for which there would be no handler
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)  # None: of another language


class StopSignal:
    """Notes the first Ctrl-C or SIGTERM, so that the step can finish; the next one raises KeyboardInterrupt.

    Signals reach the main thread only; in any other thread this does nothing.

    Attributes:
        name: of the signal that came, None before.
    """

    def __init__(self) -> None:
        self.name: str | None = None
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
        tell(f"{self.name}: finishing the step, then saving; once more stops at once")
