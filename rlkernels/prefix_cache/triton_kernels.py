"""Paged attention as Triton kernels: one kernel for sequences and shared prefixes, split along the keys, then merged.

The rows of a tile are the (token, head) pairs of neighbouring queries that share a KV head, so decoding with grouped
heads, and all samples of a shared prefix, fill a tile for the tensor cores and read each key once. No kernel needs a
length on the host: tiles find their sequence by bisection, and spare ones leave at once. Softmax in float32, base 2.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rlkernels._fakes import FAKES, attention
from rlkernels.backend import generation, kernel_op, next_power_of_2, triton_interpreted
from rlkernels.prefix_cache.reference import apart

LN2 = tl.constexpr(0.6931471805599453)
MIN_SPLIT_KEYS = 256  # a split reads at least so many keys: its partial result is written and read again
WAVES = 4  # split until so many programs per multiprocessor are there


@triton.jit
def _find(bounds, sources, tile, HEADS_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr):
    """Find the source that owns this tile: source i owns those from bounds[i] * HEADS_PER_KV // BLOCK_M + i on."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + sources
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(bounds + middle) * HEADS_PER_KV // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _merge(largest, total, acc, lse, out):
    """Take one more part into a running softmax over parts; lse in base 2. A part with lse -inf changes nothing."""
    new = tl.maximum(largest, lse)
    safe = tl.where(new == -float("inf"), 0.0, new)
    shrink, weight = tl.exp2(largest - safe), tl.exp2(lse - safe)
    return new, total * shrink + weight, acc * shrink[:, None] + out * weight[:, None]


@triton.jit
def _finish(largest, total, acc):
    """Return the normalised output and the log-sum-exp in base e; 0 and -inf for rows that saw no key."""
    divisor = tl.where(total == 0, 1.0, total)
    return acc / divisor[:, None], tl.where(total == 0, -float("inf"), (largest + tl.log2(divisor)) * LN2)


# what grows and shrinks from call to call is not specialised on: each kind of value would be compiled anew
@triton.jit(do_not_specialize=["sources", "part_rows", "table_width"])
def _attend_kernel(
    query, key_cache, value_cache, tables, lens, bounds, out, lse,
    sources, heads, part_rows, scale, split_keys, table_width,
    query_token, query_head, query_dim, key_block, key_slot, key_head, key_dim,
    value_block, value_slot, value_head, value_dim,
    CAUSAL: tl.constexpr, HEADS_PER_KV: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend queries bounds[i] .. bounds[i + 1] to source i's first lens[i] keys -> out [splits, T, heads, DIM], lse.

    split_keys: fewest keys of a split; the splits share the keys of a source evenly. lse is the natural logarithm.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    source = _find(bounds, sources, tile, HEADS_PER_KV, BLOCK_M)
    first = tl.load(bounds + source)
    queries = tl.load(bounds + source + 1) - first
    keys = tl.load(lens + source)
    first_row = (tile - (first * HEADS_PER_KV // BLOCK_M + source)) * BLOCK_M
    if first_row >= queries * HEADS_PER_KV:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    token, head = row // HEADS_PER_KV, kv_head * HEADS_PER_KV + row % HEADS_PER_KV
    inside = token < queries
    dim = tl.arange(0, BLOCK_D)
    in_dim = dim < DIM
    place = (first + token).to(tl.int64)
    q_at = query + place[:, None] * query_token + head[:, None] * query_head + dim[None, :] * query_dim
    q = tl.load(q_at, mask=inside[:, None] & in_dim[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    span = tl.cdiv(keys, tl.num_programs(2))
    span = tl.maximum(split_keys, tl.cdiv(span, BLOCK_N) * BLOCK_N)
    end = tl.minimum(keys, (split + 1) * span)
    position = keys - queries + token  # the last key that a row sees
    if CAUSAL:
        last_row = tl.minimum(first_row + BLOCK_M, queries * HEADS_PER_KV) - 1
        end = tl.minimum(end, keys - queries + last_row // HEADS_PER_KV + 1)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = tables + source.to(tl.int64) * table_width
    for start in range(split * span, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        valid = n < end
        block = tl.load(table + n // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        slot = (n % BLOCK_SIZE).to(tl.int64)
        k_at = key_cache + block * key_block + slot * key_slot + kv_head * key_head
        v_at = value_cache + block * value_block + slot * value_slot + kv_head * value_head
        k = tl.load(k_at[None, :] + dim[:, None] * key_dim, mask=valid[None, :] & in_dim[:, None], other=0.0)
        v = tl.load(v_at[:, None] + dim[None, :] * value_dim, mask=valid[:, None] & in_dim[None, :], other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        score = tl.dot(q, k, input_precision="ieee") * scale
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= position[:, None])
        score = tl.where(seen, score, -float("inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)
        weight = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(largest - safe)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        largest = new

    to = split.to(tl.int64) * part_rows + place * heads + head
    acc, natural = _finish(largest, total, acc)
    o_at = out + to[:, None] * DIM + dim[None, :]
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=inside[:, None] & in_dim[None, :])
    tl.store(lse + to, natural, mask=inside)


@triton.jit(do_not_specialize=["rows", "rest"])
def _merge_kernel(
    first_out, first_lse, rest_out, rest_lse, out, lse, rows, rest,
    DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge out [rows, DIM] and lse [rows] of one part and ``rest`` others [rest, rows, DIM], [rest, rows]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dim = tl.arange(0, BLOCK_D)
    inside, in_dim = row < rows, dim < DIM
    at = row[:, None] * DIM + dim[None, :]
    part_lse = tl.load(first_lse + row, mask=inside, other=-float("inf"))
    used = (part_lse != -float("inf"))[:, None] & in_dim[None, :]
    acc = tl.load(first_out + at, mask=used, other=0.0).to(tl.float32)
    largest = part_lse / LN2
    total = tl.where(part_lse == -float("inf"), 0.0, 1.0)
    to = tl.full([], 0, tl.int64)
    for _ in range(rest):
        part_lse = tl.load(rest_lse + to + row, mask=inside, other=-float("inf"))
        used = (part_lse != -float("inf"))[:, None] & in_dim[None, :]
        part_out = tl.load(rest_out + to * DIM + at, mask=used, other=0.0).to(tl.float32)
        largest, total, acc = _merge(largest, total, acc, part_lse / LN2, part_out)
        to += rows
    acc, natural = _finish(largest, total, acc)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None] & in_dim[None, :])
    tl.store(lse + row, natural, mask=inside)


@triton.jit
def _write_rows(rows, cache, row, slot, mask, heads, row_token, row_head, row_dim, cache_block, cache_slot, cache_head,
                cache_dim, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    token, head = row // heads, row % heads
    dim = tl.arange(0, BLOCK_D)
    x = tl.load(rows + (token * row_token + head * row_head)[:, None] + dim[None, :] * row_dim, mask=mask)
    to = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_slot + head * cache_head
    tl.store(cache + to[:, None] + dim[None, :] * cache_dim, x.to(cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "total"])
def _write_kernel(
    key, value, key_cache, value_cache, slots, count, heads, total,
    key_token, key_head, key_dim, value_token, value_head, value_dim,
    keys_block, keys_slot, keys_head, keys_dim, values_block, values_slot, values_head, values_dim,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write count = T * heads rows of two [T, heads, DIM] to their slots, except to slots outside the cache."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(slots + row // heads, mask=row < count, other=-1)
    mask = ((slot >= 0) & (slot < total))[:, None] & (tl.arange(0, BLOCK_D) < DIM)[None, :]
    _write_rows(key, key_cache, row, slot, mask, heads, key_token, key_head, key_dim, keys_block, keys_slot, keys_head,
                keys_dim, BLOCK_SIZE, BLOCK_D)  # fmt: skip
    _write_rows(value, value_cache, row, slot, mask, heads, value_token, value_head, value_dim, values_block,
                values_slot, values_head, values_dim, BLOCK_SIZE, BLOCK_D)  # fmt: skip


@functools.cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of the GPU; 1 where the kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _block_d(dim: int) -> int:
    return max(16, next_power_of_2(dim))


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    # Triton's interpreter cuts bfloat16 off instead of rounding it
    return torch.float32 if triton_interpreted() else dtype


class Plan(NamedTuple):
    """How one set of sources (sequences, or groups) is cut into tiles and splits."""

    grid: tuple[int, int, int]
    sources: int
    splits: int
    options: dict[str, Any]


@functools.lru_cache(maxsize=256)
def _plan(tokens: int, heads: int, dim: int, kv_heads: int, block_size: int, sources: int, columns: int, upcast: bool,
          wide: bool, device: torch.device, major: int) -> Plan:  # fmt: skip
    """Plan from shapes alone. ``columns``: of the tables; ``wide``: no tensor cores, so smaller tiles, more threads;
    ``major``: the GPU's generation, by which ptxas keeps the largest tiles in registers."""
    group = heads // kv_heads
    rows = tokens * group
    block_d = _block_d(dim)
    tallest = max(16, min(128, (2048 if wide else 16384) // block_d))
    block_m = min(tallest, max(16, next_power_of_2(-(-rows // sources))))
    block_n = max(16, min(64, (4096 if wide else 8192) // block_d))
    if block_m * block_d > 8192 and major not in (9, 10):  # these multiply by warp, with operands in registers
        block_n = min(32, block_n)
    tiles = rows // block_m + sources
    busy = max(sources, rows // block_m) * kv_heads
    splits_to_fill = -(-WAVES * processors(device) // busy)
    splits = max(1, min(splits_to_fill, columns * block_size // MIN_SPLIT_KEYS))
    options = {
        "HEADS_PER_KV": group, "DIM": dim, "BLOCK_SIZE": block_size, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_D": block_d, "UPCAST": upcast, "num_warps": 8 if wide or block_m * block_d >= 8192 else 4,
        "num_stages": 3 if block_m <= 64 or major == 10 else 2,
    }  # fmt: skip
    return Plan((tiles, kv_heads, splits), sources, splits, options)


def _make_plan(query: torch.Tensor, key_cache: torch.Tensor, tables: torch.Tensor) -> Plan:
    dtype = query.dtype
    # bfloat16 has no arithmetic in the interpreter; differing dtypes meet in float32
    upcast = triton_interpreted() or dtype != key_cache.dtype
    _, block_size, kv_heads, _ = key_cache.shape
    wide = upcast or dtype == torch.float32
    return _plan(*query.shape, kv_heads, block_size, *tables.shape, upcast, wide, query.device,
                 generation(query.device))  # fmt: skip


def _attend(plan: Plan, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables: torch.Tensor,
            lens: torch.Tensor, bounds: torch.Tensor, scale: float, causal: bool, out: torch.Tensor,
            lse: torch.Tensor) -> None:  # fmt: skip
    """Fill the first ``plan.splits`` parts of out [parts, T, Hq, d] and lse [parts, T, Hq]."""
    tokens, heads, _ = query.shape
    _attend_kernel[plan.grid](
        query, key_cache, value_cache, tables, lens, bounds, out, lse,
        plan.sources, heads, tokens * heads, scale / LN2.value, MIN_SPLIT_KEYS, tables.shape[1],
        *query.stride(), *key_cache.stride(), *value_cache.stride(), CAUSAL=causal, **plan.options,
    )  # fmt: skip


def _merge_parts(
    first_out: torch.Tensor, first_lse: torch.Tensor, rest_out: torch.Tensor, rest_lse: torch.Tensor, parts: int,
    out: torch.Tensor, lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Merge the first part with ``parts`` others into out [T, H, d] and lse [T, H], base e."""
    rows, dim = lse.numel(), out.shape[-1]
    if rows:
        block_d = _block_d(dim)
        block_r = max(1, 1024 // block_d)
        _merge_kernel[(-(-rows // block_r),)](
            first_out, first_lse, rest_out, rest_lse, out, lse, rows, parts,
            DIM=dim, BLOCK_R=block_r, BLOCK_D=block_d,
        )  # fmt: skip
    return out, lse


def _empty(query: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make out [T, Hq, d] and lse [T, Hq] of ``query``; float32 with a dimension more for parts that are merged."""
    tokens, heads, dim = query.shape  # one by one: the allocation takes a shape in twice the time
    if parts == 1:
        out = query.new_empty(tokens, heads, dim, dtype=_result_dtype(query.dtype))
        return out, query.new_empty(tokens, heads, dtype=torch.float32)
    out = query.new_empty(parts, tokens, heads, dim, dtype=torch.float32)
    return out, query.new_empty(parts, tokens, heads, dtype=torch.float32)


def _rounded(query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (out if out.dtype == query.dtype else out.to(query.dtype)), lse


@kernel_op("rlkernels::paged_attention_triton", attention)
def paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, query_starts: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute ``reference.paged_attention``; tables, lengths and starts contiguous."""
    if query.numel() == 0:
        return attention(query)
    plan = _make_plan(query, key_cache, block_tables)
    out, lse = _empty(query, plan.splits)
    _attend(plan, query, key_cache, value_cache, block_tables, seq_lens, query_starts, scale, True, out, lse)
    if plan.splits > 1:
        out, lse = _merge_parts(out, lse, out[1:], lse[1:], plan.splits - 1, *_empty(query, 1))
    return _rounded(query, out, lse)


@kernel_op("rlkernels::shared_prefix_attention_triton", attention)
def shared_prefix_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, group_tables: torch.Tensor,
    group_lens: torch.Tensor, group_starts: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    query_starts: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute ``reference.shared_prefix_attention``; tables, lengths and starts contiguous."""
    if query.numel() == 0:
        return attention(query)
    prefixes = _make_plan(query, key_cache, group_tables)
    suffixes = _make_plan(query, key_cache, block_tables)
    cut, parts = prefixes.splits, prefixes.splits + suffixes.splits
    out, lse = _empty(query, parts)
    bounds = query_starts.index_select(0, group_starts)
    rest = out[1:], lse[1:]
    suffix_parts = rest if cut == 1 else (out[cut:], lse[cut:])
    inputs = query, key_cache, value_cache
    _attend(prefixes, *inputs, group_tables, group_lens, bounds, scale, False, out, lse)
    _attend(suffixes, *inputs, block_tables, seq_lens, query_starts, scale, True, *suffix_parts)
    return _rounded(query, *_merge_parts(out, lse, *rest, parts - 1, *_empty(query, 1)))


@kernel_op("rlkernels::merge_attention_triton", FAKES["merge_attention"])
def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``reference.merge_attention``; all contiguous."""
    return _rounded(out_a, *_merge_parts(out_a, lse_a, out_b, lse_b, 1, *_empty(out_a, 1)))


@kernel_op("rlkernels::write_kv_triton", mutates=("key_cache", "value_cache"))
def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Compute ``reference.write_kv``; a slot outside the cache is left out."""
    tokens, heads, dim = key.shape
    if key.numel() == 0:
        return
    key, value = apart(key, value, key_cache, value_cache)
    block_d, block_size = _block_d(dim), key_cache.shape[1]
    block_r = max(1, 2048 // block_d)
    if triton_interpreted():
        key, value = key.to(key_cache.dtype), value.to(value_cache.dtype)
    _write_kernel[(-(-tokens * heads // block_r),)](
        key, value, key_cache, value_cache, slots, tokens * heads, heads, key_cache.shape[0] * block_size,
        *key.stride(), *value.stride(), *key_cache.stride(), *value_cache.stride(),
        DIM=dim, BLOCK_SIZE=block_size, BLOCK_R=block_r, BLOCK_D=block_d,
    )  # fmt: skip
