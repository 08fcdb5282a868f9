"""Attention by the fast paths of torch, FlashInfer and flash-attn, where installed: what ours is timed against.

Torch's work on contiguous keys and values, which costs whoever keeps them in pages a copy that is not timed here.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.gpu.problem import Rival
from rlkernels.prefix_cache import GroupedLayout

Rivals = dict[str, Rival]
Call = Callable[[], Any]
WORKSPACE_BYTES = 2**28  # of FlashInfer


def repeated(heads: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """[..., Hk, d] with every head as often as ``heads`` query heads need it."""
    return [t.repeat_interleave(heads // t.shape[-2], -2) for t in tensors]


def packed(out: torch.Tensor) -> torch.Tensor:
    """[B, H, q, d] -> [B * q, H, d]."""
    return out.transpose(1, 2).flatten(0, 1)


@functools.cache
def compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, compiled: bool = True
              ) -> Rivals:  # fmt: skip
    """query [B, q, Hq, d] over key, value [B, n, Hk, d]; the last query sits on the last key -> [B * q, Hq, d]."""
    queries, keys = query.shape[1], key.shape[1]

    def sdpa() -> Call:
        if queries == 1:
            q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
            return lambda: packed(functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True))
        # with a causal bias torch wants as many key heads as query heads
        q, k, v = (t.transpose(1, 2).contiguous() for t in (query, *repeated(query.shape[2], key, value)))
        bias = causal_lower_right(queries, keys)
        return lambda: packed(functional.scaled_dot_product_attention(q, k, v, bias, scale=scale))

    def flex() -> Call:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
        mask = None
        if queries > 1:

            def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
                return j <= i + (keys - queries)

            mask = create_block_mask(causal, None, None, queries, keys, device=q.device)
        run = compiled_flex() if compiled else flex_attention
        return lambda: packed(run(q, k, v, block_mask=mask, scale=scale, enable_gqa=True))

    makers: dict[str, Callable[[], Call]] = {
        "torch SDPA": sdpa,
        "torch varlen": functools.partial(varlen, query, key, value, scale),
        "torch FlexAttention": flex,
    }
    return {name: Rival(make) for name, make in makers.items()}


def varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Call:
    """FlashAttention of torch on packed rows; torch 2.11 wants a key head for every query head."""
    from torch.nn.attention.varlen import varlen_attn

    attend: Any = varlen_attn
    batch, queries = query.shape[:2]
    keys = key.shape[1]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0) if queries > 1 else (-1, -1)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    else:
        key, value = repeated(query.shape[2], key, value)
    q, k, v = (t.flatten(0, 1).contiguous() for t in (query, key, value))
    starts = [torch.arange(batch + 1, dtype=torch.int32, device=q.device) * n for n in (queries, keys)]
    return lambda: attend(q, k, v, *starts, queries, keys, **options)


def pages(query: torch.Tensor, caches: Sequence[torch.Tensor], tables: torch.Tensor, lens: Sequence[int],
          scale: float) -> Rivals:  # fmt: skip
    """query [B, q, Hq, d] over pages of ``caches`` [blocks, size, Hk, d] by tables [B, width] -> [B * q, Hq, d]."""
    batch, queries, heads, dim = query.shape
    size, kv_heads = caches[0].shape[1:3]

    def flashinfer() -> Call:
        import flashinfer

        counts = [-(-n // size) for n in lens]
        ints = functools.partial(torch.tensor, dtype=torch.int32, device=query.device)
        indptr = ints([0, *counts]).cumsum(0, dtype=torch.int32)
        indices = torch.cat([table[:count] for table, count in zip(tables, counts)]).contiguous()
        last = ints([n - (count - 1) * size for n, count in zip(lens, counts)])
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
        sizes = {"sm_scale": scale, "q_data_type": query.dtype, "kv_data_type": caches[0].dtype}
        if queries == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(indptr, indices, last, heads, kv_heads, dim, size, **sizes)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * queries
            wrapper.plan(starts, indptr, indices, last, heads, kv_heads, dim, size, causal=True, **sizes)
        q = query.flatten(0, 1).contiguous()
        return lambda: wrapper.run(q, (caches[0], caches[1]))

    def flash_attn() -> Call:
        from flash_attn import flash_attn_with_kvcache

        found = torch.tensor(list(lens), dtype=torch.int32, device=query.device)
        key, value = (torch.stack([dense(cache, table, max(lens)) for table in tables]) for cache in caches)
        return lambda: flash_attn_with_kvcache(
            query, key, value, cache_seqlens=found, softmax_scale=scale, causal=True
        ).flatten(0, 1)

    return {"FlashInfer": Rival(flashinfer), "flash-attn": Rival(flash_attn)}


def dense(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[length, Hk, d], the pages of a sequence side by side."""
    blocks = -(-length // cache.shape[1])
    return cache[table[:blocks].long()].flatten(0, 1)[:length]


def sees(layout: GroupedLayout, device: torch.device) -> Callable[..., torch.Tensor]:
    """FlexAttention's mask function: a token sees its group's prefix and its own suffix, up to itself."""
    segment, group = torch.zeros(2, layout.num_tokens, dtype=torch.int64)
    for g, (prefix, suffixes) in enumerate(layout.spans()):
        for i, part in enumerate([prefix, *suffixes]):
            segment[part], group[part] = i, g
    segment, group = segment.to(device), group.to(device)

    def mask(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return (j <= i) & (group[i] == group[j]) & ((segment[j] == 0) | (segment[i] == segment[j]))

    return mask


class Repeated:
    """Every suffix with a copy of its prefix, as trainers do that know no groups. Equal lengths."""

    def __init__(self, layout: GroupedLayout, device: torch.device):
        rows, first = [], []
        for prefix, suffixes in layout.spans():
            for i, s in enumerate(suffixes):
                rows.append(torch.cat([torch.arange(prefix.start, prefix.stop), torch.arange(s.start, s.stop)]))
                first.append(torch.arange(len(rows[-1])) >= (0 if i == 0 else prefix.stop - prefix.start))
        self.at = torch.stack(rows).to(device)  # [S, prefix + suffix]: which token
        self.counts = torch.stack(first).to(device)  # False for a prefix that an earlier row has
        self.tokens = layout.num_tokens

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[T, H, d] -> [S, L, H, d]."""
        return tensor[self.at]

    def outputs(self, found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Output and gradients as rows [S, L, H, d] -> as packed tokens [T, H, d], the gradients of copies added up."""
        out, *grads = found
        whole = out.new_empty(self.tokens, *out.shape[2:])
        whole[self.at[self.counts]] = out[self.counts]
        sums = [g.new_zeros(self.tokens, *g.shape[2:], dtype=torch.float32) for g in grads]
        return [whole, *(s.index_add_(0, self.at.flatten(), g.flatten(0, 1).float()) for s, g in zip(sums, grads))]


def grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor, layout: GroupedLayout,
            scale: float) -> Rivals:  # fmt: skip
    """Forward and gradients: every sequence with its own copy of the prefix, and one masked row of packed tokens."""

    def rows() -> tuple[Repeated, list[torch.Tensor], torch.Tensor]:
        copies = Repeated(layout, query.device)
        outer = copies.rows(grad) * copies.counts[..., None, None]  # a prefix counts once
        return copies, [copies.rows(t) for t in (query, *repeated(query.shape[1], key, value))], outer

    def sdpa() -> Call:
        _, tensors, outer = rows()
        q, k, v = leaves = [t.transpose(1, 2).contiguous().requires_grad_() for t in tensors]

        def run() -> list[torch.Tensor]:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            found = [out, *torch.autograd.grad(out, leaves, outer.transpose(1, 2))]
            return [t.detach().transpose(1, 2) for t in found]

        return run

    def flash() -> Call:
        from torch.nn.attention.varlen import varlen_attn

        attend: Any = varlen_attn
        _, tensors, outer = rows()
        q, k, v = leaves = [t.flatten(0, 1).contiguous().requires_grad_() for t in tensors]
        batch, length = outer.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length

        def run() -> list[torch.Tensor]:
            out = attend(q, k, v, starts, starts, length, length, scale=scale, window_size=(-1, 0))
            found = [out, *torch.autograd.grad(out, leaves, outer.flatten(0, 1))]
            return [t.detach().unflatten(0, (batch, length)) for t in found]

        return run

    def flex() -> Call:
        leaves = [t.detach().clone().requires_grad_() for t in (query, key, value)]
        tokens = layout.num_tokens
        mask = create_block_mask(sees(layout, query.device), None, None, tokens, tokens, device=query.device)
        attend = compiled_flex()

        def run() -> list[torch.Tensor]:
            q, k, v = (t.transpose(0, 1)[None] for t in leaves)
            out = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
            return [out, *torch.autograd.grad(out, leaves, grad)]

        return run

    def gathered(found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The key heads were repeated: their gradients belong to one head."""
        out, q, k, v = Repeated(layout, query.device).outputs(found)
        return [out, q, *(t.unflatten(1, (key.shape[1], -1)).sum(2) for t in (k, v))]

    return {"torch SDPA, every prefix repeated": Rival(sdpa, gathered),
            "torch varlen, every prefix repeated": Rival(flash, gathered),
            "torch FlexAttention": Rival(flex)}  # fmt: skip
