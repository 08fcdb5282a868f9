"""Rivals that compute the same: fast paths of torch, FlashInfer, flash-attn, Liger and TRL, where installed.

DTW has none: no library that a GPU machine has computes it there.

Torch's attention works on contiguous keys and values. A cache in pages has to be copied for it, packed tokens too where
a prefix is repeated; the copies are timed on their own.
"""

import functools
import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pad_sequence

import rlkernels
from bench._copies import Copies
from bench._gradients import run_both_ways
from bench.logprobs import by_liger, score_by_trl
from rlkernels.logprobs import reference
from rlkernels.prefix_cache import GroupedLayout, TreeLayout
from rlkernels.prefix_cache import reference as attention_reference
from rlkernels.proof.problem import ErrorBound, Tolerance, leaves

Call = Callable[[], Any]
WORKSPACE_BYTES = 2**28  # of FlashInfer
LOWEST_LOGIT = -1e4  # whose probability is 0, as that of -inf


@dataclass(frozen=True)
class Rival:
    """Another way to compute the same.

    Attributes:
        make: prepares the inputs, untimed, and returns the call.
        outputs: from what the call returns to what is compared with the op's own outputs: the first of them, or all.
        judge: what the call returned -> verdict, where the op's own rule does not fit.
        copy: makes the contiguous copies that the call reads, which the op does not need.
    """

    make: Callable[[], Call]
    outputs: Callable[[Any], Any] | None = None
    judge: Callable[[Any], ErrorBound] | None = None
    copy: Call | None = None

    def verdict(self, gate: Tolerance, returned: Any) -> ErrorBound:
        """Judge what the call returned, which may be in a wider dtype."""
        if self.judge:
            return self.judge(returned)
        theirs = list(leaves(self.outputs(returned) if self.outputs else returned))
        if not gate.problem.judge and len(theirs) not in (1, len(gate.exact)):
            return math.inf, 0.0
        return gate.judge(theirs, [t.dtype for t in theirs])


Rivals = dict[str, Rival]


def paged(query: torch.Tensor, caches: Sequence[torch.Tensor], tables: torch.Tensor, lens: Sequence[int],
          queries: Sequence[int]) -> Rivals:  # fmt: skip
    """Make rivals of a paged problem with equal lengths: on dense keys, and on the pages."""
    if len(set(zip(lens, queries))) > 1:
        return {}
    rows, scale = query.unflatten(0, (len(tables), -1)), query.shape[-1] ** -0.5
    key, value = (dense(cache, tables, lens[0]) for cache in caches)
    copy = functools.partial(gather, caches, tables, lens[0])
    return {**attention(rows, key, value, scale, copy), **pages(rows, caches, tables, lens, scale)}


def shared(query: torch.Tensor, caches: Sequence[torch.Tensor], tables: torch.Tensor, lens: Sequence[int],
           queries: Sequence[int]) -> Rivals:  # fmt: skip
    """Add our kernel as a rival that reads a shared prefix once for each sequence, on the same pages."""

    def make() -> Call:
        ints = functools.partial(torch.tensor, dtype=torch.int32, device=query.device)
        rows = (tables, ints(lens), ints([0, *itertools.accumulate(queries)]))
        scale = query.shape[-1] ** -0.5
        attend = functools.partial(rlkernels.paged_attention, return_lse=True, backend="triton")
        return functools.partial(attend, query, *caches, *rows, scale=scale)

    return {**paged(query, caches, tables, lens, queries), "triton, not shared": Rival(make)}


def writes(key: torch.Tensor, value: torch.Tensor, caches: torch.Tensor, slots: torch.Tensor) -> Rivals:
    """Make rivals of writing rows [T, H, d] to ``slots`` of caches [2, blocks, size, H, d]: torch's own writes."""
    pairs = list(zip(caches.flatten(1, 2), (key, value)))

    def index_copy() -> torch.Tensor:
        for cache, rows in pairs:
            cache.index_copy_(0, slots, rows)
        return caches

    def index_put() -> torch.Tensor:
        for cache, rows in pairs:
            cache[slots] = rows
        return caches

    return {"torch index_copy_": Rival(lambda: index_copy), "torch index_put_": Rival(lambda: index_put)}


def merges(sides: Sequence[torch.Tensor]) -> Rivals:
    """Return the reference of merge_attention, compiled."""

    def compiled() -> Call:
        return functools.partial(torch.compile(attention_reference.merge_attention, dynamic=False), *sides)

    return {"torch.compile": Rival(compiled)}


def matvecs(tensors: Sequence[torch.Tensor]) -> Rivals:
    """Make one compiled reduction of (weight - base) @ v."""

    def product(weight: torch.Tensor, base: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((weight.float() - base.float()) * v).sum(1)

    return {"torch.compile": Rival(lambda: functools.partial(torch.compile(product, dynamic=False), *tensors))}


def rank1_sums(weight: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scale: float) -> Rivals:
    """Make rivals of weight += scale * outer(u, v): in float32, and in the dtype of the weight."""

    def addcmul() -> Call:
        return lambda: weight.addcmul_(u[:, None], v, value=scale)

    def addr() -> Call:
        left, right = u.to(weight.dtype), v.to(weight.dtype)
        return lambda: weight.addr_(left, right, alpha=scale)

    return {"torch addcmul_": Rival(addcmul), "torch addr_": Rival(addr)}


def triplets(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], many: bool) -> Rivals:
    """Make torch's randomized SVD of weight - base a rival, for each (weight, base).

    ``many``: return the vectors of all pairs in one tensor, then all singular values.
    """

    def triplet(weight: torch.Tensor, base: torch.Tensor) -> list[torch.Tensor]:
        u, sigma, v = torch.svd_lowrank(weight.float() - base.float())
        return [u[:, 0], sigma[0], v[:, 0]]

    def signed(u: torch.Tensor, sigma: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Make the entry of v largest in magnitude positive, as the op does."""
        sign = v[v.abs().argmax()].sign()
        return [u * sign, sigma, v * sign]

    def outputs(returned: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        found = [signed(*three) for three in returned]
        if not many:
            return found[0]
        return [torch.cat([vector for u, _, v in found for vector in (u, v)]), torch.stack([s for _, s, _ in found])]

    return {"torch svd_lowrank": Rival(lambda: lambda: [triplet(*pair) for pair in pairs], outputs)}


def gather(caches: Sequence[torch.Tensor], tables: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Copy the pages of each cache to [B, Hk, length, d], for attention that reads contiguous keys."""
    return [dense(cache, tables, length).transpose(1, 2).contiguous() for cache in caches]


def logprobs(logits: torch.Tensor, ids: torch.Tensor, run: Callable[..., Any]) -> Rivals:
    """Return the reference, compiled, and TRL's, whose kernel makes NaN of logits of -inf."""

    def compiled() -> Call:
        plain = torch.compile(reference.token_logprobs, dynamic=False)
        return lambda: run(lambda leaf: plain(leaf, ids, 0.7), logits)

    def trl() -> Call:
        from trl.trainer.utils import selective_log_softmax_and_entropy as score

        finite = logits.clamp(min=LOWEST_LOGIT)
        return functools.partial(run, lambda leaf: score(leaf, ids, temperature=0.7), finite)

    return {"torch.compile": Rival(compiled), "TRL": Rival(trl)}


def linear_logprobs(states: Sequence[torch.Tensor], run: Callable[..., Any]) -> Rivals:
    """Return the reference, compiled, and TRL's head, which holds no logits; Liger has no entropy with a gradient."""

    def compiled() -> Call:
        return functools.partial(run, torch.compile(reference.linear_token_logprobs, dynamic=False), states)

    def trl() -> Call:
        importlib.import_module("trl.kernels.chunked_logprob")  # absent here, not when the call is timed
        return functools.partial(run, functools.partial(score_by_trl, return_entropy=True), states)

    return {"torch.compile": Rival(compiled), "TRL": Rival(trl)}


def cross_entropy(states: Sequence[torch.Tensor], ids: torch.Tensor) -> Rivals:
    """Return torch's cross entropy, compiled, and those of Liger and TRL, which hold no logits."""

    def plain(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy((h @ w.T).float(), ids, reduction="sum")

    def compiled() -> Call:
        return functools.partial(run_both_ways, torch.compile(plain, dynamic=False), *states)

    def liger() -> Call:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return functools.partial(run_both_ways, lambda h, w: fused(w, h, ids), *states)

    def liger_logprobs() -> Call:
        score = by_liger(importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo"))
        return functools.partial(run_both_ways, lambda h, w: -score(h, w, ids).sum(), *states)

    def trl() -> Call:
        importlib.import_module("trl.kernels.chunked_logprob")
        return functools.partial(run_both_ways, lambda h, w: -score_by_trl(h, w, ids).sum(), *states)

    makers = {"torch.compile": compiled, "Liger": liger, "Liger, log-probabilities": liger_logprobs, "TRL": trl}
    return {name: Rival(make) for name, make in makers.items()}


def repeated(heads: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Repeat each head of tensors [..., Hk, d], so that there are ``heads``."""
    return [t.repeat_interleave(heads // t.shape[-2], -2) for t in tensors]


def packed(out: torch.Tensor) -> torch.Tensor:
    """Reshape [B, H, q, d] to [B * q, H, d]."""
    return out.transpose(1, 2).flatten(0, 1)


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any = None, **options: Any
           ) -> torch.Tensor:  # fmt: skip
    mask = None
    if block_mask is not None:
        rows, columns = (torch.arange(t.shape[-2], device=t.device) for t in (query, key))
        mask = block_mask.mask_mod(None, None, rows[:, None], columns)
    return functional.scaled_dot_product_attention(query, key, value, mask, **options)


@functools.cache
def flex_on(device: torch.device) -> Any:
    """Return FlexAttention, compiled; on a CPU, where it has no backward pass, one that holds the mask."""
    if device.type != "cuda":
        return masked
    torch._dynamo.config.recompile_limit = 64  # beyond it, all scores would be held
    return torch.compile(flex_attention, dynamic=True)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, copy: Call | None = None
              ) -> Rivals:  # fmt: skip
    """Return torch's attention with output [B * q, Hq, d]; the last query sits on the last key.

    Args:
        query: [B, q, Hq, d].
        key, value: [B, n, Hk, d].
        copy: makes key and value where a cache in pages holds them.
    """
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
        run = flex_on(q.device)
        return lambda: packed(run(q, k, v, block_mask=mask, scale=scale, enable_gqa=True))

    makers: dict[str, Callable[[], Call]] = {
        "torch SDPA": sdpa,
        "torch varlen": functools.partial(varlen, query, key, value, scale),
        "torch FlexAttention": flex,
    }
    return {name: Rival(make, copy=copy) for name, make in makers.items()}


def varlen_attention(heads: int, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return torch's FlashAttention on packed rows, and its keys; torch 2.11 wants one for each of the query heads."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return functools.partial(varlen_attn, enable_gqa=True), key, value
    key, value = repeated(heads, key, value)
    return varlen_attn, key, value


def varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Call:
    """Attend to packed rows of equal lengths."""
    attend, key, value = varlen_attention(query.shape[2], key, value)
    (batch, queries), keys = query.shape[:2], key.shape[1]
    q, k, v = (t.flatten(0, 1).contiguous() for t in (query, key, value))
    starts = [torch.arange(batch + 1, dtype=torch.int32, device=q.device) * n for n in (queries, keys)]
    window = (-1, 0) if queries > 1 else (-1, -1)
    return lambda: attend(q, k, v, *starts, queries, keys, scale=scale, window_size=window)


def pages(query: torch.Tensor, caches: Sequence[torch.Tensor], tables: torch.Tensor, lens: Sequence[int],
          scale: float) -> Rivals:  # fmt: skip
    """Return attention to pages, by libraries that know them, with output [B * q, Hq, d].

    Args:
        query: [B, q, Hq, d].
        caches: of keys and of values, [blocks, size, Hk, d].
        tables: [B, width].
    """
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

    def copies() -> list[torch.Tensor]:
        return [dense(cache, tables, max(lens)) for cache in caches]

    def flash_attn() -> Call:
        from flash_attn import flash_attn_with_kvcache

        cache_lens = torch.tensor(list(lens), dtype=torch.int32, device=query.device)
        key, value = copies()
        return lambda: flash_attn_with_kvcache(
            query, key, value, cache_seqlens=cache_lens, softmax_scale=scale, causal=True
        ).flatten(0, 1)

    return {"FlashInfer": Rival(flashinfer), "flash-attn": Rival(flash_attn, copy=copies)}


def dense(cache: torch.Tensor, tables: torch.Tensor, length: int) -> torch.Tensor:
    """Return the pages of each sequence side by side, [B, length, Hk, d]."""
    blocks = tables[:, : -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(1, 2)[:, :length]


def sees(layout: TreeLayout, device: torch.device) -> Callable[..., torch.Tensor]:
    """Make FlexAttention's mask function: a token sees its ancestors and itself."""
    end = layout.end.to(device)
    return lambda b, h, i, j: (j <= i) & (i < end[j])


def tree_mask(layout: TreeLayout, device: torch.device) -> Any:
    tokens = layout.num_tokens
    return create_block_mask(sees(layout, device), None, None, tokens, tokens, device=device)


def repeat_prefixes(layout: GroupedLayout) -> list[torch.Tensor]:
    """Return the tokens of each suffix after its prefix: the rows of trainers that know no groups."""
    tokens = torch.arange(layout.num_tokens)
    return [torch.cat([tokens[prefix], tokens[s]]) for prefix, suffixes in layout.spans() for s in suffixes]


def tree(qkv: Sequence[torch.Tensor], grad: torch.Tensor, layout: TreeLayout) -> Rivals:
    """Compute output and gradients by one masked row of packed tokens."""

    def flex() -> Call:
        leaves = [t.detach().clone().requires_grad_() for t in qkv]
        mask = tree_mask(layout, grad.device)
        attend = flex_on(grad.device)

        def run() -> list[torch.Tensor]:
            q, k, v = (t.transpose(0, 1)[None] for t in leaves)
            out = attend(q, k, v, block_mask=mask, scale=grad.shape[-1] ** -0.5, enable_gqa=True)[0].transpose(0, 1)
            return [out, *torch.autograd.grad(out, leaves, grad)]

        return run

    return {"torch FlexAttention": Rival(flex)}


def grouped(qkv: Sequence[torch.Tensor], grad: torch.Tensor, layout: GroupedLayout) -> Rivals:
    """Compute output and gradients with a copy of the prefix in each sequence, and by one masked row of tokens."""
    query, key, value = qkv
    scale = query.shape[-1] ** -0.5
    rows = repeat_prefixes(layout)
    in_rows = Copies(pad_sequence(rows, batch_first=True, padding_value=-1), layout.num_tokens, query.device)
    packed_rows = Copies(torch.cat(rows), layout.num_tokens, query.device)

    def padded() -> list[torch.Tensor]:
        return [t[in_rows.at].transpose(1, 2).contiguous() for t in qkv]

    def flat() -> list[torch.Tensor]:
        _, *keys = varlen_attention(query.shape[1], key, value)
        return [t[packed_rows.at] for t in (query, *keys)]

    def outer(copies: Copies) -> torch.Tensor:
        return grad[copies.at] * copies.counts[..., None, None]  # a prefix counts once

    def sdpa() -> Call:
        q, k, v = leaves = [t.requires_grad_() for t in padded()]
        weight = outer(in_rows).transpose(1, 2)

        def run() -> list[torch.Tensor]:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            return [t.detach().transpose(1, 2) for t in (out, *torch.autograd.grad(out, leaves, weight))]

        return run

    def flash() -> Call:
        attend, *_ = varlen_attention(query.shape[1], key, value)
        q, k, v = leaves = [t.requires_grad_() for t in flat()]
        weight = outer(packed_rows)
        lens = [len(row) for row in rows]
        starts = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=query.device)

        def run() -> list[torch.Tensor]:
            out = attend(q, k, v, starts, starts, max(lens), max(lens), scale=scale, window_size=(-1, 0))
            return [t.detach() for t in (out, *torch.autograd.grad(out, leaves, weight))]

        return run

    def outputs(copies: Copies, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results by token; gradients of a repeated key head belong to one head."""
        out, q, *grads = copies.outputs(results)
        return [out, q, *(t.unflatten(1, (key.shape[1], -1)).sum(2) for t in grads)]

    by_sdpa = Rival(sdpa, functools.partial(outputs, in_rows), copy=padded)
    by_varlen = Rival(flash, functools.partial(outputs, packed_rows), copy=flat)
    return {"torch SDPA, every prefix repeated": by_sdpa, "torch varlen, every prefix repeated": by_varlen,
            **tree(qkv, grad, layout)}  # fmt: skip
