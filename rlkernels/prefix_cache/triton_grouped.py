"""grouped_attention as Triton kernels, forward and backward, on the packed tokens as they are.

In a group [prefix | suffix 1 | suffix 2 | ...] a token sees its prefix and its own part, never anything behind it. So a
tile of queries reads two stretches of keys, and a tile of the prefix's keys is seen by everything behind it in the
group: one stretch of queries, over which its gradients are summed. Where that stretch is much longer than others it is
cut into pieces, whose sums in float32 are added up afterwards, unless enough others run meanwhile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rlkernels.backend import on_its_device, power_of_2, triton_interpreted
from rlkernels.prefix_cache.layout import GroupedLayout

LOG2_E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
PIECES = 8  # into which a long stretch of queries is cut
SHORT = 4096  # queries times heads that one program may go through in any case
AT_ONCE = 256  # programs that a GPU runs side by side, about


class Tiles(NamedTuple):
    """What the programs of the kernels work on; the longest loops first."""

    queries: torch.Tensor  # int32 [tiles, 5], see :func:`_forward_kernel`
    keys: torch.Tensor  # int32 [programs, 5], see :func:`_key_kernel`
    cut: torch.Tensor  # int32 [tiles of keys that are cut into pieces, 2]: first key and end of its part


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
    """Find the keys of one block of the prefix, or after its ``skip`` of the part -> tokens, and which exist."""
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
def _attend(q, k, v, seen, largest, total, acc, scale):
    """Take a block of keys into the softmax of a tile of queries; ``seen`` None: every query sees every key."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if seen is not None:
        score = tl.where(seen, score, -float("inf"))
    new = tl.maximum(largest, tl.max(score, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)
    weight, shrink = tl.exp2(score - safe[:, None]), tl.exp2(largest - safe)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return new, total, acc


@triton.jit
def _forward_kernel(
    query, key, value, out, lse, tiles, heads, kv_heads, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend a tile of queries of a head; tiles: first query, end, start of the part, start, end of the prefix."""
    head = tl.program_id(1)
    first, part_end, part, prefix, prefix_end = _tile(tiles + tl.program_id(0) * 5)
    token = first + tl.arange(0, BLOCK_M)
    inside = token < part_end
    q = _rows(query, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(part_end, first + BLOCK_M)
    whole = (prefix_end - prefix) // BLOCK_N * BLOCK_N
    tail = prefix + whole
    for at in range(0, whole + first - part, BLOCK_N):
        n = _whole_block(at, whole, prefix, part, BLOCK_N)
        k = _rows(key, n, None, kv_heads, head // GROUP, DIM, BLOCK_D, UPCAST)
        v = _rows(value, n, None, kv_heads, head // GROUP, DIM, BLOCK_D, UPCAST)
        largest, total, acc = _attend(q, k, v, None, largest, total, acc, scale * LOG2_E)
    for at in range(0, tl.where(tail < prefix_end, BLOCK_N, 0) + end - first, BLOCK_N):
        n, valid = _masked_block(at, tail, first, prefix_end, end, BLOCK_N)
        k = _rows(key, n, valid, kv_heads, head // GROUP, DIM, BLOCK_D, UPCAST)
        v = _rows(value, n, valid, kv_heads, head // GROUP, DIM, BLOCK_D, UPCAST)
        seen = valid[None, :] & (n[None, :] <= token[:, None])
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
def _score_gradients(q, k, v, grad, token, inside, n, valid, lse, delta, heads, head, scale):
    """Compute weights and gradients of the scores, [BLOCK_M, BLOCK_N]; a query sees valid keys up to its own."""
    at = token.to(tl.int64) * heads + head
    natural = tl.load(lse + at, mask=inside, other=0.0)
    correction = tl.load(delta + at, mask=inside, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = inside[:, None] & valid[None, :] & (n[None, :] <= token[:, None])
    weight = tl.where(seen, tl.exp2((score - natural[:, None]) * LOG2_E), 0.0)
    outer = tl.dot(grad, tl.trans(v), input_precision="ieee")
    return weight, weight * (outer - correction[:, None]) * scale


@triton.jit
def _query_kernel(
    query, key, value, grad, lse, delta, grad_query, tiles, heads, kv_heads, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one tile of queries; tiles as for the forward kernel."""
    head = tl.program_id(1)
    first, part_end, part, prefix, prefix_end = _tile(tiles + tl.program_id(0) * 5)
    token = first + tl.arange(0, BLOCK_M)
    inside = token < part_end
    q = _rows(query, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
    g = _rows(grad, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    skip = tl.cdiv(prefix_end - prefix, BLOCK_N) * BLOCK_N
    end = tl.minimum(part_end, first + BLOCK_M)
    for at in range(0, skip + end - part, BLOCK_N):
        n, valid = _keys_at(at, skip, prefix, prefix_end, part, end, BLOCK_N)
        k = _rows(key, n, valid, kv_heads, head // GROUP, DIM, BLOCK_D, UPCAST)
        v = _rows(value, n, valid, kv_heads, head // GROUP, DIM, BLOCK_D, UPCAST)
        _, ds = _score_gradients(q, k, v, g, token, inside, n, valid, lse, delta, heads, head, scale)
        acc += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    _store_rows(grad_query, acc, token, inside, heads, head, DIM, BLOCK_D)


@triton.jit
def _key_gradients(k, v, q, g, seen, natural, correction, dk, dv, scale):
    """Add one block of queries to the gradients of a tile of keys; ``scale`` multiplies that of the keys later."""
    # [keys, queries], so that the products below take it as their first operand, from registers
    score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
    weight = tl.exp2(score - natural[None, :])
    if seen is not None:
        weight = tl.where(seen, weight, 0.0)
    outer = tl.dot(v, tl.trans(g), input_precision="ieee")
    ds = weight * (outer - correction[None, :])
    dv += tl.dot(weight.to(g.dtype), g, input_precision="ieee")
    dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
    return dk, dv


@triton.jit
def _key_kernel(
    query, key, value, grad, lse, delta, grad_key, grad_value, parts, tiles, heads, kv_heads, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile (first key, end of its part, first of the queries that may see it and their end, -1) and a KV head; or a
    piece of a tile: its queries, and where its sums go in ``parts`` [pieces, 2, BLOCK_N, kv_heads, DIM]."""
    tile, kv_head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    first, part_end, queries, queries_end, piece = _tile(tile)
    n = first + tl.arange(0, BLOCK_N)
    valid = n < part_end
    k = _rows(key, n, valid, kv_heads, kv_head, DIM, BLOCK_D, UPCAST)
    v = _rows(value, n, valid, kv_heads, kv_head, DIM, BLOCK_D, UPCAST)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # the blocks of queries on the diagonal, those that see all keys of the tile, and what is left of a block
    diagonal = tl.cdiv(tl.maximum(tl.minimum(first + BLOCK_N, queries_end) - queries, 0), BLOCK_M)
    blocks = tl.cdiv(queries_end - queries, BLOCK_M)
    whole = tl.maximum((queries_end - queries) // BLOCK_M - diagonal, 0)
    per_head = tl.maximum(whole, 1)  # a division by 0 would let the compiler assume that the loop has a turn
    for at in range(0, GROUP * whole):
        head = kv_head * GROUP + at // per_head
        token = queries + (diagonal + at % per_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        q = _rows(query, token, None, heads, head, DIM, BLOCK_D, UPCAST)
        g = _rows(grad, token, None, heads, head, DIM, BLOCK_D, UPCAST)
        row = token.to(tl.int64) * heads + head
        natural, correction = tl.load(lse + row) * LOG2_E, tl.load(delta + row)
        dk, dv = _key_gradients(k, v, q, g, None, natural, correction, dk, dv, scale * LOG2_E)
    masked = blocks - whole
    per_head = tl.maximum(masked, 1)
    for at in range(0, GROUP * masked):
        head = kv_head * GROUP + at // per_head
        block = at % per_head
        token = queries + tl.where(block < diagonal, block, block + whole) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = token < queries_end
        q = _rows(query, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
        g = _rows(grad, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
        row = token.to(tl.int64) * heads + head
        natural = tl.load(lse + row, mask=inside, other=0.0) * LOG2_E
        correction = tl.load(delta + row, mask=inside, other=0.0)
        seen = inside[None, :] & (n[:, None] <= token[None, :])
        dk, dv = _key_gradients(k, v, q, g, seen, natural, correction, dk, dv, scale * LOG2_E)
    dk *= scale
    if piece < 0:
        _store_rows(grad_key, dk, n, valid, kv_heads, kv_head, DIM, BLOCK_D)
        _store_rows(grad_value, dv, n, valid, kv_heads, kv_head, DIM, BLOCK_D)
    else:
        row = piece * 2 * BLOCK_N + tl.arange(0, BLOCK_N)
        _store_rows(parts, dk, row, valid, kv_heads, kv_head, DIM, BLOCK_D)
        _store_rows(parts, dv, row + BLOCK_N, valid, kv_heads, kv_head, DIM, BLOCK_D)


@triton.jit
def _sum_kernel(
    parts, grad_key, grad_value, cut, kv_heads,
    PIECES: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of a tile that is cut, for a KV head: its gradient of the keys, or of the values."""
    tile, kv_head, of_values = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, part_end = tl.load(cut + tile * 2), tl.load(cut + tile * 2 + 1)
    n = first + tl.arange(0, BLOCK_N)
    valid = n < part_end
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for piece in range(PIECES):
        row = ((tile * PIECES + piece) * 2 + of_values) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc += _rows(parts, row, valid, kv_heads, kv_head, DIM, BLOCK_D, False)
    if of_values == 0:
        _store_rows(grad_key, acc, n, valid, kv_heads, kv_head, DIM, BLOCK_D)
    else:
        _store_rows(grad_value, acc, n, valid, kv_heads, kv_head, DIM, BLOCK_D)


def _blocks(query: torch.Tensor) -> dict[str, int | bool]:
    """Choose tile sizes: large ones for tensor cores. On Hopper 64 rows are one warp group's share of a product:
    with eight warps an H100 took twice as long for heads of 128."""
    dim = query.shape[2]
    block_d, wide = max(16, power_of_2(dim)), triton_interpreted() or query.dtype == torch.float32
    block = max(16, min(64, (2048 if wide else 8192) // block_d))
    groups = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9
    warps = 8 if wide or (block * block_d >= 8192 and not groups) else 4
    return {"DIM": dim, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_D": block_d, "UPCAST": triton_interpreted(),
            "num_warps": warps, "num_stages": 2}  # fmt: skip


def _forward_blocks(query: torch.Tensor) -> dict[str, int | bool]:
    """Choose tile sizes of the forward kernel. Half of the keys leave room for a third program on a multiprocessor, for
    heads of 128 and four warps: an H200 took 1.24 ms for what took 1.40 ms."""
    sizes = _blocks(query)
    narrow = sizes["BLOCK_D"] == 128 and sizes["num_warps"] == 4
    return sizes | {"BLOCK_N": 32, "num_stages": 3} if narrow else sizes


def query_tiles(layout: GroupedLayout, block: int) -> torch.Tensor:
    """Return int32 [tiles, 5] for the forward and query kernels; the longest loops first."""
    rows = []
    for prefix, suffixes in layout.spans():
        for part in [prefix, *suffixes]:
            before = (prefix.start, prefix.start) if part is prefix else (prefix.start, prefix.stop)
            rows += [(first, part.stop, part.start, *before) for first in range(part.start, part.stop, block)]
    rows.sort(key=lambda r: r[2] - r[0] + r[3] - r[4])
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(-1, 5)


def key_tiles(layout: GroupedLayout, block: int, group: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``keys`` and ``cut`` of :class:`Tiles`; a program goes through ``group`` heads of queries.

    Cut is what would be gone through for more than twice the mean, so less than half of the tiles, and for longer than
    all of it takes ``AT_ONCE`` programs: of more, a long one hides behind the others. So ``parts`` holds less than
    ``AT_ONCE`` tiles, however long the batch.
    """
    tiles = []
    for prefix, suffixes in layout.spans():
        group_end = suffixes[-1].stop if suffixes else prefix.stop
        for part in [prefix, *suffixes]:
            end = group_end if part is prefix else part.stop
            tiles += [(first, part.stop, end) for first in range(part.start, part.stop, block)]
    work = sum(end - first for first, _, end in tiles)
    most = max(SHORT / group, 2 * work / max(len(tiles), 1), work * kv_heads / AT_ONCE)
    cut = [tile for tile in tiles if tile[2] - tile[0] > most]
    rows = [(first, stop, first, end, -1) for first, stop, end in tiles if end - first <= most]
    for i, (first, stop, end) in enumerate(cut):
        step = -(-(end - first) // (16 * PIECES)) * 16
        starts = [min(first + step * j, end) for j in range(PIECES + 1)]
        rows += [(first, stop, starts[j], starts[j + 1], i * PIECES + j) for j in range(PIECES)]
    rows.sort(key=lambda r: r[2] - r[3])
    return (
        torch.tensor(rows, dtype=torch.int32, device="cpu").view(-1, 5),
        torch.tensor([tile[:2] for tile in cut], dtype=torch.int32, device="cpu").view(-1, 2),
    )


def _tiles(layout: GroupedLayout, query: torch.Tensor, kv_heads: int) -> Tiles:
    """Return the tiles on the query's device; made once per layout, used in every layer."""
    block, group, device = int(_blocks(query)["BLOCK_M"]), query.shape[1] // kv_heads, query.device
    if (place := (block, group, kv_heads, device)) not in layout.tiles:
        tiles = query_tiles(layout, block), *key_tiles(layout, block, group, kv_heads)
        layout.tiles[place] = Tiles(*(t.to(device) for t in tiles))
    return layout.tiles[place]


@on_its_device
def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: GroupedLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend contiguous query [T, Hq, d], key, value [T, Hk, d] -> out [T, Hq, d], lse float32 [T, Hq]."""
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    out = torch.empty_like(query, dtype=torch.float32 if triton_interpreted() else query.dtype)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    heads, kv_heads = query.shape[1], key.shape[1]
    tiles = _tiles(layout, query, kv_heads).queries
    if out.numel():
        _forward_kernel[(len(tiles), heads)](
            query, key, value, out, lse, tiles, heads, kv_heads, scale, GROUP=heads // kv_heads,
            **_forward_blocks(query),
        )  # fmt: skip
    return out.to(query.dtype), lse


@on_its_device
def backward(grad: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
             value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, layout: GroupedLayout, scale: float
             ) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key and value."""
    heads, kv_heads = query.shape[1], key.shape[1]
    tiles = _tiles(layout, query, kv_heads)
    dtype = torch.float32 if triton_interpreted() else query.dtype
    grads = [torch.empty_like(t, dtype=dtype) for t in (query, key, value)]
    if query.numel():
        sizes: dict[str, Any] = {"GROUP": heads // kv_heads, **_blocks(query)}
        whole = {name: sizes[name] for name in ("DIM", "BLOCK_D")}
        delta, rows = torch.empty_like(lse), max(1, 4096 // sizes["BLOCK_D"])
        _delta_kernel[(triton.cdiv(lse.numel(), rows),)](out, grad, grad_lse, delta, lse.numel(), BLOCK_R=rows, **whole)
        shared = (query, key, value, grad, lse, delta)
        _query_kernel[(len(tiles.queries), heads)](*shared, grads[0], tiles.queries, heads, kv_heads, scale, **sizes)
        sizes["BLOCK_M"] = max(16, sizes["BLOCK_M"] // 2)  # two accumulators leave registers for fewer queries
        parts = lse.new_empty(len(tiles.cut), PIECES, 2, sizes["BLOCK_N"], kv_heads, query.shape[2])
        _key_kernel[(len(tiles.keys), kv_heads)](
            *shared, grads[1], grads[2], parts, tiles.keys, heads, kv_heads, scale, **sizes
        )
        if len(tiles.cut):
            _sum_kernel[(len(tiles.cut), kv_heads, 2)](
                parts, grads[1], grads[2], tiles.cut, kv_heads, PIECES=PIECES, BLOCK_N=sizes["BLOCK_N"], **whole
            )
    return tuple(t.to(query.dtype) for t in grads)
