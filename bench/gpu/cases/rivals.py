"""The same attention by torch's own fast paths, on contiguous keys and values: what ours is timed against.

Every function gives makers, one per rival: a maker prepares the inputs, untimed, and returns the call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from rlkernels.prefix_cache import GroupedLayout

Makers = dict[str, Callable[[], Callable[[], Any]]]


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, compiled: bool = True
              ) -> Makers:  # fmt: skip
    """query [B, q, Hq, d] over key, value [B, n, Hk, d]; the last query sits on the last key -> [B * q, Hq, d]."""
    queries, keys = query.shape[1], key.shape[1]

    def packed(out: torch.Tensor) -> torch.Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def sdpa() -> Callable[[], Any]:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
        if queries == 1:
            return lambda: packed(functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True))
        # with a causal bias torch wants as many key heads as query heads
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        bias = causal_lower_right(queries, keys)
        return lambda: packed(functional.scaled_dot_product_attention(q, k, v, bias, scale=scale))

    def flex() -> Callable[[], Any]:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (query, key, value))
        mask = None
        if queries > 1:

            def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
                return j <= i + (keys - queries)

            mask = create_block_mask(causal, None, None, queries, keys, device=q.device)
        run: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
        return lambda: packed(run(q, k, v, block_mask=mask, scale=scale, enable_gqa=True))

    return {"torch SDPA": sdpa, "torch FlexAttention": flex}


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


def grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor, layout: GroupedLayout,
            scale: float) -> Makers:  # fmt: skip
    """Forward and gradients: every sequence with its own copy of the prefix, and one masked row of packed tokens."""

    def sdpa() -> Callable[[], None]:
        rows = [
            torch.cat([torch.arange(prefix.start, prefix.stop), torch.arange(s.start, s.stop)])
            for prefix, suffixes in layout.spans()
            for s in suffixes
        ]
        at = torch.stack(rows).to(query.device)  # [S, prefix + suffix]
        q, k, v = (t[at].transpose(1, 2).contiguous().requires_grad_() for t in (query, key, value))
        outer = grad[at].transpose(1, 2).contiguous()

        def run() -> None:  # another amount of work: its output is not compared
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            torch.autograd.grad(out, [q, k, v], outer)

        return run

    def flex() -> Callable[[], list[torch.Tensor]]:
        leaves = [t.detach().clone().requires_grad_() for t in (query, key, value)]
        tokens = layout.num_tokens
        mask = create_block_mask(sees(layout, query.device), None, None, tokens, tokens, device=query.device)
        attend: Any = torch.compile(flex_attention, dynamic=False)

        def run() -> list[torch.Tensor]:
            q, k, v = (t.transpose(0, 1)[None] for t in leaves)
            out = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
            return [out, *torch.autograd.grad(out, leaves, grad)]

        return run

    return {"torch SDPA, every prefix repeated": sdpa, "torch FlexAttention": flex}
