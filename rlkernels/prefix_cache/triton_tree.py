"""tree_attention as Triton kernels, forward and backward, on the packed tokens as they are.

Token j is seen by token i where ``j <= i < end[j]``. A tile holds tokens of one node, or crosses nodes:

- Two levels: a tile of queries reads two stretches of keys, those of its prefix and of its node.
- Deeper trees: a tile of queries reads a list of blocks of keys: first those that all its queries see, which need no
  mask, then the others.
- Tiles that cross nodes are full, and suit many short nodes. Their masks look up ``end`` for every key.

A tile of keys is seen by one stretch of queries, over which its gradients are summed. If that stretch is much longer
than others, it is cut into pieces, whose sums in float32 are added up afterwards, unless enough others run meanwhile.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from rlkernels.backend import generation, next_power_of_2, on_its_device, triton_interpreted
from rlkernels.prefix_cache.layout import TreeLayout

LOG2_E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
PIECES = 8  # into which a long stretch of queries is cut
MAX_UNCUT = 4096  # queries times heads that one program may go through in any case
CONCURRENT_PROGRAMS = 256  # programs that a GPU runs side by side, about


class Tiles(NamedTuple):
    """What the programs of the kernels work on; the longest loops first."""

    queries: torch.Tensor  # int32 [tiles, 5], see :func:`_forward_kernel`
    blocks: torch.Tensor | None  # int32 [blocks of all tiles, 2]: first and last key; None for two levels
    queries_back: torch.Tensor  # the same two for the query kernel, whose blocks may be longer
    blocks_back: torch.Tensor | None
    keys: torch.Tensor  # int32 [programs, 5], see :func:`_key_kernel`
    cut: torch.Tensor  # int32 [tiles of keys that are cut into pieces, 2]: first key and end
    ends: torch.Tensor | None  # int32 [T], for tiles that cross nodes


@triton.jit
def _rows(pointer, token, valid, heads, head, DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """Load [BLOCK, BLOCK_D] of a contiguous [T, heads, DIM], zero where not valid; ``valid`` None: all are."""
    dim = tl.arange(0, BLOCK_D)
    at = pointer + (token.to(tl.int64) * heads + head)[:, None] * DIM + dim[None, :]
    if valid is not None:
        x = tl.load(at, mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM == BLOCK_D:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(dim < DIM)[None, :], other=0.0)
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def _row_pair(a, b, token, valid, heads, head, DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """Load the same rows of two tensors."""
    x = _rows(a, token, valid, heads, head, DIM, BLOCK_D, UPCAST)
    y = _rows(b, token, valid, heads, head, DIM, BLOCK_D, UPCAST)
    return x, y


@triton.jit
def _store_rows(pointer, x, token, valid, heads, head, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dim = tl.arange(0, BLOCK_D)
    at = pointer + (token.to(tl.int64) * heads + head)[:, None] * DIM + dim[None, :]
    tl.store(at, x.to(pointer.dtype.element_ty), mask=valid[:, None] & (dim < DIM)[None, :])


@triton.jit
def _tile(tile):
    """Load the five numbers of a row of :class:`Tiles`."""
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)


@triton.jit
def _keys_at(at, skip, prefix, prefix_end, part, end, BLOCK_N: tl.constexpr):
    """Return the keys of one block of the prefix, or after its ``skip`` of the part, and which exist."""
    start = tl.where(at < skip, prefix + at, part + at - skip)
    n = start + tl.arange(0, BLOCK_N)
    return n, n < tl.where(at < skip, prefix_end, end)


@triton.jit
def _whole_block(at, whole, prefix, part, BLOCK_N: tl.constexpr):
    """Return the keys of one of the blocks that all queries of a tile see: ``whole`` of the prefix, then the part's."""
    return tl.where(at < whole, prefix + at, part + at - whole) + tl.arange(0, BLOCK_N)


@triton.jit
def _masked_block(at, tail, first, prefix_end, end, BLOCK_N: tl.constexpr):
    """Return the keys of one of the other blocks, the prefix's ``tail`` and those of the diagonal, and which exist."""
    left = tl.where(tail < prefix_end, BLOCK_N, 0)
    n = tl.where(at < left, tail, first + at - left) + tl.arange(0, BLOCK_N)
    return n, n < tl.where(at < left, prefix_end, end)


@triton.jit
def _listed_block(blocks, at, BLOCK_N: tl.constexpr):
    """Return the keys of a block in a list, which may go beyond its last key."""
    return tl.load(blocks + at // BLOCK_N * 2) + tl.arange(0, BLOCK_N)


@triton.jit
def _seen(token, n, valid, ends):
    """Tell which keys each query sees, [BLOCK_M, BLOCK_N]; in a tile that crosses nodes, keys may be on other paths."""
    seen = valid[None, :] & (n[None, :] <= token[:, None])
    if ends is not None:
        seen &= token[:, None] < tl.load(ends + n, mask=valid, other=0)[None, :]
    return seen


@triton.jit
def _attend(q, k, v, seen, largest, total, acc, scale):
    """Take a block of keys into the softmax of a tile of queries; ``seen`` None: every query sees every key."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if seen is not None:
        score = tl.where(seen, score, -float("inf"))
    new = tl.maximum(largest, tl.max(score, 1))
    safe = new if seen is None else tl.where(new == -float("inf"), 0.0, new)
    weight, shrink = tl.exp2(score - safe[:, None]), tl.exp2(largest - safe)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return new, total, acc


@triton.jit
def _forward_kernel(
    query, key, value, out, lse, tiles, blocks, ends, heads, kv_heads, scale,
    HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend a tile of queries of a head; tiles: first query, end, start of the node, start, end of the prefix.

    With ``blocks`` the last three are the places of the first block, the first that needs a mask, and the end.
    """
    head = tl.program_id(1)
    first, stop, begin, middle, end = _tile(tiles + tl.program_id(0) * 5)
    token = first + tl.arange(0, BLOCK_M)
    inside = token < stop
    q = _rows(query, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if blocks is None:
        part, prefix, prefix_end = begin, middle, end
        end = tl.minimum(stop, first + BLOCK_M)
        whole = (prefix_end - prefix) // BLOCK_N * BLOCK_N
        tail = prefix + whole
        whole_keys = whole + first - part
        masked_keys = tl.where(tail < prefix_end, BLOCK_N, 0) + end - first
    else:
        whole_blocks, masked_blocks = blocks + begin * 2, blocks + middle * 2
        whole_keys, masked_keys = (middle - begin) * BLOCK_N, (end - middle) * BLOCK_N
    for at in range(0, whole_keys, BLOCK_N):
        if blocks is None:
            n = _whole_block(at, whole, prefix, part, BLOCK_N)
        else:
            n = _listed_block(whole_blocks, at, BLOCK_N)
        k, v = _row_pair(key, value, n, None, kv_heads, head // HEADS_PER_KV, DIM, BLOCK_D, UPCAST)
        largest, total, acc = _attend(q, k, v, None, largest, total, acc, scale * LOG2_E)
    for at in range(0, masked_keys, BLOCK_N):
        if blocks is None:
            n, valid = _masked_block(at, tail, first, prefix_end, end, BLOCK_N)
        else:
            n = _listed_block(masked_blocks, at, BLOCK_N)
            valid = n <= tl.load(masked_blocks + at // BLOCK_N * 2 + 1)
        k, v = _row_pair(key, value, n, valid, kv_heads, head // HEADS_PER_KV, DIM, BLOCK_D, UPCAST)
        seen = _seen(token, n, valid, ends)
        largest, total, acc = _attend(q, k, v, seen, largest, total, acc, scale * LOG2_E)
    acc = acc / tl.where(inside, total, 1.0)[:, None]
    _store_rows(out, acc, token, inside, heads, head, DIM, BLOCK_D)
    natural = (largest + tl.log2(tl.where(inside, total, 1.0))) * LN2
    tl.store(lse + token.to(tl.int64) * heads + head, natural, mask=inside)


@triton.jit
def _delta_kernel(out, grad, grad_lse, delta, rows, DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum output x gradient over each row of [rows, DIM], less the gradient of the log-sum-exp if there is one."""
    row, dim = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    at = row.to(tl.int64)[:, None] * DIM + dim[None, :]
    valid = (row < rows)[:, None] & (dim < DIM)[None, :]
    o, g = tl.load(out + at, mask=valid, other=0.0), tl.load(grad + at, mask=valid, other=0.0)
    x = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if grad_lse is not None:
        x -= tl.load(grad_lse + row, mask=row < rows, other=0.0)
    tl.store(delta + row, x, mask=row < rows)


@triton.jit
def _score_gradients(q, k, v, grad, seen, lse2, row_delta, scale):
    """Compute gradients of the scores, [BLOCK_M, BLOCK_N], without their ``scale``; ``seen`` None: all keys."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
    weight = tl.exp2(score - lse2[:, None])
    outer = tl.dot(grad, tl.trans(v), input_precision="ieee")
    gradients = weight * (outer - row_delta[:, None])
    return gradients if seen is None else tl.where(seen, gradients, 0.0)  # a mask of the weights takes more registers


@triton.jit
def _query_kernel(
    query, key, value, grad, lse, delta, grad_query, tiles, blocks, ends, heads, kv_heads, scale,
    HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one tile of queries; tiles as for the forward kernel."""
    head = tl.program_id(1)
    first, stop, begin, middle, end = _tile(tiles + tl.program_id(0) * 5)
    token = first + tl.arange(0, BLOCK_M)
    inside = token < stop
    q, g = _row_pair(query, grad, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
    at = token.to(tl.int64) * heads + head
    lse2 = tl.load(lse + at, mask=inside, other=0.0) * LOG2_E
    row_delta = tl.load(delta + at, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ends is not None:  # elsewhere a mask costs less than a second loop
        whole_blocks = blocks + begin * 2
        for at in range(0, (middle - begin) * BLOCK_N, BLOCK_N):
            n = _listed_block(whole_blocks, at, BLOCK_N)
            k, v = _row_pair(key, value, n, None, kv_heads, head // HEADS_PER_KV, DIM, BLOCK_D, UPCAST)
            ds = _score_gradients(q, k, v, g, None, lse2, row_delta, scale)
            acc += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
        begin = middle
    if blocks is None:
        part, prefix, prefix_end = begin, middle, end
        skip = tl.cdiv(prefix_end - prefix, BLOCK_N) * BLOCK_N
        end = tl.minimum(stop, first + BLOCK_M)
        keys = skip + end - part
    else:
        blocks += begin * 2
        keys = (end - begin) * BLOCK_N
    for at in range(0, keys, BLOCK_N):
        if blocks is None:
            n, valid = _keys_at(at, skip, prefix, prefix_end, part, end, BLOCK_N)
        else:
            n = _listed_block(blocks, at, BLOCK_N)
            valid = n <= tl.load(blocks + at // BLOCK_N * 2 + 1)
        k, v = _row_pair(key, value, n, valid, kv_heads, head // HEADS_PER_KV, DIM, BLOCK_D, UPCAST)
        seen = _seen(token, n, valid, ends)
        ds = _score_gradients(q, k, v, g, seen, lse2, row_delta, scale)
        acc += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    _store_rows(grad_query, acc * scale, token, inside, heads, head, DIM, BLOCK_D)


@triton.jit
def _key_gradients(k, v, q, g, seen, lse2, row_delta, dk, dv, scale):
    """Add one block of queries to the gradients of a tile of keys; ``scale`` multiplies that of the keys later."""
    # [keys, queries], so that the products below take it as their first operand, from registers
    score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
    weight = tl.exp2(score - lse2[None, :])
    if seen is not None:
        weight = tl.where(seen, weight, 0.0)
    outer = tl.dot(v, tl.trans(g), input_precision="ieee")
    ds = weight * (outer - row_delta[None, :])
    dv += tl.dot(weight.to(g.dtype), g, input_precision="ieee")
    dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
    return dk, dv


@triton.jit
def _key_kernel(
    query, key, value, grad, lse, delta, grad_key, grad_value, piece_sums, tiles, ends, heads, kv_heads, scale,
    HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile (first key, end, first of the queries that may see it and their end, -1) and a KV head; or a piece of a
    tile: its queries, and where its sums go in ``piece_sums`` [pieces, 2, BLOCK_N, kv_heads, DIM]."""
    tile, kv_head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    first, stop, queries, queries_end, piece = _tile(tile)
    n = first + tl.arange(0, BLOCK_N)
    valid = n < stop
    whole_end = queries_end
    if ends is not None:
        until = tl.load(ends + n, mask=valid, other=2**31 - 1)
        whole_end = tl.minimum(whole_end, tl.min(until, 0))
    k, v = _row_pair(key, value, n, valid, kv_heads, kv_head, DIM, BLOCK_D, UPCAST)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # the blocks of queries on the diagonal, those that see all keys of the tile, and what is left of a block
    diagonal = tl.cdiv(tl.maximum(tl.minimum(first + BLOCK_N, queries_end) - queries, 0), BLOCK_M)
    blocks = tl.cdiv(queries_end - queries, BLOCK_M)
    whole = tl.maximum((whole_end - queries) // BLOCK_M - diagonal, 0)
    per_head = tl.maximum(whole, 1)  # a division by 0 would let the compiler assume that the loop has a turn
    for at in range(0, HEADS_PER_KV * whole):
        head = kv_head * HEADS_PER_KV + at // per_head
        token = queries + (diagonal + at % per_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        q, g = _row_pair(query, grad, token, None, heads, head, DIM, BLOCK_D, UPCAST)
        row = token.to(tl.int64) * heads + head
        lse2, row_delta = tl.load(lse + row) * LOG2_E, tl.load(delta + row)
        dk, dv = _key_gradients(k, v, q, g, None, lse2, row_delta, dk, dv, scale * LOG2_E)
    masked = blocks - whole
    per_head = tl.maximum(masked, 1)
    for at in range(0, HEADS_PER_KV * masked):
        head = kv_head * HEADS_PER_KV + at // per_head
        block = at % per_head
        token = queries + tl.where(block < diagonal, block, block + whole) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = token < queries_end
        q, g = _row_pair(query, grad, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
        row = token.to(tl.int64) * heads + head
        lse2 = tl.load(lse + row, mask=inside, other=0.0) * LOG2_E
        row_delta = tl.load(delta + row, mask=inside, other=0.0)
        seen = inside[None, :] & (n[:, None] <= token[None, :])
        if ends is not None:
            seen &= token[None, :] < until[:, None]
        dk, dv = _key_gradients(k, v, q, g, seen, lse2, row_delta, dk, dv, scale * LOG2_E)
    dk *= scale
    if piece < 0:
        _store_rows(grad_key, dk, n, valid, kv_heads, kv_head, DIM, BLOCK_D)
        _store_rows(grad_value, dv, n, valid, kv_heads, kv_head, DIM, BLOCK_D)
    else:
        row = piece * 2 * BLOCK_N + tl.arange(0, BLOCK_N)
        _store_rows(piece_sums, dk, row, valid, kv_heads, kv_head, DIM, BLOCK_D)
        _store_rows(piece_sums, dv, row + BLOCK_N, valid, kv_heads, kv_head, DIM, BLOCK_D)


@triton.jit
def _sum_kernel(
    piece_sums, grad_key, grad_value, cut, kv_heads,
    PIECES: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of a tile that is cut, for a KV head: its gradient of the keys, or of the values."""
    tile, kv_head, of_values = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop = tl.load(cut + tile * 2), tl.load(cut + tile * 2 + 1)
    n = first + tl.arange(0, BLOCK_N)
    valid = n < stop
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for piece in range(PIECES):
        row = ((tile * PIECES + piece) * 2 + of_values) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc += _rows(piece_sums, row, valid, kv_heads, kv_head, DIM, BLOCK_D, False)
    if of_values == 0:
        _store_rows(grad_key, acc, n, valid, kv_heads, kv_head, DIM, BLOCK_D)
    else:
        _store_rows(grad_value, acc, n, valid, kv_heads, kv_head, DIM, BLOCK_D)


def _blocks(query: torch.Tensor) -> dict[str, int]:
    """Choose tile sizes: large ones for tensor cores. On Hopper 64 rows are one warp group's share of a product:
    with eight warps an H100 took twice as long for heads of 128."""
    dim, upcast = query.shape[2], triton_interpreted()
    block_d, wide = max(16, next_power_of_2(dim)), upcast or query.dtype == torch.float32
    block = max(16, min(64, (2048 if wide else 8192) // block_d))
    warps = 8 if wide or (block * block_d >= 8192 and generation(query.device) != 9) else 4
    return {"DIM": dim, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_D": block_d, "UPCAST": upcast,
            "num_warps": warps, "num_stages": 2}  # fmt: skip


def _all_blocks(query: torch.Tensor, crosses: bool) -> tuple[dict[str, int], ...]:
    """Choose tile sizes: in general, of the forward kernel, of the query kernel.

    The forward kernel takes half of the keys where that leaves registers for one more program on a multiprocessor. For
    heads of 128 an H200 took 1.24 ms for what took 1.40 ms. The query kernel has two loops if tiles cross nodes, which
    leave four warps registers for half of the keys, and eight in float32 with heads of up to 32.
    """
    sizes = _blocks(query)
    fewer = sizes | {"BLOCK_N": min(32, sizes["BLOCK_N"])}
    if sizes["num_warps"] != 4:
        return sizes, sizes, fewer if crosses and sizes["BLOCK_D"] <= 32 else sizes
    ahead = sizes
    # other generations than 9 and 10 multiply by warp, which holds all operands of a product in registers
    if sizes["BLOCK_D"] == 128 or crosses or generation(query.device) not in (9, 10):
        ahead = fewer | {"num_stages": 3 if sizes["BLOCK_D"] == 128 else 2}
    return sizes, ahead, fewer if crosses else sizes


def _cut(layout: TreeLayout, block: int, crosses: bool) -> tuple[np.ndarray, np.ndarray]:
    """Cut the packed tokens, or each node by itself, into tiles; return first token and end of each."""
    starts = layout.nodes[: 1 if crosses else None, 0].numpy()
    counts = -(-np.diff(starts, append=layout.num_tokens) // block)
    number = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)  # within its node
    first = starts.repeat(counts) + number * block
    return first, np.append(first[1:], layout.num_tokens)[: len(first)]


def two_level_tiles(layout: TreeLayout, rows: int) -> torch.Tensor | None:
    """Return ``queries`` of :class:`Tiles` of two levels, of so many queries; None for a deeper tree."""
    parents = np.array(layout.parents(), dtype=np.int64)
    is_child = parents >= 0
    if (parents[parents[is_child]] >= 0).any():
        return None
    part, part_end = layout.nodes[:, 0].numpy(), layout.nodes[:, 1].numpy()
    prefix = np.where(is_child, part[parents], part)
    prefix_end = np.where(is_child, part_end[parents], part)
    first, stop = _cut(layout, rows, False)
    node = part.searchsorted(first, "right") - 1
    table = np.stack([first, stop, part[node], prefix[node], prefix_end[node]], 1)
    longest = (table[:, 2] - first + table[:, 3] - table[:, 4]).argsort(kind="stable")
    return torch.from_numpy(table[longest].astype(np.int32))


def query_tiles(layout: TreeLayout, rows: int, block: int, crosses: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``queries`` and ``blocks`` of :class:`Tiles`, of so many queries and keys; the longest loops first.

    A block of keys is seen by a stretch of tiles, and within it all of it is seen by a stretch.
    """
    first, stop = _cut(layout, rows, crosses)
    start, limit = _cut(layout, block, crosses)
    ends = layout.end.numpy()
    whole_end, end = np.minimum.reduceat(ends, start), np.maximum.reduceat(ends, start)
    begin = first.searchsorted(start, "right") - 1
    seen = first.searchsorted(end) - begin
    whole = limit - start == block
    whole_from, whole_to = first.searchsorted(limit), np.where(whole, stop.searchsorted(whole_end, "right"), 0)
    number = np.arange(len(start)).repeat(seen)
    tile = np.arange(len(number)) - (seen.cumsum() - seen - begin).repeat(seen)
    masked = (tile < whole_from[number]) | (tile >= whole_to[number])
    order = (tile * 2 + masked).argsort(kind="stable")
    counts = np.bincount(tile * 2 + masked, minlength=2 * len(first)).reshape(-1, 2)
    stops = counts.cumsum().reshape(-1, 2)
    table = np.stack([first, stop, stops[:, 0] - counts[:, 0], stops[:, 0], stops[:, 1]], 1)
    longest = (-counts.sum(1)).argsort(kind="stable")
    blocks = np.stack([start, limit - 1], 1)[number[order]]
    return torch.from_numpy(table[longest].astype(np.int32)), torch.from_numpy(blocks.astype(np.int32))


def key_tiles(
    layout: TreeLayout, block: int, group: int, kv_heads: int, crosses: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``keys`` and ``cut`` of :class:`Tiles`; a program goes through ``group`` heads of queries.

    Cut a tile if its queries exceed all of: ``MAX_UNCUT`` / ``group``; twice the mean; and the work of one program when
    ``CONCURRENT_PROGRAMS`` share it. So at most ``CONCURRENT_PROGRAMS`` tiles are cut, however long the batch.
    """
    first, stop = _cut(layout, block, crosses)
    end = np.maximum.reduceat(layout.end.numpy(), first) if len(first) else first
    length = end - first
    most = max(MAX_UNCUT / group, 2 * length.sum() / max(len(length), 1), length.sum() * kv_heads / CONCURRENT_PROGRAMS)
    short, cut = (length <= most).nonzero()[0], (length > most).nonzero()[0]
    step = -(-length[cut] // (16 * PIECES)) * 16
    starts = np.minimum(first[cut] + step * np.arange(PIECES + 1)[:, None], end[cut]).T  # [cut, PIECES + 1]
    tile = np.concatenate([short, cut.repeat(PIECES)])
    queries = np.concatenate([first[short], starts[:, :-1].flatten()])
    queries_end = np.concatenate([end[short], starts[:, 1:].flatten()])
    piece = np.concatenate([np.full(len(short), -1), np.arange(PIECES * len(cut))])
    table = np.stack([first[tile], stop[tile], queries, queries_end, piece], 1)
    longest = (queries - queries_end).argsort(kind="stable")
    cuts = np.stack([first[cut], stop[cut]], 1)
    return torch.from_numpy(table[longest].astype(np.int32)), torch.from_numpy(cuts.astype(np.int32))


def _tiles(layout: TreeLayout, query: torch.Tensor, kv_heads: int, crosses: bool, blocks: tuple[dict[str, int], ...]
           ) -> Tiles:  # fmt: skip
    """Return the tiles of these sizes on the query's device; made once per layout, used in every layer."""
    rows, ahead, back = blocks[0]["BLOCK_M"], blocks[1]["BLOCK_N"], blocks[2]["BLOCK_N"]
    group, device = query.shape[1] // kv_heads, query.device
    if (cache_key := (crosses, rows, ahead, back, group, kv_heads, device)) not in layout.kernel_tables:
        table = None if crosses else two_level_tiles(layout, rows)
        queries = {
            block: (table, None) if table is not None else query_tiles(layout, rows, block, crosses)
            for block in (ahead, back)
        }
        keys = key_tiles(layout, rows, group, kv_heads, crosses)
        tables = (*queries[ahead], *queries[back], *keys, layout.end.int() if crosses else None)
        on_device: list[Any] = [None if table is None else table.to(device) for table in tables]
        layout.kernel_tables[cache_key] = Tiles(*on_device)
    return layout.kernel_tables[cache_key]


@on_its_device
def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, scale: float, crosses: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend contiguous query [T, Hq, d], key, value [T, Hk, d] -> out [T, Hq, d], lse float32 [T, Hq]."""
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    out = torch.empty_like(query, dtype=torch.float32 if triton_interpreted() else query.dtype)
    tokens, heads, _ = query.shape
    lse = query.new_empty(tokens, heads, dtype=torch.float32)
    kv_heads = key.shape[1]
    blocks = _all_blocks(query, crosses)
    tiles = _tiles(layout, query, kv_heads, crosses, blocks)
    if tokens and heads:
        _forward_kernel[(len(tiles.queries), heads)](
            query, key, value, out, lse, tiles.queries, tiles.blocks, tiles.ends, heads, kv_heads, scale,
            HEADS_PER_KV=heads // kv_heads, **blocks[1],
        )  # fmt: skip
    return (out.to(query.dtype) if triton_interpreted() else out), lse


@on_its_device
def backward(grad: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
             value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, layout: TreeLayout, scale: float, crosses: bool
             ) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key and value."""
    heads, kv_heads = query.shape[1], key.shape[1]
    sizes, _, back = blocks = _all_blocks(query, crosses)
    tiles = _tiles(layout, query, kv_heads, crosses, blocks)
    dtype = torch.float32 if triton_interpreted() else query.dtype
    grads = [torch.empty_like(t, dtype=dtype) for t in (query, key, value)]
    if query.numel():
        group = heads // kv_heads
        whole = {name: sizes[name] for name in ("DIM", "BLOCK_D")}
        delta, rows = torch.empty_like(lse), max(1, 4096 // sizes["BLOCK_D"])
        _delta_kernel[(triton.cdiv(lse.numel(), rows),)](out, grad, grad_lse, delta, lse.numel(), BLOCK_R=rows, **whole)
        shared = (query, key, value, grad, lse, delta)
        _query_kernel[(len(tiles.queries_back), heads)](
            *shared, grads[0], tiles.queries_back, tiles.blocks_back, tiles.ends, heads, kv_heads, scale,
            HEADS_PER_KV=group, **back,
        )  # fmt: skip
        # two accumulators leave registers for fewer queries
        sizes = sizes | {"BLOCK_M": max(16, sizes["BLOCK_M"] // 2)}
        piece_sums = lse.new_empty(len(tiles.cut), PIECES, 2, sizes["BLOCK_N"], kv_heads, query.shape[2])
        _key_kernel[(len(tiles.keys), kv_heads)](
            *shared, grads[1], grads[2], piece_sums, tiles.keys, tiles.ends, heads, kv_heads, scale,
            HEADS_PER_KV=group, **sizes,
        )  # fmt: skip
        if len(tiles.cut):
            _sum_kernel[(len(tiles.cut), kv_heads, 2)](
                piece_sums, grads[1], grads[2], tiles.cut, kv_heads, PIECES=PIECES, BLOCK_N=sizes["BLOCK_N"], **whole
            )
    return tuple(t.to(query.dtype) for t in grads) if triton_interpreted() else tuple(grads)
