"""Processes of limited time: nothing here waits without an end, not even for what SIGKILL does not take away."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any

from bench.gpu.journal import ROOT

Message = dict[str, Any]
START_S = 120.0  # until a worker has imported what it needs
AFTER_KILL_S = 10.0  # what is still there then sits in the driver: the device is taken to be lost


class DeviceLost(RuntimeError):
    """A process outlived SIGKILL: nothing more is to be started on the device."""


def kill(process: subprocess.Popen[Any], seconds: float | None = None) -> int | None:
    """Kills a process with all of its group -> exit code; None when it is still there after so long."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(timeout=AFTER_KILL_S if seconds is None else seconds)
    except subprocess.TimeoutExpired:
        return None


def run(command: list[str], env: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Runs a command and all that it starts for at most so long -> (exit code, None where it was cut; what it said).

    Raises:
        DeviceLost: it outlives SIGKILL.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        process_group=0,
    )  # fmt: skip
    assert process.stdout
    said, end = bytearray(), time.monotonic() + max(seconds, 0.0)
    try:
        ended = read_all(process.stdout, said, end)
        code = process.wait(timeout=max(end - time.monotonic(), 0.0)) if ended else None
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # whatever it left behind goes too
        if kill(process) is None:
            raise DeviceLost(f"{' '.join(command)[:200]} is still there {AFTER_KILL_S:.0f} s after SIGKILL")
        process.stdout.close()
    text = said.decode(errors="replace")
    return code, text if code is not None else f"{text}\ncut after {seconds:.0f} s".lstrip()


def read_all(stream: IO[bytes], into: bytearray, end: float) -> bool:
    """Reads what comes until the stream ends -> True, or until ``end`` of the monotonic clock -> False."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0:
            if selector.select(left):
                data = os.read(stream.fileno(), 65536)
                if not data:
                    return True
                into += data
    return False


class Worker:
    """A process that does jobs one by one, started again after it died or hung."""

    def __init__(self, env: dict[str, str], cases: str):
        self.env, self.cases, self.noise = env, cases, b""
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Message, limit: float, end: float, hear: Callable[[Message], None]) -> Message:
        """The last message about a job; ``hear`` is told the others as they come.

        ``limit``: seconds from one message to the next, after which the worker hangs; ``end``: of the budget, on the
        monotonic clock. Where there is no last message ``ok`` is False, and ``cut`` tells that it was the budget.

        Raises:
            DeviceLost: the worker outlives SIGKILL.
        """
        if self.process is None and (failure := self._start(end)):
            return failure
        process = self.process
        assert process and process.stdin
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            last = self._listen(process, limit, end, hear)
        except BrokenPipeError:  # it died after its last answer
            last = None
        if last is None:
            return {"ok": False, **self._bury(process, limit, time.monotonic() >= end)}
        if "traceback" in last:  # the worker leaves after an exception
            self.close()
        return last

    def _start(self, end: float) -> Message:
        """Empty where the worker is ready, else why it is not."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.worker", self.cases], cwd=ROOT, env=self.env, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0,
        )  # fmt: skip
        ready = self._listen(self.process, START_S, end, lambda message: None)
        return {} if ready else {"ok": False, **self._bury(self.process, START_S, time.monotonic() >= end)}

    def _listen(self, process: subprocess.Popen[bytes], limit: float, end: float, hear: Callable[[Message], None]
                ) -> Message | None:  # fmt: skip
        """The last message; None when the process died or the time is up. Reads bytes as they come: lines may wait."""
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
                        return None
                    *lines, pending = (pending + data).split(b"\n")
                    for message in (json.loads(line[1:]) for line in lines if line.startswith(b"@")):
                        if "ok" in message:
                            return message
                        patience = time.monotonic() + limit
                        hear(message)
        return None

    def _bury(self, process: subprocess.Popen[bytes], limit: float, cut: bool) -> Message:
        try:
            code = process.wait(timeout=0.0 if cut else 2.0)
        except subprocess.TimeoutExpired:
            self.close()
            return {"cut": True} if cut else {"hung": True, "message": f"hung for {limit:.0f} s and was killed"}
        said = self.noise.decode(errors="replace").strip()
        self.close()
        return {"message": f"the process died with code {code}: {said}"}

    def close(self) -> None:
        """Ends the process.

        Raises:
            DeviceLost: it outlives SIGKILL.
        """
        process, self.process = self.process, None
        if process is None:
            return
        code = kill(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        if code is None:
            raise DeviceLost(f"the worker is still there {AFTER_KILL_S:.0f} s after SIGKILL")
