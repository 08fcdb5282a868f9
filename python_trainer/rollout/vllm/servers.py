"""vLLM servers as the backend of :class:`VLLMEngine`, over HTTP: one, or several that share the work.

A server may run anywhere that can read the folder of the weights.
"""

import http.client
import io
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.model.lora import AdaptedWeight
from python_trainer.model.weights import checkpoint_weights, set_usual_mode
from python_trainer.rollout.ordering import balance
from python_trainer.rollout.settings import RolloutConfig, vllm_logprobs_modes
from python_trainer.rollout.vllm.engine import COUNTERS, WORKER, Backend, Continuation, Drawn, check_version
from python_trainer.rollout.vllm.replies import (
    Completion,
    Expected,
    LoadResults,
    Models,
    PolicyResults,
    Reply,
    Version,
    read_reply,
)
from rlkernels.integrations.transformers_attention import rotary_limit
from rlkernels.integrations.vllm_worker import DELTA
from rlkernels.weights.delta import encode, has_zstandard

T = TypeVar("T")
R = TypeVar("R", bound=Reply)

TIMEOUT_S = 60  # for a connection, and for a short request in all
LOOK_SECONDS = 10.0  # between two looks at a server whose answer is not complete
LARGEST_ANSWER = 1 << 30  # bytes
HEADERS = {"Content-Type": "application/json"}
SERVER_METRICS = {f"{name}_{kind}" for name in COUNTERS.values() for kind in ("count", "total")}
START_COMMAND = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode {} --worker-extension-cls " + WORKER
CONNECTIONS = 64  # to a server: vLLM batches simultaneous requests
BASE, ADAPTER = "base", "adapter.safetensors"
WHOLE_EVERY = 64  # transfers: nothing that a delta left behind lasts longer


class Server:
    """A server that was started as ``START_COMMAND`` says.

    Args:
        settings: of generation, for which its log-probabilities must be the right ones; None: the default ones.

    Attributes:
        serves: facts that all servers of one model share.
        takes_deltas: its environment has zstandard.
        given_up: True ends all waiting for replies, within LOOK_SECONDS.
        max_positions, limited_by: as of ``Engine``.

    Raises:
        UserError: nothing answers there, vLLM is too old, was not started that way, or serves another model.
    """

    def __init__(self, model: PreTrainedModel, url: str, settings: RolloutConfig | None = None):
        settings = settings or RolloutConfig()
        self.url = url.rstrip("/")
        self.given_up = False
        self._time_limit = settings.vllm_request_timeout
        modes = vllm_logprobs_modes(settings)
        self._start = START_COMMAND.format(modes[0] if modes else "processed_logprobs")
        check_version(self._ask(Version, "/version").version, f"the server {self.url}")
        self._name = self._ask(Models, "/v1/models").data[0].id
        workers = self._rpc(PolicyResults, "policy_settings").results
        self.takes_deltas = all(worker.deltas for worker in workers)
        served = workers[0]
        if modes and served.logprobs_mode != modes[0]:
            raise UserError(
                f"the vLLM server {self.url} gives {served.logprobs_mode}, not those of the distribution that is "
                f"trained, with rollout.temperature, top_p and top_k as they are; start it with: {self._start}"
            )
        config = model.config.get_text_config()
        for name in ("model_type", "vocab_size"):
            if getattr(served, name) != getattr(config, name):
                raise UserError(
                    f"the vLLM server {self.url} serves {self._name}, whose {name} is {getattr(served, name)}; the "
                    f"policy's is {getattr(config, name)}"
                )
        self.vocab_size = served.vocab_size
        self.max_positions = served.max_model_len
        if (limit := rotary_limit(config)) is not None and self.max_positions > limit:
            raise UserError(
                f"the vLLM server {self.url} takes up to {self.max_positions} tokens, and beyond {limit} the model's "
                "rotary factors change: vLLM then takes those of long sequences for all, unlike the trainer; start it "
                f"with --max-model-len {limit}"
            )
        self.serves: dict[str, Any] = {"model": self._name} | served.model_dump(exclude={"max_model_len", "deltas"})
        self.limited_by = f"the limit of the vLLM server {self.url} (--max-model-len)"

    def complete(self, request: Continuation, settings: dict[str, Any], salt: str) -> list[Drawn]:
        """Generate the samples of one request; ``settings`` are those of all requests, by vLLM's names."""
        common = settings | {"model": self._name, "cache_salt": salt, "return_token_ids": True}
        body = common | {"prompt": request.ids, "n": request.n, "max_tokens": request.max_tokens, "seed": request.seed}
        end_tokens = frozenset(settings["stop_token_ids"])
        expected = Expected(request.n, request.max_tokens, self.vocab_size, end_tokens, bool(settings["stop"]))
        reply = self._ask(Completion, "/v1/completions", body, expected)
        if reply.interrupted:
            reasons = ", ".join(sorted(reply.interrupted))
            raise UserError(
                f"rollout.vllm_server: {self.url} ended answers early ({reasons}): it was stopped or paused"
            )
        return [
            Drawn(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason) for choice in reply.choices
        ]

    def counters(self) -> dict[str, float]:
        """Read counts since the server was started, by the keys of ``COUNTERS``."""
        sums: dict[str, float] = {}
        for line in self._read("/metrics").splitlines():
            name, _, labels_and_value = line.partition("{")  # one line for each engine of the server
            if name in SERVER_METRICS:
                try:
                    count = float(labels_and_value.rpartition(" ")[2])
                except ValueError:
                    count = math.nan
                if not 0 <= count < math.inf:
                    raise self._wrong("/metrics", line, f"{name} must be a finite number >= 0")
                sums[name] = sums.get(name, 0.0) + count
        return {
            name: sums.get(f"{metric}_count", sums.get(f"{metric}_total", 0.0)) for name, metric in COUNTERS.items()
        }

    def load_policy(self, *args: Any) -> bool:
        """Let all workers read weights; return whether they have them: not if a delta starts from other weights."""
        results = self._rpc(LoadResults, "load_policy", *args).results
        return all(worker is None or worker.loaded for worker in results)

    def _rpc(self, kind: type[R], method: str, *args: Any) -> R:
        """Call a method of all workers; return their answers."""
        try:
            return self._ask(kind, "/collective_rpc", {"method": method, "args": args})
        except UserError as error:
            raise UserError(
                f"the vLLM server {self.url} does not take weights ({method}: {error}); start it with: {self._start}"
            ) from error

    def _ask(self, kind: type[R], path: str, body: dict[str, Any] | None = None, expected: Expected | None = None) -> R:
        """Send a request to the server; return its reply."""
        text = self._read(path, body)
        try:
            return read_reply(kind, text, expected)
        except ValueError as error:
            raise self._wrong(path, text, str(error)) from error

    def _wrong(self, path: str, text: str, problem: str) -> UserError:
        return UserError(f"rollout.vllm_server: {self.url}{path} must answer as vLLM, got {text[:100]!r}: {problem}")

    def _read(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        try:
            status, text = read(self.url + path, data, self._check_health, self._time_limit)
        except AnswerTimeout as error:
            where = f"{self.url}{path}: {error}"
            raise UserError(f"rollout.vllm_server: {where}, the limit of rollout.vllm_request_timeout") from error
        except (OSError, ValueError) as error:  # ValueError: the address cannot be one
            raise UserError(f"rollout.vllm_server: no vLLM server answers at {self.url}: {error}") from error
        if status >= 400:
            raise UserError(f"{path} of the vLLM server {self.url} answers {status}: {' '.join(text.split())[:300]}")
        return text

    def _check_health(self) -> None:
        """End a wait that is of no use; /collective_rpc of an engine that has died would last for ever."""
        if self.given_up:
            raise UserError(f"rollout.vllm_server: nobody waits for this answer of {self.url} any more")
        status, _ = read(f"{self.url}/health")
        if status != 200:
            raise UserError(
                f"rollout.vllm_server: the engine of {self.url} has died (/health answers {status}): start it again"
            )


class AnswerTimeout(TimeoutError):
    """An answer that is not complete when its time is over."""


class TimedReader(io.RawIOBase):
    """Read from a socket until a moment at which the whole answer must be there.

    Args:
        limit: seconds until then.
        look: called every LOOK_SECONDS; what it raises ends the reading. None: nothing is called.
    """

    def __init__(self, sock: Any, limit: float, look: Callable[[], object] | None):
        self.sock, self.limit, self.look = sock, limit, look
        self.end = time.monotonic() + limit
        self.next_look = time.monotonic() + LOOK_SECONDS if look else math.inf

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while (now := time.monotonic()) < self.end:
            if self.look and now >= self.next_look:
                self.look()
                self.next_look = time.monotonic() + LOOK_SECONDS
            self.sock.settimeout(max(min(self.end, self.next_look) - now, 0.001))
            with suppress(TimeoutError):
                return int(self.sock.recv_into(buffer))
        raise AnswerTimeout(f"its answer is not complete after {self.limit:g} s")

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return what ``http.client`` asks a socket for."""
        return io.BufferedReader(self)


def read(
    url: str, body: bytes | None = None, alive: Callable[[], object] | None = None, limit: float = math.inf
) -> tuple[int, str]:
    """Ask a server, by GET or, with a body, by POST; return status and text of its answer.

    Args:
        alive: called every LOOK_SECONDS until the answer is there, which may last an hour; what it raises ends the
            wait. None: the answer must be there after TIMEOUT_S.
        limit: seconds after which the answer must be there.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST" if body is not None else "GET", parts.path or "/", body, HEADERS)
        reader: Any = TimedReader(connection.sock, limit if alive else TIMEOUT_S, alive)
        response = http.client.HTTPResponse(reader)
        response.begin()
        data = bytearray()
        while block := response.read(1 << 20):
            data += block
            if len(data) > LARGEST_ANSWER:
                raise OSError(f"its answer has more than {LARGEST_ANSWER} bytes")
        if response.length:  # by its own account
            raise http.client.IncompleteRead(bytes(data), response.length)
        return response.status, data.decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


class AdapterFiles:
    """The files of a policy with adapters, which a server's ``PolicyWorker`` merges.

    The weights without adapters are written once, and stay: servers read them again each time, from
    the memory where their machine keeps files that were read, and hold no copy of their own.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str], folder: Path):
        self.folder = folder.absolute()
        self.names: dict[str, str] = {}  # in the model -> in a checkpoint
        for name in names:
            weight = model.get_parameter(name)
            ((there, found), *more) = checkpoint_weights(model, [(name, weight)])
            if more or found.shape != weight.shape:
                raise UserError(
                    f"rollout.vllm_server: {name} has an adapter, but is divided in the model's files; leave it out of "
                    "model.lora.target_modules"
                )
            self.names[name] = there
        self.written = False  # the weights are there
        self._base: dict[str, torch.Tensor] = {}  # until then, once the policy's are merged
        self._parts: dict[str, torch.Tensor] = {}

    def remember(self, name: str, weight: AdaptedWeight) -> None:
        """Keep a weight that has just been merged: ``Policy.on_merge``."""
        if not self.written and name not in self._base:  # a resumed run merges several times before
            self._base[name] = weight.base.detach().to("cpu", copy=True)
        scale = torch.tensor(weight.scale, dtype=torch.float64)
        for part, value in (("down", weight.down), ("up", weight.up), ("scale", scale)):
            self._parts[f"{self.names[name]}.{part}"] = value.detach().to("cpu", copy=True).contiguous()

    def write(self, model: PreTrainedModel) -> tuple[int, list[str]]:
        """Write what servers do not have yet; return its bytes, and the arguments of ``PolicyWorker.load_policy``."""
        count, places = 0, [str(self.folder / BASE)]
        if not self.written:
            state = model.state_dict()
            state |= {name: base.to(state[name].dtype) for name, base in self._base.items()}
            model.save_pretrained(self.folder / BASE, state_dict=state)
            self.written, self._base = True, {}
            count = sum(path.stat().st_size for path in (self.folder / BASE).glob("*.safetensors"))
        if self._parts:
            save_file(self._parts, self.folder / ADAPTER)
            count += (self.folder / ADAPTER).stat().st_size
            places.append(str(self.folder / ADAPTER))
        return count, places


class Servers(Backend):
    """Servers of one model, for one trainer at a time. Rank 0 makes one and asks it; other ranks get a copy.

    Each answers a part of what is asked at once, of about as many expected tokens; all samples of a request are on one
    server, which computes their prompt once. Samples have seeds of their own, so they do not depend on the number of
    servers.

    Weights go through files, and every server must see ``folder`` by the same absolute path. A server gets deltas if
    zstandard is installed here and there; both sides then keep a copy of the weights on the host. It gets all weights
    if it has other ones than those before, and every WHOLE_EVERY times.

    Args:
        model: what the servers should be serving.
        urls: where they listen.
        folder: for the weights; made for each transfer and removed after it.
        adapters: of a policy that trains nothing else; their files are in ``folder`` too, until :meth:`close`.
        settings: of generation; None: the default ones.
    """

    on_first_rank = True

    def __init__(
        self,
        model: PreTrainedModel,
        urls: Sequence[str],
        folder: Path,
        adapters: AdapterFiles | None = None,
        settings: RolloutConfig | None = None,
    ):
        self.folder, self.adapters = folder.absolute(), adapters
        shutil.rmtree(self.folder, ignore_errors=True)  # a killed run may have left it, and servers read all files
        self.servers = [Server(model, url, settings) for url in urls]
        one = self.servers[0]
        self.logprobs_mode = one.serves["logprobs_mode"]
        for other in self.servers[1:]:
            for name, value in one.serves.items():
                if other.serves.get(name) != value:
                    raise UserError(
                        f"rollout.vllm_server must name servers of the same model, got {name} {value} at {one.url} and "
                        f"{other.serves.get(name)} at {other.url}"
                    )
        self._sent: dict[str, torch.Tensor] | None = None  # what servers that take deltas have
        self._loads = 0
        tightest = min(self.servers, key=lambda server: server.max_positions)
        self.max_positions, self.limited_by = tightest.max_positions, tightest.limited_by

    def load(self, model: PreTrainedModel) -> int:
        try:
            if self.adapters is None:
                return self._send(model)
            sent, places = self.adapters.write(model)
            set_usual_mode(self.folder)  # a server may be another user's
            self._each(lambda server: server.load_policy(*places))
        except (OSError, SafetensorError) as error:
            raise UserError(f"the weights for rollout.vllm_server cannot be written: {error}") from error
        finally:
            if self.adapters is None:
                self.close()
        return sent

    def _send(self, model: PreTrainedModel) -> int:
        """Send a delta to servers with the weights before, and all weights to the others; return bytes written."""
        weights, whole = dict(checkpoint_weights(model)), self._loads % WHOLE_EVERY == 0
        takers = [server for server in self.servers if server.takes_deltas and has_zstandard()]
        written, behind = 0, self.servers
        if takers and self._sent is not None and not whole:
            delta, file = encode(weights, self._sent), self.folder / f"policy{DELTA}"
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(delta)
            written += len(delta)
            taken = dict(zip(takers, self._each(lambda server: server.load_policy(str(file)), takers)))
            behind = [server for server in self.servers if not taken.get(server)]
        if behind:
            model.save_pretrained(self.folder)
            written += sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
            set_usual_mode(self.folder)  # a server may be another user's
            further = {True: (None, True), False: ()}
            self._each(lambda server: server.load_policy(str(self.folder), *further[server in takers]), behind)
        if takers:
            self._sent = self._sent or {name: torch.empty_like(w, device="cpu") for name, w in weights.items()}
            for name, weight in weights.items():
                self._sent[name].copy_(weight)
        self._loads += 1
        return written

    def close(self) -> None:
        self.adapters = None  # the weights that they belong to go: who asks again sends all
        shutil.rmtree(self.folder, ignore_errors=True)

    def complete(self, continuations: Sequence[Continuation], settings: dict[str, Any], salt: str) -> list[list[Drawn]]:
        lengths = [request.expected_tokens for request in continuations]
        tokens = [request.n * request.expected_tokens for request in continuations]
        shares = balance(lengths, tokens, len(self.servers))
        futures: dict[int, Future[list[Drawn]]] = {}
        pools = [ThreadPoolExecutor(CONNECTIONS) for _ in self.servers]
        try:
            for server, pool, share in zip(self.servers, pools, shares):
                for i in share:
                    futures[i] = pool.submit(server.complete, continuations[i], settings, salt)
            for future in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
                future.result()  # raise the error of a failed request
            return [futures[i].result() for i in range(len(continuations))]
        except BaseException:
            for server in self.servers:
                server.given_up = True  # ends the threads, which Python would wait for
            raise
        finally:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)  # waiting requests are never sent

    def counters(self) -> dict[str, float]:
        counts = self._each(lambda server: server.counters())
        return {name: sum(count[name] for count in counts) for name in COUNTERS}

    def _each(self, ask: Callable[[Server], T], servers: Sequence[Server] | None = None) -> list[T]:
        """Call a function for servers, by default all, at the same time; return the results."""
        servers = self.servers if servers is None else servers
        with ThreadPoolExecutor(len(servers)) as pool:
            return list(pool.map(ask, servers))
