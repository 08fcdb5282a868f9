"""vLLM servers as the backend of :class:`VLLMEngine`, over HTTP: one, or several that share the work.

A server may run anywhere that can read the folder of the weights.
"""

import http.client
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.model.lora import AdaptedWeight
from python_trainer.model.weights import checkpoint_weights
from python_trainer.rollout.ordering import balance
from python_trainer.rollout.vllm.engine import COUNTERS, WORKER, Backend, Continuation, Drawn, check_version
from python_trainer.run_directory import usual_mode
from rlkernels.integrations.transformers_attention import rotary_limit

T = TypeVar("T")

TIMEOUT_S = 60  # without a byte of one that answers; a busy server answers late
LOOK_SECONDS = 10.0  # between two looks at a server that has not answered yet
HEADERS = {"Content-Type": "application/json"}
START = f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --worker-extension-cls {WORKER}"
CONNECTIONS = 64  # to a server: vLLM batches simultaneous requests
BASE, ADAPTER = "base", "adapter.safetensors"


class Server:
    """A server that was started as ``START`` says.

    Attributes:
        serves: what servers of one model have in common.
        given_up: True ends the waiting for answers, within LOOK_SECONDS.
        max_positions, limited_by: as of ``Engine``.

    Raises:
        UserError: nothing answers there, vLLM is too old, was not started that way, or serves another model.
    """

    def __init__(self, model: PreTrainedModel, url: str):
        self.url, self.given_up = url.rstrip("/"), False
        check_version(str(self._ask("/version", None, "version")), f"the server {self.url}")
        self._name: str = self._ask("/v1/models", None, "data", 0, "id")
        settings = self.rpc("policy_settings")
        if settings["logprobs_mode"] != "processed_logprobs":
            raise UserError(
                f"the vLLM server {self.url} gives {settings['logprobs_mode']}, not those of the distribution that it "
                f"samples from; start it with: {START}"
            )
        config = model.config.get_text_config()
        for name in ("model_type", "vocab_size"):
            if settings[name] != getattr(config, name):
                raise UserError(
                    f"the vLLM server {self.url} serves {self._name}, whose {name} is {settings[name]}; the policy's "
                    f"is {getattr(config, name)}"
                )
        self.max_positions: int = settings.pop("max_model_len")
        if (limit := rotary_limit(config)) is not None and self.max_positions > limit:
            raise UserError(
                f"the vLLM server {self.url} takes up to {self.max_positions} tokens, and beyond {limit} the model's "
                "rotary factors change: vLLM then takes those of long sequences for all, unlike the trainer; start it "
                f"with --max-model-len {limit}"
            )
        self.serves: dict[str, Any] = {"model": self._name} | settings
        self.limited_by = f"the limit of the vLLM server {self.url} (--max-model-len)"

    def complete(self, one: Continuation, settings: dict[str, Any], salt: str) -> list[Drawn]:
        """Generates the samples of one; ``settings`` are those that all have in common, by vLLM's names."""
        common = settings | {"model": self._name, "cache_salt": salt, "return_token_ids": True}
        body = common | {"prompt": one.ids, "n": one.n, "max_tokens": one.max_tokens, "seed": one.seed}
        choices = sorted(self._ask("/v1/completions", body, "choices"), key=lambda choice: choice["index"])
        drawn = [Drawn(one["token_ids"], one["logprobs"]["token_logprobs"], one["finish_reason"]) for one in choices]
        if other := {answer.finish_reason for answer in drawn} - {"stop", "length"}:  # such as "abort", with a part
            raise UserError(
                f"rollout.vllm_server: {self.url} ended answers early ({', '.join(other)}): it was stopped or paused"
            )
        return drawn

    def counters(self) -> dict[str, float]:
        """Reads counts since the server was started, by the keys of ``COUNTERS``."""
        sums: dict[str, float] = {}
        for line in self._read("/metrics").splitlines():
            if not line.startswith("#"):
                name, _, rest = line.partition("{")  # one line for each engine of the server
                sums[name] = sums.get(name, 0.0) + float(rest.rpartition(" ")[2] or 0)
        return {
            name: sums.get(f"{theirs}_count", sums.get(f"{theirs}_total", 0.0)) for name, theirs in COUNTERS.items()
        }

    def rpc(self, method: str, *args: str) -> Any:
        """Calls a method of all workers -> the answer of the first."""
        try:
            return self._ask("/collective_rpc", {"method": method, "args": args}, "results", 0)
        except UserError as error:
            raise UserError(
                f"the vLLM server {self.url} does not take weights ({method}: {error}); start it with: {START}"
            ) from error

    def _ask(self, path: str, body: dict[str, Any] | None = None, *places: str | int) -> Any:
        """Asks the server -> its answer, or what is at these places in it, one within the other."""
        text = self._read(path, body)
        try:
            answer = json.loads(text)
            for place in places:
                answer = answer[place]
            return answer
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"rollout.vllm_server: {self.url}{path} must answer as vLLM, got {text[:100]!r}") from error

    def _read(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        try:
            status, text = read(self.url + path, data, self._check_health)
        except (OSError, ValueError) as error:  # ValueError: the address cannot be one
            raise UserError(f"rollout.vllm_server: no vLLM server answers at {self.url}: {error}") from error
        if status >= 400:
            raise UserError(f"{path} of the vLLM server {self.url} answers {status}: {' '.join(text.split())[:300]}")
        return text

    def _check_health(self) -> None:
        """Ends a wait that is of no use; /collective_rpc of an engine that has died would last for ever."""
        if self.given_up:
            raise UserError(f"rollout.vllm_server: nobody waits for this answer of {self.url} any more")
        status, _ = read(f"{self.url}/health")
        if status != 200:
            raise UserError(
                f"rollout.vllm_server: the engine of {self.url} has died (/health answers {status}): start it again"
            )


def read(url: str, body: bytes | None = None, alive: Callable[[], object] | None = None) -> tuple[int, str]:
    """Asks a server, by GET or, with a body, by POST -> status and text of its answer.

    Args:
        alive: called every LOOK_SECONDS while nothing comes, which may last an hour; what it raises ends the wait.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST" if body is not None else "GET", parts.path or "/", body, HEADERS)
        response = http.client.HTTPResponse(connection.sock)
        while alive is not None:
            connection.sock.settimeout(LOOK_SECONDS)
            try:
                response.fp.peek(1)  # over TLS other bytes come before, so the socket alone cannot tell
                break
            except TimeoutError:
                alive()
                response = http.client.HTTPResponse(connection.sock)  # the file of one reads no more
        connection.sock.settimeout(TIMEOUT_S)
        response.begin()
        return response.status, response.read().decode(errors="replace")
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
        """Keeps a weight that has just been merged: ``Policy.on_merge``."""
        if not self.written and name not in self._base:  # a resumed run merges several times before
            self._base[name] = weight.base.detach().to("cpu", copy=True)
        scale = torch.tensor(weight.scale, dtype=torch.float64)
        for part, value in (("down", weight.down), ("up", weight.up), ("scale", scale)):
            self._parts[f"{self.names[name]}.{part}"] = value.detach().to("cpu", copy=True).contiguous()

    def write(self, model: PreTrainedModel) -> tuple[int, list[str]]:
        """Writes what servers do not have yet -> bytes, and the arguments of ``PolicyWorker.load_policy``."""
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

    Weights go through files, and every server must see ``folder`` by the same absolute path.

    Args:
        model: what the servers should be serving.
        urls: where they listen.
        folder: for the weights; made for each transfer and removed after it.
        adapters: of a policy that trains nothing else; their files are in ``folder`` too, until :meth:`close`.
    """

    on_first_rank = True

    def __init__(self, model: PreTrainedModel, urls: Sequence[str], folder: Path, adapters: AdapterFiles | None = None):
        self.folder, self.adapters = folder.absolute(), adapters
        shutil.rmtree(self.folder, ignore_errors=True)  # a killed run may have left it, and servers read all files
        self.servers = [Server(model, url) for url in urls]
        one = self.servers[0]
        for other in self.servers[1:]:
            for name, value in one.serves.items():
                if other.serves.get(name) != value:
                    raise UserError(
                        f"rollout.vllm_server must name servers of the same model, got {name} {value} at {one.url} and "
                        f"{other.serves.get(name)} at {other.url}"
                    )
        tightest = min(self.servers, key=lambda server: server.max_positions)
        self.max_positions, self.limited_by = tightest.max_positions, tightest.limited_by

    def load(self, model: PreTrainedModel) -> int:
        try:
            if self.adapters is not None:
                sent, places = self.adapters.write(model)
            else:
                model.save_pretrained(self.folder)
                sent = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
                places = [str(self.folder)]
            usual_mode(self.folder)  # a server may be another user's
            self._each(lambda server: server.rpc("load_policy", *places))
        except (OSError, SafetensorError) as error:
            raise UserError(f"the weights for rollout.vllm_server cannot be written: {error}") from error
        finally:
            if self.adapters is None:
                self.close()
        return sent

    def close(self) -> None:
        self.adapters = None  # the weights that they belong to go: who asks again sends all
        shutil.rmtree(self.folder, ignore_errors=True)

    def complete(self, asked: Sequence[Continuation], settings: dict[str, Any], salt: str) -> list[list[Drawn]]:
        lengths, tokens = [one.expected for one in asked], [one.n * one.expected for one in asked]
        plan, futures = balance(lengths, tokens, len(self.servers)), dict[int, Future[list[Drawn]]]()
        pools = [ThreadPoolExecutor(CONNECTIONS) for _ in self.servers]
        try:
            for server, pool, part in zip(self.servers, pools, plan):
                futures |= {i: pool.submit(server.complete, asked[i], settings, salt) for i in part}
            for future in wait(futures.values(), return_when=FIRST_EXCEPTION).done:
                future.result()  # raises what failed
            return [futures[i].result() for i in range(len(asked))]
        except BaseException:
            for server in self.servers:
                server.given_up = True  # threads end, for which Python would wait
            raise
        finally:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)  # what has not been asked yet never is

    def counters(self) -> dict[str, float]:
        counts = self._each(lambda server: server.counters())
        return {name: sum(count[name] for count in counts) for name in COUNTERS}

    def _each(self, ask: Callable[[Server], T]) -> list[T]:
        """Asks all servers at the same time -> their answers."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            return list(pool.map(ask, self.servers))
