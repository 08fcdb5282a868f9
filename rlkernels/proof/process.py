"""A process that does jobs and may die or hang; every wait here has an end."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
START_S = 300.0  # until a worker has imported what it needs
AFTER_KILL_S = 10.0  # a process that is still there after SIGKILL sits in the driver: the device is lost


class DeviceLost(RuntimeError):
    """A process outlived SIGKILL: start nothing more on the device."""


def kill(process: subprocess.Popen[Any]) -> int | None:
    """Kill a process and its group -> exit code; None if it is still there after ``AFTER_KILL_S``."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(timeout=AFTER_KILL_S)
    except subprocess.TimeoutExpired:
        return None


class Worker:
    """A process that does jobs one by one, started again after it died or hung.

    It reads a job a line on standard input. It answers with lines of "@" and JSON on standard output; the last one
    about a job has ``ok``.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]):
        self.command, self.env, self.noise = [*command], {**env}, b""
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Message, limit: float, end: float, hear: Callable[[Message], None] = lambda message: None
            ) -> Message:  # fmt: skip
        """Give a job to the worker and return its last message; ``hear`` gets the others as they come.

        Without a last message ``ok`` is False, ``message`` says why, and ``cut`` is True if the budget ended first.
        Raises as :meth:`close`.

        Args:
            limit: seconds from one message to the next; beyond them the worker counts as hung.
            end: of the budget, on the monotonic clock.
        """
        if self.process is None and not (ready := self._start(end))["ok"]:
            return ready
        process = self.process
        assert process and process.stdin
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # it died after its last answer
            return self._bury(process, limit)
        last = self._listen(process, limit, end, hear)
        if "traceback" in last:  # a CUDA error spoils all that follows in a process
            self.close()
        return last

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

    def _listen(self, process: subprocess.Popen[bytes], limit: float, end: float, hear: Callable[[Message], None]
                ) -> Message:  # fmt: skip
        """Return the last message; if the process dies or the time is up before, what became of it."""
        assert process.stdout and process.stderr
        pending, self.noise, patience = b"", b"", time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while (left := min(end, patience) - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 65536)
                    if key.fileobj is process.stderr:
                        self.noise = (self.noise + data)[-2000:]
                        if not data:
                            selector.unregister(key.fileobj)
                        continue
                    if not data:
                        return self._bury(process, limit)
                    *lines, pending = (pending + data).split(b"\n")
                    for message in (json.loads(line[1:]) for line in lines if line.startswith(b"@")):
                        if "ok" in message:
                            return message
                        patience = time.monotonic() + limit
                        hear(message)
        return self._bury(process, limit, cut=time.monotonic() >= end)

    def _bury(self, process: subprocess.Popen[bytes], limit: float, cut: bool = False) -> Message:
        """End a worker that gave no last message -> why it gave none; ``cut``: the budget ended."""
        try:
            code = process.wait(timeout=0.0 if cut else 2.0)
        except subprocess.TimeoutExpired:
            self.close()
            return {"ok": False} | ({"cut": True} if cut else {"message": f"hung for {limit:.0f} s and was killed"})
        said = self.noise.decode(errors="replace").strip()
        self.close()
        return {"ok": False, "message": f"the process died with code {code}: {said}"}

    def close(self) -> None:
        """End the process. Raises DeviceLost if it outlives SIGKILL."""
        process, self.process = self.process, None
        if process is None:
            return
        code = kill(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        if code is None:
            raise DeviceLost(f"a process is still there {AFTER_KILL_S:.0f} s after SIGKILL")
