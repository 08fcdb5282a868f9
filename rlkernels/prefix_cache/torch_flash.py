"""Attention by the FlashAttention kernels of torch, which a GPU uses until a verdict finds ours faster there.

The kernels read rows of queries and of keys, one after the other, so keys are gathered first. Query heads share keys,
and no scores are stored. The kernels sum the gradient of a query in any order, so its last bits differ each time,
unless ``torch.use_deterministic_algorithms`` is on: an H200 then takes 1.7 times as long. ATen names are used because
``varlen_attn`` of torch 2.11 needs a key head for every query head. If the kernels do not run (float32, an old GPU),
sequences are decoded as padded rows.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from rlkernels import _gradients
from rlkernels._precision import without_autocast
from rlkernels.prefix_cache import reference
from rlkernels.prefix_cache.layout import GroupedLayout, TreeLayout

HALVES = (torch.bfloat16, torch.float16)  # dtypes of the kernels
LARGEST_HEAD = 256
HEAD_STEP = 8  # head sizes are its multiples
OLDEST = (8, 0)  # lowest compute capability
MAX_KEY_ELEMENTS = 1 << 26  # most elements of padded keys at a time
MAX_QUERY_ELEMENTS = 1 << 27  # most elements in the queries of groups that are computed at a time
aten: Any = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


class Rows(NamedTuple):
    """N rows of queries and of keys."""

    places: torch.Tensor  # int64 [M], the place of each key
    starts_q: torch.Tensor  # int32 [N + 1]
    starts_k: torch.Tensor  # int32 [N + 1]
    max_q: int
    max_k: int


def accepts_cache(query: torch.Tensor, cache: torch.Tensor) -> bool:
    """Return whether attention to such a cache runs here: on a GPU, in one dtype of at most 32 bits."""
    return query.is_cuda and query.dtype == cache.dtype != torch.float64


def supports(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels run on such queries, keys and values [..., d]."""
    dim = tensors[0].shape[-1]
    return (
        all(t.is_cuda and t.dtype == tensors[0].dtype for t in tensors)
        and tensors[0].dtype in HALVES
        and 0 < dim <= LARGEST_HEAD
        and dim % HEAD_STEP == 0
        and torch.cuda.get_device_capability(tensors[0].device) >= OLDEST
    )


def supports_training(query: torch.Tensor, with_lse: bool) -> bool:
    """Return whether :func:`tree_attention` runs on such queries; the gradient of the log-sum-exp widens heads."""
    return supports(query) and query.shape[-1] + with_lse * HEAD_STEP <= LARGEST_HEAD


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, scale: float, causal: bool,
           window: int | None = None) -> Any:  # fmt: skip
    """Return out [T, Hq, d], lse [Hq, T] and two tensors for the backward pass, of gathered keys, values [M, Hk, d].

    If a query sees no key, or all weights are 0, the kernels return an output of 0 and a log-sum-exp of inf; for NaN
    they return inf, too. The logarithm of the output distinguishes them, as -inf and NaN.
    """
    starts = (rows.starts_q, rows.starts_k, rows.max_q, rows.max_k)
    results = aten._flash_attention_forward(
        query, key, value, *starts, 0.0, causal, False, scale=scale, **_window_arguments(window)
    )
    out, lse, *random_state = results[:4]
    return out, torch.where(lse == torch.inf, out[..., 0].T.log(), lse), *random_state


def _window_arguments(window: int | None) -> dict[str, int]:
    """Return a window as the kernels' arguments: keys on both sides of the query's key."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _flash_gradients(
    key: torch.Tensor, value: torch.Tensor, rows: Rows, causal: bool, grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, seed: torch.Tensor,
    unused: torch.Tensor, scale: float, window: int | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the gradients of query, gathered key and value; lse and grad_lse [Hq, T]."""
    dim = query.shape[2]
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    if grad_lse is not None:
        # The kernels subtract the sum of output x gradient from the gradient of the weights. A further dimension adds
        # the gradient of the log-sum-exp to that sum; values of 0 there change no weight.
        query, out, grad_out, key, value = (pad(t, (0, HEAD_STEP)) for t in (query, out, grad_out, key, value))
        grad_out[..., dim] = 1
        out[..., dim] = -grad_lse.T.to(out.dtype)
    starts = rows.starts_q, rows.starts_k, rows.max_q, rows.max_k
    sides = _window_arguments(window)
    grads = aten._flash_attention_backward(
        grad_out, query, key, value, out, lse, *starts, 0.0, causal, seed, unused, scale=scale, **sides
    )
    return [grad[..., :dim] for grad in grads]


def _attend(query: torch.Tensor, caches: Pair, rows: Rows, scale: float, causal: bool,
            window: int | None = None) -> Pair:  # fmt: skip
    """Return out [T, Hq, d] and lse [T, Hq] over gathered entries of the caches [N, Hk, d]."""
    if not rows.places.numel():
        return torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    key, value = (cache.index_select(0, rows.places) for cache in caches)
    if not supports(query, key):
        return _decode(query, key, value, rows, scale)
    causal = causal and (rows.max_q > 1 or window is not None)
    out, lse, *_ = _flash(query, key, value, rows, scale, causal, window)
    return out, lse.T


def _decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, scale: float) -> Pair:
    """Attend rows of one query each (N = T), padded to the longest, with few launches for any N."""
    starts = rows.starts_k
    place = torch.arange(rows.max_k, device=query.device)
    is_padding = place >= starts.diff()[:, None]  # [N, K]
    # padding repeats the sequence's first key: another sequence's key may be NaN
    index = (starts[:-1, None] + place.masked_fill(is_padding, 0)).clamp(max=len(key) - 1)
    queries = query.float().unflatten(1, (key.shape[1], -1))  # [N, Hk, g, d]
    step = max(MAX_KEY_ELEMENTS // (rows.max_k * key[0].numel()), 1)
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for first in range(0, len(query), step):
        piece = slice(first, first + step)
        with without_autocast(query.device):
            score = torch.einsum("nhgd,nkhd->nhgk", queries[piece], key[index[piece]].float()) * scale
            score = score.masked_fill(is_padding[piece, None, None], -torch.inf)
            out = torch.einsum("nhgk,nkhd->nhgd", score.softmax(-1), value[index[piece]].float())
        has_no_key = is_padding[piece].all(1)
        outs.append(out.flatten(1, 2).masked_fill(has_no_key[:, None, None], 0))
        lses.append(score.logsumexp(-1).flatten(1))
    return torch.cat(outs).to(query.dtype), torch.cat(lses)


# by whether the rows are of groups: the tensors from which the last rows were made, their versions (after the block
# size and the stream), and the rows
_last_rows: dict[bool, tuple[list[Any], list[int], Rows]] = {}


def _stream(device: torch.device) -> int:
    """Return the number of the device's current stream; 0 on a CPU."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    return torch.cuda.current_stream(device).cuda_stream if on_gpu else 0


def _rows(block_size: int, tables: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, *groups: torch.Tensor
          ) -> Rows:  # fmt: skip
    """Return the rows of the paged keys of sequences, or of groups of them, which start at the sequences ``groups``.

    Every layer of a model needs the same rows: the host waits for the device in the first layer only. Tensors made
    under ``torch.inference_mode`` have no version; for them it waits in every layer. Another stream would not wait for
    the kernels that compute the rows, so it computes its own.

    Raises:
        RuntimeError: a CUDA graph is being recorded, which would repeat these rows whatever the tensors hold later.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("backend='torch' waits for the GPU in paged attention, which no CUDA graph can record")
    arguments = (tables, lens, starts, *groups)
    has_versions = not any(t.is_inference() for t in arguments)
    versions = [block_size, _stream(tables.device), *(t._version for t in arguments)] if has_versions else []
    references, last_versions, rows = _last_rows.get(bool(groups), ([], [], None))
    same_tensors = all(reference() is tensor for reference, tensor in zip(references, arguments))
    if has_versions and rows is not None and last_versions == versions and same_tensors:
        return rows
    starts_q = starts[groups[0].long()] if groups else starts
    starts_k = pad(lens.cumsum(0), (1, 0)).int()
    total, max_q, max_k = torch.stack([starts_k[-1], starts_q.diff().max(), lens.max()]).tolist()
    row = torch.arange(len(lens), device=lens.device).repeat_interleave(lens, output_size=total)
    place = torch.arange(total, device=lens.device) - starts_k[row]  # within its sequence or group
    index = tables[row, place // block_size].long() * block_size + place % block_size
    rows = Rows(index, starts_q, starts_k, max_q, max_k)
    if has_versions:
        _last_rows[bool(groups)] = [weakref.ref(t) for t in arguments], versions, rows
    return rows


def paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, query_starts: torch.Tensor, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> Pair:  # fmt: skip
    """Compute ``reference.paged_attention``."""
    tables = (block_tables, seq_lens, query_starts)
    options = (scale, window, softcap)
    if not query.numel() or softcap is not None:
        return reference.paged_attention(query, key_cache, value_cache, *tables, *options)
    rows = _rows(key_cache.shape[1], *tables)
    if not supports(query, key_cache) and (window is not None or rows.max_q > 1 or len(query) < len(seq_lens)):
        return reference.paged_attention(query, key_cache, value_cache, *tables, *options)
    return _attend(query, (key_cache.flatten(0, 1), value_cache.flatten(0, 1)), rows, scale, True, window)


def shared_prefix_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, group_tables: torch.Tensor,
    group_lens: torch.Tensor, group_starts: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    query_starts: torch.Tensor, scale: float,
) -> Pair:  # fmt: skip
    """Compute ``reference.shared_prefix_attention``: a prefix is gathered once for its group."""
    if not supports(query, key_cache):
        groups = (group_tables, group_lens, group_starts)
        sequences = (block_tables, seq_lens, query_starts)
        return reference.shared_prefix_attention(query, key_cache, value_cache, *groups, *sequences, scale)
    suffix = paged_attention(query, key_cache, value_cache, block_tables, seq_lens, query_starts, scale)
    if not query.numel():
        return suffix
    rows = _rows(key_cache.shape[1], group_tables, group_lens, query_starts, group_starts)
    prefix = _attend(query, (key_cache.flatten(0, 1), value_cache.flatten(0, 1)), rows, scale, causal=False)
    return reference.merge_attention(*prefix, *suffix)


def _packed_rows(layout: TreeLayout, device: torch.device, window: int | None) -> Rows:
    """Return each node as a row, with the keys that its queries see; made once."""
    cache_key = ("torch_flash", device, window)
    if cache_key not in layout.kernel_tables:
        places = torch.arange(layout.num_tokens, device="cpu")
        runs_by_node = layout.seen_by_nodes(window)
        index = torch.cat([places[run] for runs in runs_by_node for run in runs])
        keys = torch.tensor([sum(run.stop - run.start for run in runs) for runs in runs_by_node], device="cpu")
        queries = layout.nodes[:, 1] - layout.nodes[:, 0]
        starts_q = _starts(queries, device)
        starts_k = _starts(keys, device)
        longest = int(queries.max()), int(keys.max())
        layout.kernel_tables[cache_key] = Rows(index.to(device), starts_q, starts_k, *longest)
    return layout.kernel_tables[cache_key]


def _starts(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return int32 [N + 1], 0 and the cumulative sums of counts [N], on a device."""
    return pad(counts.cumsum(0), (1, 0)).int().to(device)


class _Packed(torch.autograd.Function):
    """A base that saves query, key, value and output for the backward pass, which gathers keys again."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, ctx.layout, ctx.scale, *ctx.window = inputs
        ctx.save_for_backward(query, key, value, *output)
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)


class _Tree(_Packed):
    """One softmax for a query, over gathered keys of the path to its node and of the node."""

    @staticmethod
    def forward(query, key, value, layout: TreeLayout, scale: float, window: int | None):
        rows = _packed_rows(layout, query.device, window)
        keys, values = (t.index_select(0, rows.places) for t in (key, value))
        return tuple(_flash(query, keys, values, rows, scale, True, window))

    @staticmethod
    @_gradients.once("tree_attention", "; backend='torch' on a CPU has one")
    def backward(ctx, saved, grad_out, grad_lse, *_):
        query, key, value, out, lse, seed, unused = saved
        [window] = ctx.window
        rows = _packed_rows(ctx.layout, query.device, window)
        keys, values = (t.index_select(0, rows.places) for t in (key, value))
        arguments = (grad_out, grad_lse, query, out, lse, seed, unused, ctx.scale, window)
        grad_query, *grads = _flash_gradients(keys, values, rows, True, *arguments)
        # sum over the copies of a key, in float32 and always in the same order
        sums = (aten.embedding_dense_backward(grad.flatten(1), rows.places, len(key), -1, False) for grad in grads)
        return grad_query, *(total.view_as(key) for total in sums), None, None, None


class Groups(NamedTuple):
    """Some groups of a layout of two levels: queries attend to their prefix or suffix, and suffixes to their prefix."""

    tokens: slice  # of the groups in the batch
    parts: Rows  # each prefix and each suffix, on itself; no places
    prefixes: Rows | None  # the suffixes of a group on its prefix, and the other queries on no key


def _packed_groups(layout: GroupedLayout, elements_per_token: int, device: torch.device) -> list[Groups]:
    """Return the groups of a layout; made once. A token's queries have ``elements_per_token``."""
    cache_key = ("torch_flash groups", elements_per_token, device)
    if cache_key not in layout.kernel_tables:
        pieces: list[list[tuple[slice, list[slice]]]] = []
        size = 0
        for prefix, suffixes in layout.spans():
            tokens = (suffixes or [prefix])[-1].stop - prefix.start
            if not pieces or size + tokens * elements_per_token > MAX_QUERY_ELEMENTS:
                pieces.append([])
                size = 0
            pieces[-1].append((prefix, suffixes))
            size += tokens * elements_per_token
        groups = (_groups(piece, device) for piece in pieces)
        layout.kernel_tables[cache_key] = [group for group in groups if group is not None]
    return layout.kernel_tables[cache_key]


def _groups(spans: list[tuple[slice, list[slice]]], device: torch.device) -> Groups | None:
    """Return groups from the tokens of each prefix and its suffixes; None without any token."""
    begin = spans[0][0].start
    lens: list[int] = []
    queries: list[int] = []
    keys: list[int] = []
    places: list[torch.Tensor] = []
    for prefix, suffixes in spans:
        prefix_len = prefix.stop - prefix.start
        suffix_tokens = suffixes[-1].stop - prefix.stop if suffixes else 0
        lens += [part.stop - part.start for part in [prefix, *suffixes] if part.stop > part.start]
        shared = prefix_len if suffix_tokens else 0
        queries += [prefix_len, suffix_tokens]
        keys += [0, shared]
        first = prefix.start - begin
        places.append(torch.arange(first, first + shared, device="cpu"))
    if not lens:
        return None
    starts = _starts(torch.tensor(lens, device="cpu"), device)
    parts = Rows(places[0][:0].to(device), starts, starts, max(lens), max(lens))
    prefixes = None
    if any(keys):
        starts_q = _starts(torch.tensor(queries, device="cpu"), device)
        starts_k = _starts(torch.tensor(keys, device="cpu"), device)
        prefixes = Rows(torch.cat(places).to(device), starts_q, starts_k, max(queries), max(keys))
    return Groups(slice(begin, begin + sum(lens)), parts, prefixes)


class _Grouped(_Packed):
    """Two softmaxes for a query, merged: over its prefix or suffix, and of suffixes over their prefix without a mask.

    Both backward passes take the merged output and log-sum-exp, which normalize the weights of both. A few groups are
    computed at a time: the kernels need 32-bit copies of the gradients.
    """

    @staticmethod
    def forward(query, key, value, layout: GroupedLayout, scale: float):
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[1::-1], dtype=torch.float32)
        elements_per_token = query.shape[1] * query.shape[2]
        for tokens, parts, prefixes in _packed_groups(layout, elements_per_token, query.device):
            q, k, v = (t[tokens] for t in (query, key, value))
            part_out, part_lse, *random_state = _flash(q, k, v, parts, scale, causal=True)
            if prefixes is None:
                out[tokens] = part_out
                lse[:, tokens] = part_lse
                continue
            keys, values = (t.index_select(0, prefixes.places) for t in (k, v))
            prefix_out, prefix_lse, *_ = _flash(q, keys, values, prefixes, scale, causal=False)
            torch.logaddexp(part_lse, prefix_lse, out=lse[:, tokens])
            share = (prefix_lse - part_lse).sigmoid().T[..., None]
            torch.lerp(part_out, prefix_out, share.to(part_out.dtype), out=out[tokens])
        return out, lse, *random_state

    @staticmethod
    @_gradients.once("tree_attention", "; backend='torch' on a CPU has one")
    def backward(ctx, saved, grad_out, grad_lse, *_):
        query, key, value, out, lse, seed, unused = saved
        grads = [torch.empty_like(t) for t in (query, key, value)]
        for tokens, parts, prefixes in _packed_groups(ctx.layout, query.shape[1] * query.shape[2], query.device):
            q, k, v, group_out = (t[tokens] for t in (query, key, value, out))
            group_grad_out = None if grad_out is None else grad_out[tokens]
            group_grad_lse = None if grad_lse is None else grad_lse[:, tokens].contiguous()
            group_lse = lse[:, tokens].contiguous()
            arguments = (group_grad_out, group_grad_lse, q, group_out, group_lse, seed, unused, ctx.scale)
            part_grads = _flash_gradients(k, v, parts, True, *arguments)
            if prefixes is None:
                for grad, part_grad in zip(grads, part_grads):
                    grad[tokens] = part_grad
                continue
            keys, values = (t.index_select(0, prefixes.places) for t in (k, v))
            prefix_grads = _flash_gradients(keys, values, prefixes, False, *arguments)
            torch.add(part_grads[0], prefix_grads[0], out=grads[0][tokens])
            for grad, part_grad, prefix_grad in zip(grads[1:], part_grads[1:], prefix_grads[1:]):
                grad[tokens] = part_grad
                grad[tokens].index_add_(0, prefixes.places, prefix_grad)
        return *grads, None, None


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, scale: float,
    window: int | None = None,
) -> Pair:  # fmt: skip
    """Compute ``reference.tree_attention``; differentiable once."""
    if not query.numel():
        return reference.tree_attention(query, key, value, layout, scale)
    args = (*(t.contiguous() for t in (query, key, value)), layout, scale)
    if isinstance(layout, GroupedLayout) and window is None:
        out, lse, *_ = _gradients.apply(_Grouped, *args)
    else:
        out, lse, *_ = _gradients.apply(_Tree, *args, window)
    return out, lse.T
