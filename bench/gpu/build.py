"""Processes with a time limit: the build of the extension in the background, tests and tools in the foreground."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch

from bench.gpu.journal import ROOT
from rlkernels.proof.process import AFTER_KILL_S, DeviceLost, kill

SPARED_PROCESSORS = 4  # processors that the build leaves to measurements


class Build:
    """``setup.py build_ext`` for this device; if its CUDA part fails, a second build without it."""

    def __init__(self, device: str, *, with_cuda: bool = True):
        self.env = {**os.environ, "MAX_JOBS": str(max((os.cpu_count() or 1) - SPARED_PROCESSORS, 1))}
        if device == "cuda":
            self.env.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
        self.without_cuda = not with_cuda
        self.found = dict[str, Any]()  # the result
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 closed by stop
        self._start()

    def _start(self) -> None:
        self.start = time.monotonic()
        self.log.truncate(0)
        self.process = subprocess.Popen(
            ["nice", sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, stdout=self.log,
            stderr=subprocess.STDOUT, process_group=0,
            env={**self.env, "RLKERNELS_NO_CUDA": "1"} if self.without_cuda else self.env,
        )  # fmt: skip

    def done(self, seconds: float = 0.0) -> bool:
        """Wait up to ``seconds``; return whether the build has ended, with its result in ``found``."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                code = self.process.wait(timeout=max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                return False
            self._note(code)
            if code == 0 or self.without_cuda:
                return True
            self.without_cuda = True
            self._start()

    def _note(self, code: int) -> None:
        result: dict[str, Any] = {"ok": code == 0, "seconds": round(time.monotonic() - self.start, 1)}
        if code:
            result["log"] = read(self.log)[-4000:]
        if self.found:
            self.found["without_cuda"] = result
        else:
            self.found = result

    def stop(self) -> None:
        """End the compilers.

        Raises:
            DeviceLost: a compiler outlives SIGKILL.
        """
        if kill(self.process) is None:
            raise DeviceLost("the build outlives SIGKILL")
        self.log.close()


def run(command: Sequence[str], env: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """Run a command with its children for at most ``seconds``; return its exit code, None if cut, and its output.

    Raises:
        DeviceLost: the command outlives SIGKILL.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=max(seconds, 0.0))
        finally:
            if kill(process) is None:  # with its children
                raise DeviceLost(f"{' '.join(command)[:200]} is still there {AFTER_KILL_S:.0f} s after SIGKILL")
        text = read(log)
    return code, text if code is not None else f"{text}\ncut after {seconds:.0f} s".lstrip()


def read(log: IO[bytes]) -> str:
    """Return all that processes have written to a file."""
    log.seek(0)
    return log.read().decode(errors="replace")
