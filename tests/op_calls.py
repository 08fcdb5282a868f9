"""A small call of every op of ``OPS``, for tests of what holds for all of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import rlkernels
from rlkernels import decoder
from rlkernels.backend import OPS

Arguments = dict[str, Any]
LAYOUT = rlkernels.GroupedLayout([4], [3, 2], [0, 2])
WRITES = {"write_kv": ("key_cache", "value_cache"), "add_rank1_": ("weight",)}  # op -> arguments that it changes
GRADIENTS = {  # op -> arguments that get one
    "soft_dtw": ("x", "y"),
    "grouped_attention": ("query", "key", "value"),
    "token_logprobs": ("logits",),
    "linear_token_logprobs": ("hidden", "weight", "bias"),
    "add_rms_norm": ("residual", "x", "weight"),
    "rope": ("x", "q_weight", "k_weight"),
    "silu_mul": ("gate_up",),
}


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged() -> Arguments:
    """Two sequences of 6 and 3 keys, with 2 and 1 queries, in blocks of 4."""
    caches = torch.randn(2, 4, 4, 1, 8)
    return {"query": torch.randn(3, 2, 8), "key_cache": caches[0], "value_cache": caches[1],
            "block_tables": ints([2, 0], [1, -1]), "seq_lens": ints(6, 3), "query_starts": ints(0, 2, 3),
            "scale": 0.3, "return_lse": True}  # fmt: skip


def trajectories(n: int) -> rlkernels.Trajectories:
    """Of lengths whose mean bfloat16 does not hold."""
    return rlkernels.Trajectories(torch.rand(n, 302), torch.rand(n, 5, 3), torch.tensor([302, 301, 0, 1][:n]))


def matrices(m: int = 20, n: int = 16) -> Arguments:
    """A base, and a weight that differs from it by a direction and noise."""
    base = torch.randn(m, n)
    delta = torch.outer(torch.randn(m), torch.randn(n)) * 1e-2 + torch.randn(m, n) * 1e-3
    return {"weight": base + delta, "base": base}


def inputs() -> dict[str, Arguments]:
    """Return arguments for each op that takes tensors."""
    ids, logits, uniforms = torch.tensor([1, 5, 0]), torch.randn(3, 11), torch.rand(3)
    drawn = {"logits": logits, "uniforms": uniforms, "temperature": 0.7, "top_p": 0.9, "top_k": 7}
    series = {"x": torch.randn(2, 3, 2), "y": torch.randn(2, 2, 2), "x_lengths": torch.tensor([3, 0]),
              "y_lengths": torch.tensor([2, 1]), "band": 1}  # fmt: skip
    attention, rhyme = paged(), {"query": trajectories(2), "bank": trajectories(4)}
    prefixes = {"group_tables": ints([3]), "group_lens": ints(4), "group_starts": ints(0, 2)}
    rows, rotary = torch.randn(3, 16), {"positions": ids, "cos": torch.randn(9, 4), "sin": torch.randn(9, 4)}
    return {
        "dtw": series,
        "dtw_topk": {**series, "k": 1},
        "soft_dtw": series,
        "state_similarity": {"x": torch.randn(3, 5, 2), "y": torch.randn(4, 5, 2)},
        "rhyme_similarity": rhyme,
        "rhyme_topk": rhyme,
        "top1_delta": {**matrices(), "max_passes": 1},
        "top1_deltas": {"pairs": {"wide": tuple(matrices(5, 40).values()), "zero": torch.ones(2, 3, 4).unbind()},
                        "max_passes": 1},
        "delta_matvec": {**matrices(), "v": torch.randn(16)},
        "add_rank1_": {"weight": torch.randn(5, 7), "u": torch.randn(5), "v": torch.randn(7), "scale": 0.5},
        "write_kv": {"key": torch.randn(2, 1, 8), "value": torch.randn(2, 1, 8), "key_cache": torch.zeros(4, 4, 1, 8),
                     "value_cache": torch.zeros(4, 4, 1, 8), "slots": torch.tensor([3, 9])},
        "paged_attention": attention,
        "shared_prefix_attention": {**attention, **prefixes},
        "merge_attention": {"out_a": torch.randn(3, 2, 8), "lse_a": torch.randn(3, 2), "out_b": torch.randn(3, 2, 8),
                            "lse_b": torch.randn(3, 2)},
        "grouped_attention": {"query": torch.randn(9, 2, 8), "key": torch.randn(9, 1, 8),
                              "value": torch.randn(9, 1, 8), "layout": LAYOUT, "scale": 0.3},
        "keyed_uniform": {"seed": 7, "sample_ids": ids, "positions": ids.flip(0)},
        "sample_tokens": drawn,
        "verify_drafts": {**drawn, "drafts": [[4], []], "starts": [0, 2, 3]},
        "token_logprobs": {"logits": logits, "ids": ids, "temperature": 0.7, "return_entropy": True},
        "linear_token_logprobs": {"hidden": torch.randn(3, 8), "weight": torch.randn(11, 8), "ids": ids,
                                  "bias": torch.randn(11), "return_entropy": True, "chunk": 4},
        "add_rms_norm": {"residual": rows, "x": torch.randn(3, 16), "weight": torch.rand(16), "eps": 1e-6},
        "rope": {"x": rows, **rotary, "q_heads": 1, "heads": 2, "q_weight": torch.rand(4), "k_weight": torch.rand(4)},
        "silu_mul": {"gate_up": rows},
    }  # fmt: skip


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
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "default device": lambda: torch.device("meta"),
    **{f"default {dtype}": partial(default_dtype, dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)},
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}

HOST: dict[str, Callable[[str], Any]] = {"block_pool": block_pool, "rollout_history": rollout_history}  # no tensors


def public(op: str) -> Callable[..., Any]:
    return getattr(rlkernels, op, None) or getattr(decoder, op)


def run(op: str, given: Arguments | None, backend: str = "auto") -> list[torch.Tensor]:
    """Return the tensors of the result, numbers among them as float64, and what was written, in a copy."""
    if given is None:
        return flat(HOST[op](backend))
    written = {name: given[name].clone() for name in WRITES.get(op, ())}
    return flat([public(op)(**given | written, backend=backend), *written.values()])


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


def floats(given: Arguments) -> list[torch.Tensor]:
    """Return the floating point tensors of a call, those inside of dictionaries and trajectories included."""
    leaves = tree_leaves([vars(v) if is_dataclass(v) else v for v in given.values()])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point]
