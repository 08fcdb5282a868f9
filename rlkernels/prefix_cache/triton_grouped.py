"""grouped_attention as Triton kernels, forward and backward, on the packed tokens as they are.

In a group [prefix | suffix 1 | suffix 2 | ...] a token sees its prefix and its own part, never anything behind it. So a
tile of queries reads two stretches of keys, and a tile of the prefix's keys is seen by everything behind it in the
group: one stretch of queries, over which its gradients are summed.
"""

import torch
import triton
import triton.language as tl

from rlkernels.backend import on_its_device, triton_interpreted
from rlkernels.prefix_cache.layout import GroupedLayout

LOG2_E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def _rows(pointer, token, valid, heads, head, DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """[BLOCK, BLOCK_D] of a contiguous [T, heads, DIM], zero where not valid."""
    dim = tl.arange(0, BLOCK_D)
    at = pointer + (token.to(tl.int64) * heads + head)[:, None] * DIM + dim[None, :]
    x = tl.load(at, mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def _store_rows(pointer, x, token, valid, heads, head, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dim = tl.arange(0, BLOCK_D)
    at = pointer + (token.to(tl.int64) * heads + head)[:, None] * DIM + dim[None, :]
    tl.store(at, x.to(pointer.dtype.element_ty), mask=valid[:, None] & (dim < DIM)[None, :])


@triton.jit
def _tile(tile):
    """First query, end of its part, start of its part, start and end of the prefix before it."""
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)


@triton.jit
def _keys_at(at, skip, prefix, prefix_end, part, end, BLOCK_N: tl.constexpr):
    """Keys of one block of the prefix, or after its ``skip`` of the part -> their tokens, and which of them exist."""
    start = tl.where(at < skip, prefix + at, part + at - skip)
    n = start + tl.arange(0, BLOCK_N)
    return n, n < tl.where(at < skip, prefix_end, end)


@triton.jit
def _forward_kernel(
    query, key, value, out, lse, tiles, heads, kv_heads, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries, see :func:`_tile`, and a head."""
    head = tl.program_id(1)
    first, part_end, part, prefix, prefix_end = _tile(tiles + tl.program_id(0) * 5)
    token = first + tl.arange(0, BLOCK_M)
    inside = token < part_end
    q = _rows(query, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # the prefix in whole blocks, then the part: one loop over both
    skip = tl.cdiv(prefix_end - prefix, BLOCK_N) * BLOCK_N
    end = tl.minimum(part_end, first + BLOCK_M)
    for at in range(0, skip + end - part, BLOCK_N):
        n, valid = _keys_at(at, skip, prefix, prefix_end, part, end, BLOCK_N)
        k = _rows(key, n, valid, kv_heads, head // GROUP, DIM, BLOCK_D, UPCAST)
        v = _rows(value, n, valid, kv_heads, head // GROUP, DIM, BLOCK_D, UPCAST)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        score = tl.where(valid[None, :] & (n[None, :] <= token[:, None]), score, -float("inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        weight, shrink = tl.exp2(score - safe[:, None]), tl.exp2(largest - safe)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        largest = new
    acc = acc / tl.where(inside, total, 1.0)[:, None]
    _store_rows(out, acc, token, inside, heads, head, DIM, BLOCK_D)
    natural = (largest + tl.log2(tl.where(inside, total, 1.0))) * LN2
    tl.store(lse + token.to(tl.int64) * heads + head, natural, mask=inside)


@triton.jit
def _score_gradients(q, k, v, grad, token, inside, n, valid, lse, delta, heads, head, scale):
    """Weights and gradients of the scores, [BLOCK_M, BLOCK_N]; a query sees the valid keys that do not come after."""
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
    """Gradient of one tile of queries; tiles as for the forward kernel."""
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
def _key_kernel(
    query, key, value, grad, lse, delta, grad_key, grad_value, tiles, heads, kv_heads, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile (first key, end of its part, end of the queries that may see it) and a KV head."""
    tile, kv_head = tiles + tl.program_id(0) * 3, tl.program_id(1)
    first, part_end, queries_end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    n = first + tl.arange(0, BLOCK_N)
    valid = n < part_end
    k = _rows(key, n, valid, kv_heads, kv_head, DIM, BLOCK_D, UPCAST)
    v = _rows(value, n, valid, kv_heads, kv_head, DIM, BLOCK_D, UPCAST)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for start in range(first, queries_end, BLOCK_M):
            token = start + tl.arange(0, BLOCK_M)
            inside = token < queries_end
            q = _rows(query, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
            g = _rows(grad, token, inside, heads, head, DIM, BLOCK_D, UPCAST)
            weight, ds = _score_gradients(q, k, v, g, token, inside, n, valid, lse, delta, heads, head, scale)
            dv += tl.dot(tl.trans(weight.to(g.dtype)), g, input_precision="ieee")
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
    _store_rows(grad_key, dk, n, valid, kv_heads, kv_head, DIM, BLOCK_D)
    _store_rows(grad_value, dv, n, valid, kv_heads, kv_head, DIM, BLOCK_D)


def _blocks(query: torch.Tensor) -> dict[str, int | bool]:
    """Tile sizes: large ones where the tensor cores work."""
    dim = query.shape[2]
    block_d, wide = max(16, triton.next_power_of_2(dim)), triton_interpreted() or query.dtype == torch.float32
    block = max(16, min(64, (2048 if wide else 8192) // block_d))
    return {"DIM": dim, "BLOCK_M": block, "BLOCK_N": block, "BLOCK_D": block_d, "UPCAST": triton_interpreted(),
            "num_warps": 8 if wide or block * block_d >= 8192 else 4, "num_stages": 2}  # fmt: skip


def query_tiles(layout: GroupedLayout, block: int) -> torch.Tensor:
    """int32 [tiles, 5] for the forward and query kernels; the longest loops first."""
    rows = []
    for prefix, suffixes in layout.spans():
        for part in [prefix, *suffixes]:
            before = (prefix.start, prefix.start) if part is prefix else (prefix.start, prefix.stop)
            rows += [(first, part.stop, part.start, *before) for first in range(part.start, part.stop, block)]
    rows.sort(key=lambda r: r[2] - r[0] + r[3] - r[4])
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(-1, 5)


def key_tiles(layout: GroupedLayout, block: int) -> torch.Tensor:
    """int32 [tiles, 3] for the key kernel; the longest loops first."""
    rows = []
    for prefix, suffixes in layout.spans():
        group_end = suffixes[-1].stop if suffixes else prefix.stop
        for part in [prefix, *suffixes]:
            end = group_end if part is prefix else part.stop
            rows += [(first, part.stop, end) for first in range(part.start, part.stop, block)]
    rows.sort(key=lambda r: r[0] - r[2])
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(-1, 3)


def _tiles(layout: GroupedLayout, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both kinds on the device of the query; made once per layout, used in every layer."""
    place = int(_blocks(query)["BLOCK_M"]), query.device
    if place not in layout.tiles:
        layout.tiles[place] = query_tiles(layout, place[0]).to(place[1]), key_tiles(layout, place[0]).to(place[1])
    return layout.tiles[place]


@on_its_device
def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: GroupedLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous query [T, Hq, d], key and value [T, Hk, d] -> out [T, Hq, d], lse float32 [T, Hq]."""
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    out = torch.empty_like(query, dtype=torch.float32 if triton_interpreted() else query.dtype)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    heads, kv_heads = query.shape[1], key.shape[1]
    tiles, _ = _tiles(layout, query)
    if out.numel():
        _forward_kernel[(len(tiles), heads)](
            query, key, value, out, lse, tiles, heads, kv_heads, scale, GROUP=heads // kv_heads, **_blocks(query)
        )
    return out.to(query.dtype), lse


@on_its_device
def backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
             lse: torch.Tensor, layout: GroupedLayout, scale: float) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """-> gradients of query, key and value."""
    heads, kv_heads = query.shape[1], key.shape[1]
    delta = (out.float() * grad.float()).sum(-1)  # [T, Hq]
    queries, keys = _tiles(layout, query)
    dtype = torch.float32 if triton_interpreted() else query.dtype
    grads = [torch.empty_like(t, dtype=dtype) for t in (query, key, value)]
    if query.numel():
        shared = (query, key, value, grad, lse, delta)
        sizes = {"GROUP": heads // kv_heads, **_blocks(query)}
        _query_kernel[(len(queries), heads)](*shared, grads[0], queries, heads, kv_heads, scale, **sizes)
        # two accumulators leave registers for fewer queries; products with them are asynchronous on sm_90 and would
        # still read what a second stage copies over
        sizes |= {"BLOCK_M": max(16, sizes["BLOCK_M"] // 2), "num_stages": 1}
        _key_kernel[(len(keys), kv_heads)](*shared, grads[1], grads[2], keys, heads, kv_heads, scale, **sizes)
    return tuple(t.to(query.dtype) for t in grads)
