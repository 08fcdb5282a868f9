"""Stand-ins for vLLM, on a server and within the trainer, whose tokens depend on prompt and seed alone."""

import json
import random
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch

from python_trainer.rollout.vllm.engine import COUNTERS, DRAFT_COUNTERS
from rlkernels.integrations.vllm_worker import PolicyWorker

MAX_LENGTH = 128
EOS = 63


def draw(body):
    """Return answers to a request to ``/v1/completions``, of any length, each by its own seed."""
    choices = []
    for i in range(body["n"]):
        rng = random.Random(f"{body['prompt']}/{body['seed'] + i}")
        length = rng.randint(1, body["max_tokens"])
        ids = [*rng.choices(range(EOS), k=length - 1), EOS]
        logprobs = {"token_logprobs": [rng.uniform(-4.5, -3.8) for _ in ids]}
        choices.append({"index": i, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"})
    return {"choices": choices}


class FakeWorker(PolicyWorker):
    """Read weights as the real one, for no model."""

    model_runner = SimpleNamespace(device=torch.device("cpu"))


class FakeServer(ThreadingHTTPServer):
    """Answers from a dictionary: path -> answer, function of the request, or status code of a refusal."""

    request_queue_size = 128  # connections waiting to be accepted, more than tests make at a time

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = []
        self.worker = FakeWorker()
        self.settings = {"logprobs_mode": "processed_logprobs", "max_model_len": MAX_LENGTH, "vocab_size": 64,
                         "model_type": "qwen2"}  # fmt: skip
        self.answers = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "policy"}]}}
        self.counted = {"prompt_tokens_total": 5, "prompt_tokens_cached_total": 2, "iteration_tokens_total_count": 3}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def token_requests(self):
        """Return the requests for tokens."""
        return [body for path, body in self.bodies if path == "/v1/completions"]


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self):
        if self.path == "/metrics":
            lines = [f'vllm:{name}{{engine="{i}"}} {n:.1f}' for name, n in self.server.counted.items() for i in (0, 1)]
            return self.answer("\n".join(["# HELP vllm:prompt_tokens_total Tokens", *lines]), None)
        return self.answer(self.server.answers.get(self.path, 404), None)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        if body.get("method") == "load_policy":
            weights, adapter, deltas = [*body["args"], None, False][:3]
            loaded = self.server.worker.policy_weights(weights, adapter, deltas)
            if loaded is not None:
                self.server.loaded = {name: weight.clone() for name, weight in loaded}
            answer = {"results": [{"loaded": loaded is not None}]}
            return self.answer(self.server.answers.get(self.path, answer), body)
        return self.answer(self.server.answers.get(self.path, {"results": [self.server.settings]}), body)

    def answer(self, answer, body):
        answer = answer(body) if callable(answer) else answer
        status, text = (answer, "refused") if isinstance(answer, int) else (200, answer)
        data = (text if isinstance(text, str) else json.dumps(text)).encode()
        with suppress(ConnectionError):  # the client may be gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def serving():
    """Run a server, and yield it."""
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


class FakeLLM:
    """Records its calls in ``events``, and fails where the real one does: without weights or a cache."""

    def __init__(self, folder, **options):
        self.folder = folder
        self.options = options
        self.events = []
        self.loaded = {}
        self.allocated = {"weights", "kv_cache"}
        self.model_config = SimpleNamespace(max_model_len=MAX_LENGTH)
        self.prompt_tokens = 0
        type(self).last = self

    def get_metrics(self):
        counts = {"vllm:prompt_tokens": self.prompt_tokens}
        names = COUNTERS | (DRAFT_COUNTERS if "speculative_config" in self.options else {})
        return [SimpleNamespace(name=name, value=counts.get(name, 0.0)) for name in names.values()]

    def sleep(self, level):
        assert self.options["enable_sleep_mode"] and self.allocated == {"weights", "kv_cache"}
        self.lost = self.loaded
        self.allocated = set()
        self.loaded = {}
        self.events.append(f"sleep {level}")

    def wake_up(self, tags):
        assert not self.allocated & set(tags)
        self.allocated |= set(tags)
        self.events += [f"wake {tag}" for tag in tags]

    def collective_rpc(self, method, args):
        assert method == "load_policy" and "weights" in self.allocated
        self.loaded = {name: weight.clone() for name, weight in args[0]}
        self.events.append("load" if "kv_cache" in self.allocated else "load without a cache")

    def generate(self, prompts, params, use_tqdm):
        assert self.allocated == {"weights", "kv_cache"} and self.loaded
        if self.events[-1] != "generate":
            self.events.append("generate")
        self.prompt_tokens += sum(
            settings.n * len(p["prompt_token_ids"]) for p, settings in zip(prompts, params, strict=True)
        )
        return [
            SimpleNamespace(outputs=[self._output(choice) for choice in drawn["choices"]])
            for drawn in (
                draw(vars(settings) | {"prompt": p["prompt_token_ids"]}) for p, settings in zip(prompts, params)
            )
        ]

    @staticmethod
    def _output(choice):
        pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        logprobs = [{token: SimpleNamespace(logprob=value)} for token, value in pairs]
        return SimpleNamespace(token_ids=choice["token_ids"], logprobs=logprobs, finish_reason=choice["finish_reason"])


def install(patch, *, sleeps):
    """Install the fake in vLLM's place, on a device that can sleep or one that cannot; ``patch`` is pytest's."""
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "RANK", "LOCAL_RANK"):
        patch.setenv(name, "0")  # so that what is set comes undone
    module = SimpleNamespace(__version__="0.32.0", LLM=FakeLLM, SamplingParams=SimpleNamespace)
    patch.setitem(sys.modules, "vllm", module)
    patch.setattr("python_trainer.rollout.vllm.engine.SLEEPLESS", () if sleeps else ("cpu",))
