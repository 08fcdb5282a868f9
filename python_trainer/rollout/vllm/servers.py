"""vLLM servers as the backend of :class:`VLLMEngine`: one, or several that share the work."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from transformers import PreTrainedModel

from python_trainer.errors import UserError
from python_trainer.rollout.ordering import Work, balance
from python_trainer.rollout.vllm.engine import COUNTERS, Backend, Continuation, Drawn
from python_trainer.rollout.vllm.server import Server
from python_trainer.rollout.vllm.weights import AdapterFiles
from python_trainer.run_directory import usual_mode

T = TypeVar("T")

CONNECTIONS = 64  # to a server: vLLM batches what it is asked at the same time


class Servers(Backend):
    """Servers of one model, for one trainer at a time.

    Each answers a part of what is asked at once, of about as many expected tokens; all samples of a request are on one
    server, which computes their prompt once. Samples have seeds of their own, so they do not depend on the number of
    servers.

    Weights go through files, and every server must see ``folder`` by the same absolute path.

    Args:
        model: what the servers should be serving.
        urls: where they listen.
        folder: for the weights; made for each transfer and removed after it.
        adapters: of a policy that trains nothing else; their files are in ``folder`` too, until :meth:`close`.

    Raises:
        UserError: a server will not do, as of :class:`Server`, or they do not serve the same.
    """

    on_first_rank = True

    def __init__(
        self,
        model: PreTrainedModel,
        urls: Sequence[str],
        folder: Path,
        adapters: AdapterFiles | None = None,
    ):
        self.folder, self.adapters = folder.absolute(), adapters
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
            try:
                sent, places = self._write(model)
            except (OSError, SafetensorError) as error:
                raise UserError(f"the weights for rollout.vllm_server cannot be written: {error}") from error
            self._each(lambda server: server.load(*places))
        finally:
            if self.adapters is None:
                self.close()
        return sent

    def _write(self, model: PreTrainedModel) -> tuple[int, list[str]]:
        """Writes weights -> bytes, and the places where servers find them."""
        if self.adapters is not None:
            return self.adapters.write(model), self.adapters.places
        model.save_pretrained(self.folder)
        usual_mode(self.folder)  # a server may be another user's
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors")), [str(self.folder)]

    def close(self) -> None:
        self.adapters = None  # the weights that they belong to go: who asks again sends all
        shutil.rmtree(self.folder, ignore_errors=True)

    def complete(self, asked: Sequence[Continuation], settings: dict[str, Any], salt: str) -> list[list[Drawn]]:
        with ExitStack() as held:
            pools = [held.enter_context(ThreadPoolExecutor(CONNECTIONS)) for _ in self.servers]
            futures = [
                pools[number].submit(self.servers[number].complete, one, settings, salt)
                for one, number in zip(asked, assigned(asked, len(self.servers)), strict=True)
            ]
            done, left = wait(futures, return_when=FIRST_EXCEPTION)
            for future in left:  # one has failed: what has not been asked yet never is
                future.cancel()
            for future in done:
                future.result()  # raises what failed
            return [future.result() for future in futures]

    def counters(self) -> dict[str, float]:
        counts = self._each(lambda server: server.counters())
        return {name: sum(count[name] for count in counts) for name in COUNTERS}

    def _each(self, ask: Callable[[Server], T]) -> list[T]:
        """The answers of all servers, asked at the same time."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            return list(pool.map(ask, self.servers))


def assigned(asked: Sequence[Continuation], servers: int) -> list[int]:
    """The index of the server for each: the longest first, to the one with the fewest expected tokens so far.

    Those with the same tokens and the same seed, as greedy samples are, stay together.
    """
    together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, one in enumerate(asked):
        together.setdefault((one.seed, tuple(one.ids)), []).append(i)
    groups = list(together.values())
    works = [Work(asked[group[0]].expected, sum(asked[i].n * asked[i].expected for i in group)) for group in groups]
    found = [0] * len(asked)
    for server, part in enumerate(balance(works, servers)):
        for group in part:
            for i in groups[group]:
                found[i] = server
    return found


class Elsewhere(Backend):
    """Servers that rank 0 asks, as another rank knows them."""

    on_first_rank = True

    def __init__(self, max_positions: int, limited_by: str):
        self.max_positions, self.limited_by = max_positions, limited_by

    def load(self, model: PreTrainedModel) -> int:
        raise AssertionError("rank 0 gives servers their weights, this is another")

    def complete(self, asked: Sequence[Continuation], settings: dict[str, Any], salt: str) -> list[list[Drawn]]:
        raise AssertionError("rank 0 asks the servers, this is another")

    def counters(self) -> dict[str, float]:
        return dict.fromkeys(COUNTERS, 0.0)
