"""Signals: those that end a run, which let the step finish, and the one that ends a call which takes too long."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from python_trainer.errors import tell

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Slurm warns by SIGUSR1
TOLD = 0  # a byte in the place of a signal's number
POLL = 1.0  # seconds between looks for signals of other processes
PATIENCE = 1.0  # seconds until a word about what the end of a run waits for
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
    """Note the first signal that stops a run, so that the step can finish; the next one raises KeyboardInterrupt.

    A thread acts on the first signal at once, wherever the main thread is. A signal that the terminal sends when it
    closes stops nothing. Signals reach the main thread only; in any other thread this does nothing.

    Args:
        act: called in the thread with the name of the signal, and an event that is set once it need not begin.
        elsewhere: returns the name of a signal that another process got, or None; asked every POLL seconds.

    Attributes:
        name: of the signal that came to this process, None before.
    """

    def __init__(
        self,
        act: Callable[[str, threading.Event], None] = lambda name, ended: None,
        elsewhere: Callable[[], str | None] | None = None,
    ) -> None:
        self.name: str | None = None
        self._act, self._elsewhere = act, elsewhere
        self._acted, self._ended = threading.Event(), threading.Event()
        self._told: str | None = None  # by conclude()
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "StopSignal":
        global _active
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
                self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._lose_terminal)
            self._ended.clear()
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
            self._thread.start()
            _active = self
        return self

    def __exit__(self, *exc: object) -> None:
        global _active
        if self._thread is None:
            return
        _active = None
        self.release()
        self._wake()
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            tell("a checkpoint is being written; once more stops at once")
            self._thread.join()
        self._thread = None
        os.close(self._reader)
        os.close(self._writer)

    def release(self) -> None:
        """Give all signals back to their former handlers."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def conclude(self, name: str) -> None:
        """Wait until the thread has acted on a signal, which may have come to another process, or let it give up."""
        if self._thread is not None:
            self._told = name
            self._wake()
            self._acted.wait()

    def _wake(self) -> None:
        self._ended.set()
        with suppress(BlockingIOError):  # it has enough to read
            os.write(self._writer, bytes([TOLD]))

    def _watch(self) -> None:
        name = None
        while name is None:
            name = self._next()
            if name is None and self._ended.is_set():  # and no signal came
                return
        if not self._acted.is_set():
            try:
                self._act(name, self._ended)
            finally:
                self._acted.set()

    def _next(self) -> str | None:
        """Wait for a signal; return its name, None for a byte of another one and where the time is over."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if not poll.poll(None if self._elsewhere is None else 1000 * POLL):
            try:
                return self._elsewhere and self._elsewhere()
            except RuntimeError:  # torch's, where the process with the store has ended
                self._elsewhere = None
                return None
        numbers = os.read(self._reader, 1 << 10)
        name = next((signal.Signals(number).name for number in numbers if number in SIGNALS), None)
        return name or (self._told if TOLD in numbers else None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        tell(f"{self.name}: finishing the step, then saving; once more stops at once")

    def _lose_terminal(self, number: int, frame: FrameType | None) -> None:
        tell("SIGHUP: the terminal is closed, and the run goes on")


_active: StopSignal | None = None


def _release_in_fork() -> None:
    """Let signals end a process that a reward function forked, and wake no thread of this one."""
    if _active is not None:
        _active.release()


os.register_at_fork(after_in_child=_release_in_fork)
