"""What ops return, as shapes and dtypes only: for torch.compile and torch.export.

Ops of csrc/ops have no meta kernels in C++. Launchers of Triton's kernels take the fakes of the ops that return the
same. Arguments are those of the op; ``*_`` collects those that do not matter.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import empty_like as like

F32, F64, I64 = torch.float32, torch.float64, torch.int64


def attention(query, *_):
    """Return out and log-sum-exp of attention."""
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=F32)


def _add_rms_norm(residual, x, *_):
    total = residual.new_empty(0, residual.shape[1]) if x is None else like(residual)
    return total, like(residual), residual.new_empty(residual.shape[0], dtype=F32)


def _token_logprobs(logits, ids, temperature, with_entropy):
    rows = logits.shape[0]
    shapes = (rows,), (rows if with_entropy else 0,), (rows, 2)
    return tuple(logits.new_empty(shape, dtype=F32) for shape in shapes)


def _top1_deltas(weights, bases, starts, tol, max_passes, min_passes, rank, seed):
    us, vs = ([w.new_empty(rank, w.shape[i], dtype=F32) for w in weights] for i in (0, 1))
    sigmas, facts = (torch.empty(len(weights), k, dtype=F64, device="cpu") for k in (rank, 7))
    return us, vs, sigmas, facts


def warps(x, y, x_lengths, y_lengths, band=None, subsequence=True):
    """Return costs, starts and ends of warping paths."""
    place = x.new_empty(x.shape[0] if subsequence else 0, y.shape[0], dtype=I64)
    return x.new_empty(x.shape[0], y.shape[0]), place, like(place)


FAKES: dict[str, Callable[..., Any]] = {
    "paged_attention": attention,
    "shared_prefix_attention": attention,
    "merge_attention": lambda out_a, lse_a, *_: (like(out_a), like(lse_a)),
    "tree_attention": attention,
    "tree_attention_backward": lambda grad, grad_lse, query, key, value, *_: (like(query), like(key), like(value)),
    "add_rms_norm": _add_rms_norm,
    "rms_norm_backward": lambda grad_out, grad_sum, total, factor, weight: (like(total), like(weight)),
    "rope": lambda x, *_: like(x),
    "rope_backward": lambda _, x, positions, cos, *__: (like(x), cos.new_empty(2, cos.shape[1], dtype=F32)),
    "silu_mul": lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
    "silu_mul_backward": lambda grad_out, gate_up: like(gate_up),
    "token_weights": lambda z: like(z, dtype=I64),
    "keyed_uniform": lambda seed, sample_ids, positions: like(sample_ids, dtype=F32),
    "sample_tokens": lambda logits, uniforms, *_: (like(uniforms, dtype=I64), like(uniforms)),
    "verify_drafts": lambda logits, drafts, starts, uniforms, temperature, *_: (
        like(temperature, dtype=I64), like(uniforms, dtype=I64), like(uniforms)
    ),
    "token_logprobs": _token_logprobs,
    "token_logprobs_backward": lambda logits, *_: like(logits),
    "top1_deltas": _top1_deltas,
    "delta_matvec": lambda weight, base, v: weight.new_empty(weight.shape[0], dtype=F32),
    "dtw": lambda x, y, *_: x.new_empty(x.shape[0], y.shape[0]),
    "dtw_subsequence": warps,
    "dtw_warps": warps,
    "dtw_bounds": lambda x, y, *_: x.new_empty(x.shape[0], y.shape[0]),
    "dtw_topk": lambda x, y, k, *_: (x.new_empty(x.shape[0], k), x.new_empty(x.shape[0], k, dtype=I64)),
    **dict.fromkeys(("write_kv", "advise_huge_pages", "add_rank1_", "dtw_warps_"), lambda *_: None),  # write in place
}  # fmt: skip


@functools.cache
def register() -> None:
    """Register the fakes of the extension, which is loaded."""
    for name, fake in FAKES.items():
        torch.library.register_fake(f"rlkernels::{name}", fake)
