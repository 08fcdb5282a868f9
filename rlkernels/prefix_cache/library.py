"""Attention by the FlashAttention kernels of torch: what a GPU takes until a verdict says that ours are faster there.

The kernels read rows of queries and rows of keys, end to end, so keys are gathered from where they lie. Query heads
share them, and no score is held. They add up the gradient of a query in any order, and its last bits differ each time,
unless ``torch.use_deterministic_algorithms`` is on: an H200 then takes 1.7 times as long. The ATen names are used
because ``varlen_attn`` of torch 2.11 wants a key head for every query head. Where the kernels do not run (float32, an
old GPU), sequences are decoded as padded rows.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from rlkernels import _gradients
from rlkernels._precision import without_autocast
from rlkernels.prefix_cache import reference
from rlkernels.prefix_cache.layout import GroupedLayout, TreeLayout

HALVES = (torch.bfloat16, torch.float16)  # the kernels compute in these
LARGEST_HEAD, HEAD_STEP = 256, 8
OLDEST = (8, 0)  # compute capability
PIECE = 1 << 26  # numbers of padded keys at one time
GROUPS = 1 << 27  # numbers in the queries of the groups that are attended to at one time
aten: Any = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


class Rows(NamedTuple):
    """N rows of queries and of keys."""

    places: torch.Tensor  # int64 [M] where each key lies
    starts_q: torch.Tensor  # int32 [N + 1]
    starts_k: torch.Tensor  # int32 [N + 1]
    max_q: int
    max_k: int


def takes(query: torch.Tensor, cache: torch.Tensor) -> bool:
    """Tell whether attention to such a cache runs here: on a GPU, in one type of at most 32 bits."""
    return query.is_cuda and query.dtype == cache.dtype != torch.float64


def suits(*tensors: torch.Tensor) -> bool:
    """Tell whether the kernels run on such queries, keys and values [..., d]."""
    dim = tensors[0].shape[-1]
    return (
        all(t.is_cuda and t.dtype == tensors[0].dtype for t in tensors)
        and tensors[0].dtype in HALVES
        and 0 < dim <= LARGEST_HEAD
        and dim % HEAD_STEP == 0
        and torch.cuda.get_device_capability(tensors[0].device) >= OLDEST
    )


def suits_training(query: torch.Tensor, with_lse: bool) -> bool:
    """Tell whether :func:`tree_attention` runs on such queries; the gradient of the log-sum-exp widens heads."""
    return suits(query) and query.shape[-1] + with_lse * HEAD_STEP <= LARGEST_HEAD


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, scale: float, causal: bool,
           window: int | None = None) -> Any:  # fmt: skip
    """Return out [T, Hq, d], lse [Hq, T] and two tensors for the backward pass, of gathered keys, values [M, Hk, d].

    Where a query sees no key, or no weight but 0, the kernels give an output of 0 and a log-sum-exp of inf; they give
    inf for NaN, too. The logarithm of the output tells these apart, as -inf and NaN.
    """
    starts, sides = (rows.starts_q, rows.starts_k, rows.max_q, rows.max_k), _sides(window)
    found = aten._flash_attention_forward(query, key, value, *starts, 0.0, causal, False, scale=scale, **sides)
    out, lse, *rest = found[:4]
    return out, torch.where(lse == torch.inf, out[..., 0].T.log(), lse), *rest


def _sides(window: int | None) -> dict[str, int]:
    """Return a window as the kernels' arguments: keys on both sides of a query's own."""
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
        # The kernels take the sum of output x gradient off the gradient of the weights. In a dimension more it takes
        # in the gradient of the log-sum-exp, too; values of 0 there change no weight.
        query, out, grad_out, key, value = (pad(t, (0, HEAD_STEP)) for t in (query, out, grad_out, key, value))
        grad_out[..., dim], out[..., dim] = 1, -grad_lse.T.to(out.dtype)
    starts = rows.starts_q, rows.starts_k, rows.max_q, rows.max_k
    found = aten._flash_attention_backward(
        grad_out, query, key, value, out, lse, *starts, 0.0, causal, seed, unused, scale=scale, **_sides(window)
    )
    return [g[..., :dim] for g in found]


def _attend(query: torch.Tensor, caches: Pair, rows: Rows, scale: float, causal: bool,
            window: int | None = None) -> Pair:  # fmt: skip
    """Return out [T, Hq, d] and lse [T, Hq] over gathered entries of the caches [N, Hk, d]."""
    if not rows.places.numel():
        return torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    key, value = (cache.index_select(0, rows.places) for cache in caches)
    if not suits(query, key):
        return _decode(query, key, value, rows, scale)
    causal = causal and (rows.max_q > 1 or window is not None)
    out, lse, *_ = _flash(query, key, value, rows, scale, causal, window)
    return out, lse.T


def _decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, scale: float) -> Pair:
    """Attend rows of one query each (N = T), padded to the longest, with few launches for any N."""
    starts, place = rows.starts_k, torch.arange(rows.max_k, device=query.device)
    unseen = place >= starts.diff()[:, None]  # [N, K]
    # a key that is not seen must not be another sequence's, which may hold NaN: it is the own first one
    index = (starts[:-1, None] + place.masked_fill(unseen, 0)).clamp(max=len(key) - 1)
    queries = query.float().unflatten(1, (key.shape[1], -1))  # [N, Hk, g, d]
    parts = []
    for piece in torch.arange(len(query), device="cpu").split(max(PIECE // (rows.max_k * key[0].numel()), 1)):
        some = slice(int(piece[0]), int(piece[-1]) + 1)
        with without_autocast(query.device):
            score = torch.einsum("nhgd,nkhd->nhgk", queries[some], key[index[some]].float()) * scale
            score = score.masked_fill(unseen[some, None, None], -torch.inf)
            out = torch.einsum("nhgk,nkhd->nhgd", score.softmax(-1), value[index[some]].float())
        none = unseen[some].all(1)
        parts.append((out.flatten(1, 2).masked_fill(none[:, None, None], 0), score.logsumexp(-1).flatten(1)))
    out, lse = (torch.cat(found) for found in zip(*parts))
    return out.to(query.dtype), lse


# by whether the rows are of groups: the tensors that the last rows were made of, their versions, and these rows
_known: dict[bool, tuple[list[Any], list[int], Rows]] = {}


def _rows(block_size: int, tables: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, *groups: torch.Tensor
          ) -> Rows:  # fmt: skip
    """Return the rows of the paged keys of sequences, or of groups of them, which start at the sequences ``groups``.

    Every layer of a model asks for the same ones: the host waits for the device in the first only. Tensors made under
    ``torch.inference_mode`` count no writes; for them it waits in every layer.
    """
    given = (tables, lens, starts, *groups)
    counted = not any(t.is_inference() for t in given)
    versions = [block_size, *(t._version for t in given)] if counted else []
    refs, known, rows = _known.get(bool(groups), ([], [], None))
    if counted and rows is not None and known == versions and all(ref() is t for ref, t in zip(refs, given)):
        return rows
    starts_q = starts[groups[0].long()] if groups else starts
    starts_k = pad(lens.cumsum(0), (1, 0)).int()
    total, max_q, max_k = torch.stack([starts_k[-1], starts_q.diff().max(), lens.max()]).tolist()
    row = torch.arange(len(lens), device=lens.device).repeat_interleave(lens, output_size=total)
    place = torch.arange(total, device=lens.device) - starts_k[row]  # within its sequence or group
    index = tables[row, place // block_size].long() * block_size + place % block_size
    rows = Rows(index, starts_q, starts_k, max_q, max_k)
    if counted:
        _known[bool(groups)] = [weakref.ref(t) for t in given], versions, rows
    return rows


def paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, query_starts: torch.Tensor, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> Pair:  # fmt: skip
    """Compute ``reference.paged_attention``."""
    tables, options = (block_tables, seq_lens, query_starts), (scale, window, softcap)
    if not query.numel() or softcap is not None:
        return reference.paged_attention(query, key_cache, value_cache, *tables, *options)
    rows = _rows(key_cache.shape[1], *tables)
    if not suits(query, key_cache) and (window is not None or rows.max_q > 1 or len(query) < len(seq_lens)):
        return reference.paged_attention(query, key_cache, value_cache, *tables, *options)
    return _attend(query, (key_cache.flatten(0, 1), value_cache.flatten(0, 1)), rows, scale, True, window)


def shared_prefix_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, group_tables: torch.Tensor,
    group_lens: torch.Tensor, group_starts: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    query_starts: torch.Tensor, scale: float,
) -> Pair:  # fmt: skip
    """Compute ``reference.shared_prefix_attention``: a prefix is gathered once for its group."""
    if not suits(query, key_cache):
        groups = group_tables, group_lens, group_starts
        sequences = block_tables, seq_lens, query_starts
        return reference.shared_prefix_attention(query, key_cache, value_cache, *groups, *sequences, scale)
    own = paged_attention(query, key_cache, value_cache, block_tables, seq_lens, query_starts, scale)
    if not query.numel():
        return own
    rows = _rows(key_cache.shape[1], group_tables, group_lens, query_starts, group_starts)
    shared = _attend(query, (key_cache.flatten(0, 1), value_cache.flatten(0, 1)), rows, scale, causal=False)
    return reference.merge_attention(*shared, *own)


def _packed_rows(layout: TreeLayout, device: torch.device, window: int | None) -> Rows:
    """Return each node as a row, with the keys that its queries see; made once."""
    if (place := ("library", device, window)) not in layout.tiles:
        places = torch.arange(layout.num_tokens, device="cpu")
        stretches = layout.seen_by_nodes(window)
        index = torch.cat([places[s] for row in stretches for s in row])
        keys = torch.tensor([sum(s.stop - s.start for s in row) for row in stretches], device="cpu")
        queries = layout.nodes[:, 1] - layout.nodes[:, 0]
        starts = [pad(n.cumsum(0), (1, 0)).int().to(device) for n in (queries, keys)]
        layout.tiles[place] = Rows(index.to(device), starts[0], starts[1], int(queries.max()), int(keys.max()))
    return layout.tiles[place]


class _Packed(torch.autograd.Function):
    """Keep query, key, value and output for the backward pass, which gathers keys again."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, ctx.layout, ctx.scale, *ctx.window = inputs
        ctx.save_for_backward(query, key, value, *output)
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)


class _Tree(_Packed):
    """One softmax for a query, over the keys of the path to its node and of the node, which are gathered."""

    @staticmethod
    def forward(query, key, value, layout: TreeLayout, scale: float, window: int | None):
        rows = _packed_rows(layout, query.device, window)
        keys, values = (t.index_select(0, rows.places) for t in (key, value))
        return tuple(_flash(query, keys, values, rows, scale, True, window))

    @staticmethod
    @_gradients.once("tree_attention")
    def backward(ctx, grad_out, grad_lse, *_):
        query, key, value, out, lse, seed, unused = ctx.saved_tensors
        [window] = ctx.window
        rows = _packed_rows(ctx.layout, query.device, window)
        keys, values = (t.index_select(0, rows.places) for t in (key, value))
        arguments = (grad_out, grad_lse, query, out, lse, seed, unused, ctx.scale, window)
        grad_query, *grads = _flash_gradients(keys, values, rows, True, *arguments)
        # sums over the copies of a key in float32, and always in the same order
        sums = (aten.embedding_dense_backward(g.flatten(1), rows.places, len(key), -1, False) for g in grads)
        return grad_query, *(s.view_as(key) for s in sums), None, None, None


class Groups(NamedTuple):
    """Some groups of a layout of two levels, T tokens, of which every query attends to its part and to a prefix."""

    tokens: slice  # where they lie in the batch
    parts: Rows  # each prefix and each suffix, on itself; no places
    prefixes: Rows | None  # the suffixes of a group on its prefix, and the other queries on nothing


def _packed_groups(layout: GroupedLayout, numbers: int, device: torch.device) -> list[Groups]:
    """Return the groups of a layout whose tokens have so many ``numbers`` in their queries; made once."""
    if (place := ("groups", numbers, device)) not in layout.tiles:
        pieces: list[list[tuple[slice, list[slice]]]] = []
        size = 0
        for prefix, suffixes in layout.spans():
            tokens = (suffixes or [prefix])[-1].stop - prefix.start
            if not pieces or size + tokens * numbers > GROUPS:
                pieces.append([])
                size = 0
            pieces[-1].append((prefix, suffixes))
            size += tokens * numbers
        layout.tiles[place] = [made for piece in pieces if (made := _groups(piece, device))]
    return layout.tiles[place]


def _groups(spans: list[tuple[slice, list[slice]]], device: torch.device) -> Groups | None:
    """Return None if the groups hold no token."""
    begin, lens, queries, keys, places = spans[0][0].start, [], [], [], []
    for prefix, suffixes in spans:
        before = prefix.stop - prefix.start
        behind = (suffixes[-1].stop if suffixes else prefix.stop) - prefix.stop
        lens += [part.stop - part.start for part in [prefix, *suffixes] if part.stop > part.start]
        shared = before if behind else 0
        queries += [before, behind]
        keys += [0, shared]
        places.append(torch.arange(prefix.start - begin, prefix.start - begin + shared, device="cpu"))
    if not lens:
        return None
    starts_q, starts_k, starts = (
        pad(torch.tensor(n, device="cpu").cumsum(0), (1, 0)).int().to(device) for n in (queries, keys, lens)
    )
    return Groups(
        slice(begin, begin + sum(lens)),
        Rows(places[0][:0].to(device), starts, starts, max(lens), max(lens)),
        Rows(torch.cat(places).to(device), starts_q, starts_k, max(queries), max(keys)) if any(keys) else None,
    )


class _Grouped(_Packed):
    """Two softmaxes for a query, merged: over its part, and over the prefix before it without a mask.

    The backward pass of each takes the merged output and log-sum-exp, which say what the weights of both sum up to. A
    few groups are computed at one time: the kernels need 32-bit copies of the gradients.
    """

    @staticmethod
    def forward(query, key, value, layout: GroupedLayout, scale: float):
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32)
        numbers = query.shape[1] * query.shape[2]
        for tokens, parts, prefixes in _packed_groups(layout, numbers, query.device):
            q, k, v = (t[tokens] for t in (query, key, value))
            own, own_lse, *rest = _flash(q, k, v, parts, scale, causal=True)
            if prefixes is None:
                out[tokens], lse[:, tokens] = own, own_lse
                continue
            keys, values = (t.index_select(0, prefixes.places) for t in (k, v))
            shared, shared_lse, *_ = _flash(q, keys, values, prefixes, scale, causal=False)
            torch.logaddexp(own_lse, shared_lse, out=lse[:, tokens])
            share = (shared_lse - own_lse).sigmoid().T[..., None]
            torch.lerp(own, shared, share.to(own.dtype), out=out[tokens])
        return out, lse, *rest

    @staticmethod
    @_gradients.once("tree_attention")
    def backward(ctx, grad_out, grad_lse, *_):
        query, key, value, out, lse, seed, unused = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (query, key, value)]
        for tokens, parts, prefixes in _packed_groups(ctx.layout, query.shape[1] * query.shape[2], query.device):
            q, k, v, part_out = (t[tokens] for t in (query, key, value, out))
            grad_part = None if grad_out is None else grad_out[tokens]
            grad_part_lse = None if grad_lse is None else grad_lse[:, tokens].contiguous()
            part_lse = lse[:, tokens].contiguous()
            given = (grad_part, grad_part_lse, q, part_out, part_lse, seed, unused, ctx.scale)
            own = _flash_gradients(k, v, parts, True, *given)
            if prefixes is None:
                for whole, piece in zip(grads, own):
                    whole[tokens] = piece
                continue
            keys, values = (t.index_select(0, prefixes.places) for t in (k, v))
            shared = _flash_gradients(keys, values, prefixes, False, *given)
            torch.add(own[0], shared[0], out=grads[0][tokens])
            for whole, piece, more in zip(grads[1:], own[1:], shared[1:]):
                whole[tokens] = piece
                whole[tokens].index_add_(0, prefixes.places, more)
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
