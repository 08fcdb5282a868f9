"""Small calls of every op of ``OPS``, in any context of torch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch

import rlkernels
from bench._calls import Arguments, public
from rlkernels.registry import OPS


def block_pool(backend: str) -> list[Any]:
    cache = rlkernels.PagedKVCache(1, 1, 8, num_blocks=16, block_size=4, dtype=torch.float32, backend=backend)
    first = cache.open(range(12))
    cache.commit(first)
    sequences = [first, *cache.open_many([[*range(12), i] for i in range(3)])]
    slots = cache.append_many(sequences, [[7]] * 4)
    return [*cache.group(sequences, min_tokens=4), *cache.tables(sequences), slots, cache.slots(sequences)]


def rollout_history(backend: str) -> list[Any]:
    history = rlkernels.RolloutHistory(backend=backend)
    history.add([1], range(20))
    return [*history.draft_tracked([history.track([1])], max_tokens=4), history.to_bytes()]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    old_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old_dtype)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "default device": lambda: torch.device("meta"),
    **{f"default {dtype}": partial(default_dtype, dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)},
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}

HOST: dict[str, Callable[[str], Any]] = {"block_pool": block_pool, "rollout_history": rollout_history}  # no tensors


def run(op: str, arguments: Arguments | None, backend: str = "auto") -> list[torch.Tensor]:
    """Return the tensors of the result, numbers among them as float64, and copies of the arguments that it changed."""
    if arguments is None:
        return flat(HOST[op](backend))
    changed = {name: arguments[name].clone() for name in OPS[op].writes}
    return flat([public(op)(**arguments | changed, backend=backend), *changed.values()])


def flat(result: Any) -> list[torch.Tensor]:
    if is_dataclass(result):
        result = list(vars(result).values())
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in flat(item)]
    if isinstance(result, (int, float)):
        result = torch.tensor(result, dtype=torch.float64, device="cpu")
    return [result] if isinstance(result, torch.Tensor) else []


def backends(op: str) -> list[str]:
    return [name for name in ("cpu", "triton", "torch") if name == "torch" or getattr(OPS[op], name)]


def check_write_from_itself(backend: str) -> None:
    """Move entries of a cache, in reverse order; check that all are read before any is written."""
    for rows in (lambda cache: cache.flatten(0, 1)[:8], lambda cache: cache.flatten(0, 1)[1:9]):
        keys, values = torch.randn(2, 3, 4, 1, 8)
        expected_keys = keys.clone().flatten(0, 1)
        expected_values = values.clone().flatten(0, 1)
        slots = torch.arange(7, -1, -1)
        expected_keys[slots] = rows(values.clone())
        expected_values[slots] = rows(keys.clone())
        rlkernels.write_kv(rows(values), rows(keys), keys, values, slots, backend=backend)
        assert torch.equal(keys.flatten(0, 1), expected_keys)
        assert torch.equal(values.flatten(0, 1), expected_values)
