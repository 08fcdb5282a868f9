"""A server that answers as vLLM's does, with tokens that depend on prompt and seed alone."""

import json
import random
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from rlkernels.integrations.vllm_worker import read_policy

LIMIT = 128
EOS = 63


def draw(body):
    """What is drawn for a request to ``/v1/completions``: answers of any length, each by its own seed."""
    choices = []
    for i in range(body["n"]):
        rng = random.Random(f"{body['prompt']}/{body['seed'] + i}")
        length = rng.randint(1, body["max_tokens"])
        ids = [*rng.choices(range(EOS), k=length - 1), EOS]
        logprobs = {"token_logprobs": [rng.uniform(-4.5, -3.8) for _ in ids]}
        choices.append({"index": i, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"})
    return {"choices": choices}


class FakeServer(ThreadingHTTPServer):
    """Answers from a dictionary: path -> answer, function of the request, or status of a refusal."""

    request_queue_size = 128  # connections that wait to be accepted; more than are made at a time

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = []
        self.settings = {"logprobs_mode": "processed_logprobs", "max_model_len": LIMIT, "vocab_size": 64,
                         "model_type": "qwen2"}  # fmt: skip
        self.answers = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "policy"}]}}
        self.counted = {"prompt_tokens_total": 5, "prompt_tokens_cached_total": 2, "iteration_tokens_total_count": 3}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self):
        """The requests for tokens."""
        return [body for path, body in self.bodies if path == "/v1/completions"]


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self):
        if self.path == "/metrics":
            lines = [f'vllm:{name}{{engine="{i}"}} {n:.1f}' for name, n in self.server.counted.items() for i in (0, 1)]
            return self.send("\n".join(["# HELP vllm:prompt_tokens_total Tokens", *lines]))
        return self.send(self.server.answers.get(self.path, 404))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        if body.get("method") == "load_policy":
            folder, *adapter = body["args"]
            self.server.loaded = dict(read_policy(folder, *(adapter or [None]), torch.device("cpu")))
        answer = self.server.answers.get(self.path, {"results": [self.server.settings]})
        return self.send(answer(body) if callable(answer) else answer)

    def send(self, answer):
        status, text = (answer, "refused") if isinstance(answer, int) else (200, answer)
        data = (text if isinstance(text, str) else json.dumps(text)).encode()
        with suppress(ConnectionError):  # who asked may not wait any more
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def serving():
    """A running one."""
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def urls(servers):
    return [server.url for server in servers]
