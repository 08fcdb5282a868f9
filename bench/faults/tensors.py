"""Hostile tensors for the ops: other shapes, strides, types, NaN, gradients.

For every input the compiled op and the reference agree: both refuse it with a TypeError or ValueError that names an
argument, before they write anything, or both accept it and return the same.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import rand, randint, randn

import rlkernels
from rlkernels import GroupedLayout, Trajectories, TreeLayout

Tensors = dict[str, Any]  # by the names of arguments; most of them tensors

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]
VALUES = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 60.0, 1e-40]
WHOLE = [-1.0, 0.0, 1.0, 7.0, 100.0]
MAX_ERROR = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # relative error


class Op(NamedTuple):
    """An op, and tensors for it.

    Attributes:
        call: takes the tensors by name and ``backend``; returns all results to compare, written tensors too.
        make: makes tensors that fit together, of three sizes in 1 .. 4.
        exact: both backends return the same numbers.
        tolerance: relative error allowed for every dtype, for ops that stop early by design.
        also: other arguments that an error may name.
    """

    call: Callable[..., Any]
    make: Callable[[int, int, int], Tensors]
    exact: bool = False
    tolerance: float = 0.0
    also: tuple[str, ...] = ()


def curves(n: int, m: int, length: int) -> Tensors:
    return {"x": randn(n, length), "y": randn(m, length + 1),
            "x_lengths": randint(1, length + 1, (n,)), "y_lengths": randint(1, length + 1, (m,))}  # fmt: skip


def pairs(n: int, _: int, length: int) -> Tensors:
    return curves(n, n, length)


def histograms(n: int, m: int, bins: int) -> Tensors:
    return {"x": randn(n, bins).abs(), "y": randn(m, bins).abs()}


def runs(n: int, length: int, bins: int) -> Tensors:
    return {"rewards": randn(n, length), "states": randn(n, bins).abs(), "lengths": randint(1, length + 1, (n,))}


def similar_runs(rewards: Any, states: Any, lengths: Any, backend: str) -> Any:
    bank = Trajectories(rewards, states, lengths)
    return rlkernels.rhyme_similarity(bank, bank, state_metric="hellinger", backend=backend)


def nearest_runs(rewards: Any, states: Any, lengths: Any, backend: str) -> Any:
    bank = Trajectories(rewards, states, lengths)
    return rlkernels.rhyme_topk(bank, bank, k=1, state_metric="hellinger", backend=backend)[0]


def predictions(count: int, half: int, *_: int) -> Tensors:
    return {"logits": randn(count, 2 * half), "ids": randint(2 * half, (count,))}


def head(count: int, width: int, half: int) -> Tensors:
    return {"hidden": randn(count, width), "weight": randn(2 * half, width), "ids": randint(2 * half, (count,)),
            "bias": randn(2 * half)}  # fmt: skip


def draws(count: int, vocab: int, *_: int) -> Tensors:
    return {"logits": randn(count, vocab), "uniforms": rand(count)}


def drafted(sequences: int, length: int, half: int) -> Tensors:
    """Make sequences, each with a draft of ``length`` tokens."""
    rows = sequences * (length + 1)
    return {"logits": randn(rows, 2 * half), "drafts": randint(2 * half, (sequences * length,)),
            "starts": torch.arange(sequences + 1) * (length + 1), "uniforms": rand(rows)}  # fmt: skip


def keys(count: int, *_: int) -> Tensors:
    return {"sample_ids": randint(99, (count,)), "positions": randint(99, (count,))}


def pair(m: int, n: int, *_: int) -> Tensors:
    return {"weight": randn(m, n), "base": randn(m, n)}


def delta_and_vector(m: int, n: int, *_: int) -> Tensors:
    return pair(m, n) | {"v": randn(n)}


def direction(weight: Any, base: Any, backend: str) -> Any:
    update = rlkernels.top1_delta(weight, base, backend=backend)
    return torch.tensor([update.sigma, update.frobenius])


def directions(weight: Any, base: Any, backend: str) -> Any:
    update = rlkernels.top1_deltas({"weight": (weight, base)}, backend=backend)["weight"]
    return torch.tensor([update.sigma, update.frobenius])


def update(m: int, n: int, *_: int) -> Tensors:
    return {"weight": randn(m, n), "u": randn(m), "v": randn(n)}


def add(weight: Any, u: Any, v: Any, backend: str) -> Any:
    rlkernels.add_rank1_(weight, u, v, 0.5, backend=backend)
    return weight


def new_tokens(count: int, heads: int, dim: int) -> Tensors:
    return {"key": randn(count, heads, dim), "value": randn(count, heads, dim),
            "key_cache": torch.zeros(3, 2, heads, dim), "value_cache": torch.zeros(3, 2, heads, dim),
            "slots": torch.randperm(6)[:count]}  # fmt: skip


def write(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, backend: str) -> Any:
    rlkernels.write_kv(key, value, key_cache, value_cache, slots, backend=backend)
    return key_cache, value_cache


def paged(sequences: int, heads: int, dim: int) -> Tensors:
    shape = 2 * sequences, 2, heads, dim
    return {"query": randn(sequences, 2 * heads, dim), "key_cache": randn(*shape), "value_cache": randn(*shape),
            "block_tables": torch.randperm(2 * sequences).view(sequences, 2).int(),
            "seq_lens": randint(1, 5, (sequences,)).int(),
            "query_starts": torch.arange(sequences + 1).int()}  # fmt: skip


def shared(sequences: int, heads: int, dim: int) -> Tensors:
    """Make one group of all sequences, with a prefix of three tokens in two further blocks."""
    tensors = paged(sequences + 1, heads, dim)
    tables = tensors["block_tables"]
    return tensors | {"query": tensors["query"][:sequences], "group_tables": tables[:1].clone(),
                      "group_lens": torch.tensor([3]).int(), "group_starts": torch.tensor([0, sequences]).int(),
                      "block_tables": tables[1:].clone(), "seq_lens": tensors["seq_lens"][1:].clone(),
                      "query_starts": tensors["query_starts"][:-1].clone()}  # fmt: skip


def halves(count: int, heads: int, dim: int) -> Tensors:
    return {"out_a": randn(count, heads, dim), "lse_a": randn(count, heads),
            "out_b": randn(count, heads, dim), "lse_b": randn(count, heads)}  # fmt: skip


def packed(layout: Any, dim: int) -> Tensors:
    """Make the tensors of packed tokens, with two query heads on a key head."""
    tensors = {name: randn(layout.num_tokens, heads, dim) for name, heads in (("query", 2), ("key", 1), ("value", 1))}
    return {**tensors, "layout": layout}


def grouped(prefix: int, suffix: int, dim: int) -> Tensors:
    return packed(GroupedLayout([prefix], [suffix] * 2, [0, 2]), dim)


def tree(prefix: int, suffix: int, dim: int) -> Tensors:
    return packed(TreeLayout.from_sequences([[*range(prefix), *range(i, suffix)] for i in range(3)]), dim)


def topk(x: Any, y: Any, backend: str, **lengths: Any) -> Any:
    return rlkernels.dtw_topk(x, y, 1, backend=backend, **lengths)[0]  # values alone: ties may come in any order


ATTENTION: dict[str, Any] = {"scale": 0.5, "return_lse": True}
OPS = {
    "dtw": Op(rlkernels.dtw, curves),
    "dtw_topk": Op(topk, curves, also=("k must",)),
    "soft_dtw": Op(rlkernels.soft_dtw, pairs),
    "state_similarity": Op(partial(rlkernels.state_similarity, metric="hellinger"), histograms),
    "rhyme_similarity": Op(similar_runs, runs),
    "rhyme_topk": Op(nearest_runs, runs, also=("k must",)),
    "token_logprobs": Op(partial(rlkernels.token_logprobs, return_entropy=True), predictions),
    "linear_token_logprobs": Op(rlkernels.linear_token_logprobs, head),
    "sample_tokens": Op(partial(rlkernels.sample_tokens, top_k=3), draws),
    "verify_drafts": Op(partial(rlkernels.verify_drafts, top_k=3), drafted),
    "keyed_uniform": Op(partial(rlkernels.keyed_uniform, 3), keys, exact=True),
    "delta_matvec": Op(rlkernels.delta_matvec, delta_and_vector),
    "top1_delta": Op(direction, pair, tolerance=0.02),
    "top1_deltas": Op(directions, pair, tolerance=0.02),
    "add_rank1_": Op(add, update),
    "write_kv": Op(write, new_tokens, exact=True),
    "paged_attention": Op(partial(rlkernels.paged_attention, **ATTENTION), paged),
    "shared_prefix_attention": Op(partial(rlkernels.shared_prefix_attention, **ATTENTION), shared),
    "merge_attention": Op(rlkernels.merge_attention, halves),
    "grouped_attention": Op(partial(rlkernels.grouped_attention, scale=0.5), grouped),
    "tree_attention": Op(partial(rlkernels.tree_attention, **ATTENTION), tree),
}


class Change(NamedTuple):
    """A change of one tensor."""

    name: str
    kind: str
    number: int  # selects a variant of the kind


CHANGES = ("other float", "other type", "strides", "offset", "expanded", "value", "fewer", "longer", "none", "flat",
           "unsqueezed", "gradient", "list")  # fmt: skip


def changed(tensor: torch.Tensor, change: Change) -> Any:
    kind = change.kind
    number = change.number
    if kind == "other float":
        return tensor.to(FLOATS[number % len(FLOATS)]) if tensor.is_floating_point() else tensor
    if kind == "other type":
        return tensor.to(OTHERS[number % len(OTHERS)])
    if kind == "strides":
        transposed_layout = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        return transposed_layout if number % 2 else tensor.repeat_interleave(2, -1)[..., ::2]
    if kind == "offset":
        return torch.cat([tensor[:1], tensor])[1:]
    if kind == "expanded":
        return tensor[:1].expand(tensor.shape)
    if kind == "value" and tensor.numel():
        flat = tensor.clone().flatten()
        values = VALUES if tensor.is_floating_point() else WHOLE
        flat[number % len(flat)] = torch.tensor(values[number % len(values)]).to(flat.dtype)  # in uint8 -1 is 255
        return flat.view(tensor.shape)
    if kind in ("fewer", "longer", "none"):
        return {"fewer": tensor[1:], "longer": torch.cat([tensor, tensor[:1]]), "none": tensor[:0]}[kind]
    if kind == "flat":
        return tensor.flatten()
    if kind == "unsqueezed":
        return tensor[None]
    if kind == "gradient" and tensor.is_floating_point():
        return tensor.detach().requires_grad_()
    return tensor.tolist() if kind == "list" else tensor


def tensors_of(op: Op, seed: int, sizes: list[int], changes: list[Change]) -> Tensors:
    """Make the tensors of a case, always the same ones."""
    torch.manual_seed(seed)
    tensors = op.make(*sizes)
    for change in changes:
        if isinstance(tensors[change.name], torch.Tensor) and tensors[change.name].dim():
            tensors[change.name] = changed(tensors[change.name], change)
    return tensors


def judge(op: Op, seed: int, sizes: list[int], changes: list[Change]) -> str:
    """Return "accepted" or "refused", the verdict of both backends.

    Raises:
        AssertionError: they disagree, an error names no argument, or a refused tensor was written to.
        Exception: any other error of the op.
    """
    result, expected = (attempt(op, tensors_of(op, seed, sizes, changes), backend) for backend in ("auto", "torch"))
    if isinstance(result, Exception) or isinstance(expected, Exception):
        assert isinstance(result, Exception), f"refused by the reference alone: {expected}"
        assert isinstance(expected, Exception), f"refused by the compiled op alone: {result}"
        return "refused"
    tensors = tensors_of(op, seed, sizes, changes).values()
    types = [t.dtype for t in (*expected, *tensors) if isinstance(t, torch.Tensor)]
    max_error = 0 if op.exact else max(op.tolerance, *(MAX_ERROR.get(dtype, 0) for dtype in types))
    for number, (a, b) in enumerate(zip(result, expected, strict=True)):
        same(a, b, max_error, f"result {number}")
    return "accepted"


def attempt(op: Op, tensors: Tensors, backend: str) -> list[torch.Tensor] | Exception:
    """Return the results, or the error that refused the tensors."""
    copies = {name: t.detach().clone() for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    try:
        return leaves(op.call(**tensors, backend=backend))
    except (TypeError, ValueError) as error:
        refusal = error
    assert any(name in str(refusal) for name in (*tensors, *op.also)), f"{refusal!r} names no argument"
    for name, tensor in copies.items():
        same(tensors[name].detach(), tensor, 0, f"{name}, which was refused")
    return refusal


def leaves(result: Any) -> list[torch.Tensor]:
    return [x.detach() for x in (result if isinstance(result, tuple) else (result,))]


def same(a: torch.Tensor, b: torch.Tensor, max_error: float, label: str) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype, f"{label}: {a.dtype} {a.shape}, expected {b.dtype} {b.shape}"
    torch.testing.assert_close(a, b, rtol=max_error, atol=max_error, equal_nan=True, msg=lambda m: f"{label}: {m}")


def target(op: Op) -> Callable[[Any, Path], str]:
    """Return the target of :mod:`bench.faults.fuzz`."""
    names = list(op.make(1, 1, 1))
    changes = st.lists(
        st.builds(Change, st.sampled_from(names), st.sampled_from(CHANGES), st.integers(0, 40)), max_size=3
    )
    sizes = st.lists(st.integers(1, 4), min_size=3, max_size=3)

    def hostile(data: Any, folder: Path) -> str:
        return judge(op, data.draw(st.integers(0, 99)), data.draw(sizes), data.draw(changes))

    return hostile
