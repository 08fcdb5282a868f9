"""Compiles the extension in the background: most of what a GPU is asked first needs none of it."""

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from bench.gpu.journal import ROOT
from bench.gpu.process import DeviceLost, kill

SPARED = 4  # processors that are left to what is measured meanwhile


class Build:
    """``setup.py build_ext`` for this device; without its CUDA part when that fails, so that the rest goes on."""

    def __init__(self, device: str, *, with_cuda: bool = True):
        self.env = {**os.environ, "MAX_JOBS": str(max((os.cpu_count() or 1) - SPARED, 1))}
        if device == "cuda":
            self.env.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
        self.without_cuda, self.found = not with_cuda, dict[str, Any]()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 closed by stop
        self._start()

    def _start(self) -> None:
        self.began = time.monotonic()
        self.log.truncate(0)
        self.process = subprocess.Popen(
            ["nice", sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, stdout=self.log,
            stderr=subprocess.STDOUT, process_group=0,
            env={**self.env, "RLKERNELS_NO_CUDA": "1"} if self.without_cuda else self.env,
        )  # fmt: skip

    def done(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, waiting for so long at most; ``found`` then says what came of it."""
        end = time.monotonic() + seconds
        while True:
            try:
                code = self.process.wait(timeout=max(end - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                return False
            self._note(code)
            if code == 0 or self.without_cuda:
                return True
            self.without_cuda = True
            self._start()

    def _note(self, code: int) -> None:
        result: dict[str, Any] = {"ok": code == 0, "seconds": round(time.monotonic() - self.began, 1)}
        if code:
            self.log.seek(0)
            result["log"] = self.log.read().decode(errors="replace")[-4000:]
        if self.found:
            self.found["without_cuda"] = result
        else:
            self.found = result

    def stop(self) -> None:
        """Ends the compilers.

        Raises:
            DeviceLost: one outlives SIGKILL.
        """
        if kill(self.process) is None:
            raise DeviceLost("the build outlives SIGKILL")
        self.log.close()
