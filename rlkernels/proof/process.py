"""A worker process that may die or hang; every wait here has a limit."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Required, TypedDict

Message = dict[str, Any]  # a job, or news about it


class Comparison(TypedDict):
    """How a result compares with plain torch's, from ``worker.finding``."""

    right: bool
    error: float | None  # largest; None: shapes, dtypes, integers, NaN or infinities differ
    allowed: float


class Answer(TypedDict, total=False):
    """The last message about a job."""

    ok: Required[bool]
    wall_s: float
    # Where not ok. The worker sets ``message``, ``no_memory`` and ``traceback`` after an exception; :class:`Worker`
    # sets ``message``, ``cut`` and ``no_device`` for a process that is silent.
    message: str
    cut: bool  # the budget ended first
    no_device: bool  # the worker did not start: this says nothing about kernels
    no_memory: bool  # the device had too little: neither does this
    traceback: str
    # a check
    right: bool
    error: float | None
    allowed: float
    repeats: bool  # two runs gave the same bits
    # a timing: by backend
    judged: dict[str, Comparison]
    times: dict[str, list[float]]  # seconds of each round
    # a compilation
    launched: list[tuple[str, str]]  # names and PTX of kernels


START_S = 300.0  # for the imports of a worker
AFTER_KILL_S = 10.0  # a process that outlives SIGKILL hangs in the driver: the device is lost


class DeviceLost(RuntimeError):
    """A process outlived SIGKILL: start nothing more on the device."""


def kill(process: subprocess.Popen[Any]) -> int | None:
    """Kill a process and its group; return the exit code, None if it still runs after ``AFTER_KILL_S``."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(timeout=AFTER_KILL_S)
    except subprocess.TimeoutExpired:
        return None


class Worker:
    """A process that does jobs one by one, and is started again after it died or hung.

    It reads jobs from standard input, one a line. It answers on standard output with lines of "@" and JSON; the last
    one about a job has ``ok``.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]):
        self.command = [*command]
        self.env = {**env}
        self.stderr_tail = b""
        self.process: subprocess.Popen[bytes] | None = None

    def ask(
        self, job: Message, limit: float, end: float, on_message: Callable[[Message], None] = lambda message: None
    ) -> Message:
        """Give a job to the worker and return its last message; ``on_message`` gets the others as they come.

        Without a last message ``ok`` is False, ``message`` says why, and ``cut`` is True if the budget ended first.
        ``no_device`` is True if the worker did not start, so that it tried no job. Raises as :meth:`close`.

        Args:
            job: what the worker is to do.
            limit: seconds from one message to the next; a worker that takes longer counts as hung.
            end: of the budget, on the monotonic clock.
            on_message: gets each message but the last.
        """
        if self.process and self.process.poll() is not None:  # it died after its last answer, without this job
            self.close()
        if self.process is None and not (ready := self._start(end))["ok"]:
            return {"no_device": True, **ready}
        process = self.process
        assert process and process.stdin
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # it died before it read the job
            return {"no_device": True, **self._end_silent(process, limit)}
        answer = self._listen(process, limit, end, on_message)
        if "traceback" in answer:  # after a CUDA error every later call in the process fails
            self.close()
        return answer

    def _start(self, end: float) -> Message:
        """Start the worker, and return its first message."""
        self.process = subprocess.Popen(
            self.command, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            process_group=0,
        )  # fmt: skip
        ready = self._listen(self.process, START_S, end, lambda message: None)
        if not ready["ok"]:
            self.close()
        return ready

    def _listen(
        self, process: subprocess.Popen[bytes], limit: float, end: float, on_message: Callable[[Message], None]
    ) -> Message:
        """Return the last message; if the process dies or the time runs out first, the reason."""
        assert process.stdout and process.stderr
        pending = b""
        self.stderr_tail = b""
        hang_time = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while (timeout := min(end, hang_time) - time.monotonic()) > 0:
                for key, _ in selector.select(timeout):
                    data = os.read(key.fd, 65536)
                    if key.fileobj is process.stderr:
                        self.stderr_tail = (self.stderr_tail + data)[-2000:]
                        if not data:
                            selector.unregister(key.fileobj)
                        continue
                    if not data:
                        return self._end_silent(process, limit)
                    *lines, pending = (pending + data).split(b"\n")
                    for message in (json.loads(line[1:]) for line in lines if line.startswith(b"@")):
                        if "ok" in message:
                            return message
                        hang_time = time.monotonic() + limit
                        on_message(message)
        return self._end_silent(process, limit, cut=time.monotonic() >= end)

    def _end_silent(self, process: subprocess.Popen[bytes], limit: float, cut: bool = False) -> Message:
        """End a worker that gave no last message, and return the reason; ``cut``: the budget ended."""
        try:
            code = process.wait(timeout=0.0 if cut else 2.0)
        except subprocess.TimeoutExpired:
            self.close()
            if cut:
                return {"ok": False, "cut": True}
            return {"ok": False, "message": f"hung for {limit:.0f} s and was killed"}
        stderr = self.stderr_tail.decode(errors="replace").strip()
        self.close()
        return {"ok": False, "message": f"the process died with code {code}: {stderr}"}

    def close(self) -> None:
        """End the process; raise DeviceLost if it outlives SIGKILL."""
        process = self.process
        if process is None:
            return
        self.process = None
        code = kill(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        if code is None:
            raise DeviceLost(f"a process still runs {AFTER_KILL_S:.0f} s after SIGKILL")
