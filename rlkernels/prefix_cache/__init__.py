"""Paged key/value cache with shared prefixes, attention over it, and attention on packed trees for training."""

import functools
from typing import Any

import torch

from rlkernels import _check, _gradients
from rlkernels import backend as _backend
from rlkernels._contexts import public_op, transform_of
from rlkernels.prefix_cache import reference, torch_flash
from rlkernels.prefix_cache.cache import OutOfBlocks, PagedKVCache, Sequence
from rlkernels.prefix_cache.layout import GroupedLayout, TreeLayout
from rlkernels.prefix_cache.packing import Packed, pack, packs_tries
from rlkernels.registry import OPS

__all__ = [
    "GroupedLayout",
    "OutOfBlocks",
    "Packed",
    "PagedKVCache",
    "Sequence",
    "TreeLayout",
    "grouped_attention",
    "merge_attention",
    "pack",
    "packs_tries",
    "paged_attention",
    "shared_prefix_attention",
    "tree_attention",
    "write_kv",
]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of Triton's kernels for training: at 512 their gradients need 130 KiB of shared memory; an A10, L4 or RTX has 99
MAX_FLOAT32_HEAD = 256
MANY_TOKENS = 2048  # beyond them a GPU writes longer than it launches
_SEQUENCES = "block_tables", "seq_lens", "query_starts"
_GROUPS = "group_tables", "group_lens", "group_starts"
Ragged = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tables [N, blocks], lens [N] and starts [N + 1]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    **_: object,
) -> None:
    _check_caches(key_cache, value_cache)
    for name, tensor in (("key", key), ("value", value)):
        _check.tensor(name, tensor, ndim=3, floating=True, device=key_cache.device)
    _check.tensor("slots", slots, ndim=1, dtype=torch.int64, device=key_cache.device)
    _check_no_gradient("write_kv", key=key, value=value, key_cache=key_cache, value_cache=value_cache)


@public_op("write_kv", _check_write)
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write the keys and values of new tokens into their slots of the cache; for generation, without gradients.

    Args:
        key, value: [T, Hk, d], converted to the dtype of the cache; views of the cache are allowed.
        key_cache, value_cache: [num_blocks, block_size, Hk, d], written in place; may be views, but not such whose
            entries share memory.
        slots: int64 [T], block * block_size + offset, all different.

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or devices; a cache whose entries overlap; a slot outside the cache
            (checked on a CPU); a tensor that requires grad while gradients are enabled.
    """
    shape = key_cache.shape
    _check.shape("value_cache", value_cache, shape)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not cache.is_contiguous():
            _check.own_places(name, cache)
    if key.shape[1:] != shape[2:]:
        _check.shape("key", key, (key.shape[0], *shape[2:]))
    _check.shape("value", value, key.shape)
    _check.shape("slots", slots, key.shape[:1])
    regime = "write_kv/many" if key.shape[0] > MANY_TOKENS else "write_kv"
    chosen = _choose_for_cache(regime, backend, key_cache, value_cache, key, value)
    if chosen != "cpu" and slots.numel() and _check.on_host(slots):
        num_slots = shape[0] * shape[1]
        if not (slots.min() >= 0 and slots.max() < num_slots):
            raise ValueError(f"slots must be between 0 and {num_slots - 1}, got {slots.min()} .. {slots.max()}")
    _ops_of(chosen).write_kv(key, value, key_cache, value_cache, slots.contiguous())
    if chosen == "cpu":
        _backend.mark_written(key_cache, value_cache)


def _check_attention(
    op: str, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, **others: Any
) -> None:
    _check_caches(key_cache, value_cache)
    _check.tensor("query", query, ndim=3, floating=True, device=key_cache.device)
    _check_no_gradient(op, query=query, key_cache=key_cache, value_cache=value_cache)
    for name, ndim in zip((*_GROUPS, *_SEQUENCES), (2, 1, 1, 2, 1, 1)):
        if name in others:
            _check.tensor(name, others[name], ndim=ndim, dtype=torch.int32, device=query.device)


@public_op("paged_attention", functools.partial(_check_attention, "paged_attention"))
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Result:
    """Compute causal attention of new tokens over the paged keys and values of their sequences, their own included.

    A sequence may have any number of queries: one (decoding), a suffix (prefill) or a draft (verification). Query i
    sits at position seq_len - q_len + i and sees the keys up to there. It has no gradient: train with
    :func:`tree_attention`.

    Args:
        query: [T, Hq, d], the queries of all sequences one after the other; Hq a multiple of Hk.
        key_cache, value_cache: [num_blocks, block_size, Hk, d].
        block_tables: int32 [B, max_blocks]; entries beyond a sequence's last block are never used.
        seq_lens: int32 [B], keys of each sequence, its queries included.
        query_starts: int32 [B + 1]; sequence b has the queries ``query_starts[b]`` .. ``query_starts[b + 1] - 1``.
        scale: factor of the scores before the softmax, usually d ** -0.5.
        window, softcap: as for :func:`tree_attention`.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out [T, Hq, d] in the dtype of the query; with ``return_lse`` also the natural logarithm of the softmax's
        denominator, float32 [T, Hq] (float64 for float64 queries).

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or devices; a sequence with more queries than keys or than its
            block table covers, or a block outside the cache (checked on a CPU); a tensor that requires grad while
            gradients are enabled.
    """
    _check_sizes(query, key_cache, value_cache, scale)
    window, softcap = _checked_mask(window, softcap)
    sequences = _ragged(_SEQUENCES, query.shape[0], block_tables, seq_lens, query_starts)
    regime = "paged_attention/prefill" if query.shape[0] > seq_lens.shape[0] else "paged_attention"
    chosen = _choose_for_cache(regime, backend, key_cache, value_cache, query)
    chosen = _without_mask("paged_attention", chosen, backend, window, softcap)
    options = () if window is None and softcap is None else (window, softcap)
    args = query, key_cache, value_cache, *sequences, float(scale), *options
    if chosen != "cpu" and _check.on_host(query):
        _check_lengths(query, key_cache, sequences)
    out, lse = _attention_of(chosen, query, key_cache).paged_attention(*args)
    return (out, lse) if return_lse else out


@public_op("shared_prefix_attention", functools.partial(_check_attention, "shared_prefix_attention"))
def shared_prefix_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    group_tables: torch.Tensor,
    group_lens: torch.Tensor,
    group_starts: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    return_lse: bool = False,
    backend: str = "auto",
) -> Result:
    """Compute :func:`paged_attention` of sequences that share prefixes; each prefix is read once per group.

    Every query sees all of its group's prefix and, causally, the suffix of its own sequence. The log-sum-exps merge
    the two softmaxes (Hydragen, arXiv 2402.05099; FlashInfer's cascade attention).

    Args:
        query, key_cache, value_cache, query_starts, scale, return_lse: as for :func:`paged_attention`.
        group_tables: int32 [G, max_prefix_blocks], the blocks of each group's prefix.
        group_lens: int32 [G], tokens of the prefix; 0 is allowed.
        group_starts: int32 [G + 1]; group g holds the sequences ``group_starts[g]`` .. ``group_starts[g + 1] - 1``.
        block_tables, seq_lens: int32 [B, max_blocks], [B], of each sequence's own suffix only, its queries included,
            from offset 0 of its first block. :meth:`PagedKVCache.group` makes all five.

    Returns:
        As :func:`paged_attention`.

    Raises:
        ValueError, TypeError: as :func:`paged_attention`.
    """
    _check_sizes(query, key_cache, value_cache, scale)
    groups = _ragged(_GROUPS, seq_lens.shape[0], group_tables, group_lens, group_starts)
    sequences = _ragged(_SEQUENCES, query.shape[0], block_tables, seq_lens, query_starts)
    args = (query, key_cache, value_cache, *groups, *sequences, float(scale))
    chosen = _choose_for_cache("shared_prefix_attention", backend, key_cache, value_cache, query)
    if chosen != "cpu" and _check.on_host(query):
        _check_lengths(query, key_cache, sequences)
        _check_values(_GROUPS, groups, len(seq_lens), key_cache)
    out, lse = _attention_of(chosen, query, key_cache).shared_prefix_attention(*args)
    return (out, lse) if return_lse else out


def _check_merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, **_: object
) -> None:
    _check.tensor("out_a", out_a, ndim=3, floating=True)
    _check.tensor("out_b", out_b, ndim=3, dtype=out_a.dtype, device=out_a.device)
    lse_dtypes = (torch.float32, torch.float64) if out_a.dtype == torch.float64 else (torch.float32,)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check.tensor(name, lse, ndim=2, dtype=lse_dtypes, device=out_a.device)
    _check_no_gradient("merge_attention", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


@public_op("merge_attention", _check_merge)
def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union; without gradients.

    Args:
        out_a, out_b: [T, H, d].
        lse_a, lse_b: float32 [T, H], or float64 beside float64 outputs; natural logarithm, -inf where a side saw no
            key, whose output is then not used.

    Returns:
        out [T, H, d] in the dtype of ``out_a`` and lse float32 [T, H] (float64 for float64 outputs); 0 and -inf where
        neither saw a key.

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or devices; a tensor that requires grad while gradients are
            enabled.
    """
    _check.shape("out_b", out_b, out_a.shape)
    _check.shape("lse_a", lse_a, out_a.shape[:2])
    _check.shape("lse_b", lse_b, lse_a.shape)
    chosen = _choose("merge_attention", backend, out_a)
    sides = out_a.contiguous(), lse_a.contiguous(), out_b.contiguous(), lse_b.contiguous()
    return _ops_of(chosen).merge_attention(*sides)


def _check_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object) -> None:
    _check.tensor("query", query, ndim=3, floating=True)
    for name, t in (("key", key), ("value", value)):
        _check.tensor(name, t, ndim=3, dtype=query.dtype, device=query.device)


@public_op("tree_attention", _check_packed)
def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TreeLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Result:
    """Compute causal attention for training on the trie of a batch, each common beginning once; differentiable.

    A token sees its ancestors and itself. Outputs equal those of every sequence by itself, bit for bit with our kernels
    on a CPU. Gradients of shared tokens sum over the sequences (PrefixGrouper, arXiv 2506.05433; Tree Training, arXiv
    2511.00413).

    Args:
        query: [T, Hq, d]; Hq a multiple of Hk.
        key, value: [T, Hk, d].
        layout: how the T tokens are packed, ``TreeLayout.from_sequences(token ids)``.
        scale: factor of the scores before the softmax, usually d ** -0.5.
        window: keys that a query sees at most, by their places in its sequence, its own included.
        softcap: bounds scores: softcap * tanh(score / softcap).
        return_lse: also return the log-sum-exp of the scores, differentiable too.

    Returns:
        out [T, Hq, d] in the dtype of the query; with ``return_lse`` also the natural logarithm of the softmax's
        denominator, float32 [T, Hq] (float64 for float64 queries).

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or devices, or a layout for another number of tokens.
    """
    if not isinstance(layout, TreeLayout):
        raise TypeError(f"layout must be a TreeLayout, got {type(layout).__name__}")
    window, softcap = _checked_mask(window, softcap)
    if window is not None and window >= layout.longest:
        window = None
    arguments = query, key, value, layout, scale, window, softcap
    out, lse = _attend_packed("tree_attention", *arguments, return_lse=return_lse, backend=backend)
    return (out, lse) if return_lse else out


@public_op("grouped_attention", _check_packed)
def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: GroupedLayout,
    *,
    scale: float,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute :func:`tree_attention` on a tree of two levels, given by lengths: [prefix | suffix 1 | suffix 2 | ...].

    Args:
        query, key, value, scale: as for :func:`tree_attention`.
        layout: how the T tokens are packed. A suffix sees its whole prefix and itself, causally.

    Returns:
        [T, Hq, d] in the dtype of the query.

    Raises:
        TypeError, ValueError: wrong shapes, dtypes or devices, or a layout for another number of tokens.
    """
    if not isinstance(layout, GroupedLayout):
        raise TypeError(f"layout must be a GroupedLayout, got {type(layout).__name__}")
    return _attend_packed("grouped_attention", query, key, value, layout, scale, backend=backend)[0]


def _attend_packed(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: TreeLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    *,
    backend: str,
) -> tuple[torch.Tensor, Any]:
    """Return out and the log-sum-exp, which may be None unless it is asked for."""
    tokens, _, dim = query.shape
    kv_heads = key.shape[1]
    expected = tokens, kv_heads, dim
    _check.shape("key", key, expected)
    _check.shape("value", value, expected)
    _check_heads(query, kv_heads)
    _check_scale(scale)
    if layout.num_tokens != tokens:
        raise ValueError(f"layout must be for the {tokens} tokens of query, got {layout}")
    chosen = _choose("grouped_attention" if isinstance(layout, GroupedLayout) else op, backend, query)
    chosen = _without_mask(op, chosen, backend, window, softcap)
    fits = query.dtype != torch.float32 or query.shape[-1] <= MAX_FLOAT32_HEAD
    limit = f"in float32 with heads of 1 to {MAX_FLOAT32_HEAD}"
    chosen = _within_triton(op, chosen, backend, fits, limit, query.shape[-1])
    scale = float(scale)
    if chosen != "torch" and query.shape[1]:  # kernels divide by the number of heads
        tensors = query.contiguous(), key.contiguous(), value.contiguous()
        return _gradients.apply(_TreeAttention, *tensors, layout, scale, window, softcap, chosen)
    compiling = torch.compiler.is_compiling()  # where no tensor is part of a transform
    in_transform = not compiling and any(transform_of(tensor) for tensor in (query, key, value))
    args = query, key, value, layout, scale, window
    if softcap is None and not in_transform and torch_flash.supports_training(query, return_lse):
        return torch_flash.tree_attention(*args)
    on_cpu = _backend.device_kind(query.device) == "cpu"
    if return_lse or softcap is not None or not query.numel() or on_cpu or in_transform:
        recompute = not (on_cpu or torch._C._are_functorch_transforms_active())
        return reference.tree_attention(*args, softcap, recompute=recompute)
    return reference.tree_attention_by_sdpa(*args), None


class _TreeAttention(torch.autograd.Function):
    """Our kernels: output and log-sum-exp, from which the backward pass computes the weights again."""

    @staticmethod
    def forward(query, key, value, layout: Any, scale: float, window: int | None, softcap: float | None, backend: str):
        if backend != "cpu":
            from rlkernels.prefix_cache import triton_tree

            return triton_tree.forward(query, key, value, layout, scale, backend == "triton/crossing")
        return torch.ops.rlkernels.tree_attention(query, key, value, layout.nodes, scale, window, softcap)

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, ctx.layout, ctx.scale, ctx.window, ctx.softcap, ctx.backend = inputs
        ctx.save_for_backward(query, key, value, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    @_gradients.once("tree_attention", "; backend='torch' on a CPU has one")
    def backward(ctx, saved, grad_out, grad_lse):
        query, key, value, out, lse = saved
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        given = grad_out, grad_lse, query, key, value, out, lse
        if ctx.backend != "cpu":
            from rlkernels.prefix_cache import triton_tree

            grads = triton_tree.backward(*given, ctx.layout, ctx.scale, ctx.backend == "triton/crossing")
        else:
            scores = ctx.scale, ctx.window, ctx.softcap
            grads = torch.ops.rlkernels.tree_attention_backward(*given, ctx.layout.nodes, *scores)
        return *grads, None, None, None, None, None


def _ops_of(chosen: str) -> Any:
    """Return what holds the ops of a backend."""
    if chosen == "cpu":
        return torch.ops.rlkernels
    if chosen == "torch":
        return reference
    from rlkernels.prefix_cache import triton_kernels

    return triton_kernels


def _attention_of(chosen: str, query: torch.Tensor, cache: torch.Tensor) -> Any:
    """Return what holds the attention of a backend; for "torch" the kernels of torch's libraries where they fit."""
    return torch_flash if chosen == "torch" and torch_flash.accepts_cache(query, cache) else _ops_of(chosen)


def _choose(op: str, backend: str, *tensors: torch.Tensor) -> str:
    """Return the backend that runs ``op``; our kernels take no float64 and no head wider than 512."""
    chosen = _backend.choose(op, tensors[0].device, backend)
    if chosen == "torch":
        return chosen
    for tensor in tensors:
        if tensor.dtype not in KERNEL_DTYPES or not 0 < tensor.shape[-1] <= 512:
            break
    else:
        return chosen
    if backend != "auto":
        kinds = ", ".join(f"{tensor.dtype} with {tensor.shape[-1]}" for tensor in tensors)
        raise ValueError(
            f"backend={backend!r} runs {OPS[op].name} on 16 and 32 bit floats with heads of 1 to 512, got {kinds}"
        )
    return "torch"


def _without_mask(op: str, chosen: str, backend: str, window: int | None, softcap: float | None) -> str:
    """Return ``chosen``, or "torch" for Triton's kernels where they lack the mask."""
    has_mask = window is not None or softcap is not None
    return _within_triton(op, chosen, backend, not has_mask, "without window and softcap", (window, softcap))


def _within_triton(op: str, chosen: str, backend: str, takes: bool, limit: str, given: object) -> str:
    """Return ``chosen``, or "torch" where Triton's kernels do not take a call; ValueError if a backend was named."""
    if takes or not chosen.startswith("triton"):
        return chosen
    if backend != "auto":
        raise ValueError(f"backend={backend!r} runs {op} {limit}, got {given}")
    return "torch"


def _choose_for_cache(
    op: str, backend: str, key_cache: torch.Tensor, value_cache: torch.Tensor, *tensors: torch.Tensor
) -> str:
    """Choose as :func:`_choose`; our CPU code needs a cache whose last dimension is contiguous."""
    chosen = _choose(op, backend, key_cache, *tensors)
    if chosen != "cpu" or (key_cache.is_contiguous() and value_cache.is_contiguous()):
        return chosen
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            if backend != "auto":
                raise ValueError(
                    f"{name} must be contiguous in its last dimension with backend={backend!r}, got strides "
                    f"{cache.stride()}"
                )
            return "torch"
    return chosen


def _check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    _check.tensor("key_cache", key_cache, ndim=4, floating=True)
    _check.tensor("value_cache", value_cache, ndim=4, dtype=key_cache.dtype, device=key_cache.device)


def _check_heads(query: torch.Tensor, kv_heads: int) -> None:
    if kv_heads == 0 or query.shape[1] % kv_heads:
        raise ValueError(f"query must have a multiple of {kv_heads} (key) heads, got {query.shape[1]}")


def _check_scale(scale: float) -> None:
    if type(scale) is not float:
        _check.number("scale", scale)
    if not abs(float(scale)) < float("inf"):
        raise ValueError(f"scale must be finite, got {scale!r}")


def _checked_mask(window: int | None, softcap: float | None) -> tuple[int | None, float | None]:
    """Check window and softcap, and return them as Python's numbers, the window at most the largest of kernels."""
    if window is not None:
        window = min(_check.integer("window", window, 1), _check.MOST)
    if softcap is not None:
        _check.positive("softcap", softcap)
        softcap = float(softcap)
        if softcap > torch.finfo(torch.float32).max:
            raise ValueError(f"softcap must be finite in float32, got {softcap!r}")
    return window, softcap


def _check_sizes(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scale: float) -> None:
    shape = key_cache.shape
    _check.shape("value_cache", value_cache, shape)
    if query.shape[2] != shape[3]:
        _check.shape("query", query, (None, None, shape[3]))
    _check_heads(query, shape[2])
    _check_scale(scale)


def _check_no_gradient(op: str, **tensors: torch.Tensor) -> None:
    advice = "generate under torch.no_grad(), train with tree_attention or torch's own attention"
    _check.no_gradient(f"{op} has no gradient: {advice}", **tensors)


def _ragged(
    names: tuple[str, str, str], total: int, tables: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor
) -> Ragged:
    """Check the shapes of the tensors that divide ``total`` queries among sequences, or sequences among groups.

    Return them contiguous.
    """
    count = lens.shape[0]
    if tables.shape[0] != count:
        _check.shape(names[0], tables, (count, None))
    if starts.shape[0] != count + 1:
        _check.shape(names[2], starts, (count + 1,))
    if count == 0 and total:
        raise ValueError(f"{names[2]} must rise from 0 to {total}, got a single entry, with {names[1]} empty")
    return tables.contiguous(), lens.contiguous(), starts.contiguous()


def _check_lengths(query: torch.Tensor, key_cache: torch.Tensor, sequences: Ragged) -> None:
    _check_values(_SEQUENCES, sequences, query.shape[0], key_cache)
    _, lens, starts = sequences
    num_queries = starts.diff()
    too_short = (num_queries > lens).nonzero().flatten().tolist()
    if too_short:
        sequence = too_short[0]
        raise ValueError(
            f"seq_lens must count the queries too, got {int(lens[sequence])} keys for "
            f"{int(num_queries[sequence])} queries of sequence {sequence}"
        )


def _check_values(names: tuple[str, str, str], ragged: Ragged, total: int, key_cache: torch.Tensor) -> None:
    """Raise ValueError unless starts rise from 0 to ``total``, and the entries of tables that lens use are blocks."""
    name, lens_name, starts_name = names
    tables, lens, starts = ragged
    if starts[0] != 0 or starts[-1] != total or (starts.diff() < 0).any():
        raise ValueError(f"{starts_name} must rise from 0 to {total}, got {starts.tolist()}")
    num_blocks, size = key_cache.shape[:2]
    limit = tables.shape[1] * size
    if len(lens) and not (lens.min() >= 0 and lens.max() <= limit):
        raise ValueError(f"{lens_name} must be between 0 and {limit} ({name} x block size), got {lens.tolist()}")
    is_used = torch.arange(tables.shape[1], device=lens.device) * size < lens[:, None]
    is_outside = is_used & ((tables < 0) | (tables >= num_blocks))
    if is_outside.any():
        row, column = is_outside.nonzero()[0].tolist()
        raise ValueError(
            f"{name} must hold blocks between 0 and {num_blocks - 1}, got {int(tables[row, column])} at "
            f"[{row}, {column}]"
        )
