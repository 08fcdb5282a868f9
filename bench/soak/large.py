"""Ops on tensors of more than 2^31 elements: what lies at the end is as on a small tensor of its own.

Rows repeat with a period that does not divide 2^31, so that an index that has run over finds other numbers. Every part
needs 5 to 13 GB.
"""

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch

import rlkernels

ELEMENTS = 1 << 31  # of a tensor, at least; a test takes fewer
PERIOD = 61
LAST = 5  # rows that are looked at
Check = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def run(args: argparse.Namespace) -> dict[str, Any]:
    problems, done = [], []
    for name, check in CHECKS.items():
        problem = judge(name, check, ELEMENTS)
        done.append(name)
        problems += [problem] if problem else []
        gc.collect()
    return {"what": "tensors of more than 2^31 elements", "found": ", ".join(done), "problems": problems}


def judge(name: str, check: Check, elements: int) -> str:
    """What is wrong with an op, or nothing."""
    got, expected = check(elements)
    worst = float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
    return "" if worst <= 1e-5 else f"{name}: off by {worst:.1e}"


def periodic(rows: int, width: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[rows, width]: PERIOD random rows again and again."""
    some = torch.randn(PERIOD, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out = torch.empty(rows, width, dtype=dtype)
    for start in range(0, rows, PERIOD):
        out[start : start + PERIOD] = some[: rows - start]
    return out


def rows_of(width: int, elements: int) -> int:
    return elements // width + PERIOD


def log_probabilities(elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = 1 << 18
    logits = periodic(rows_of(width, elements), width, 0)
    ids = torch.randint(0, width, (len(logits),), generator=torch.Generator().manual_seed(1))
    last = logits[-LAST:].clone()
    got = rlkernels.token_logprobs(logits, ids)
    assert isinstance(got, torch.Tensor)
    return got[-LAST:], torch.log_softmax(last.float(), -1).gather(1, ids[-LAST:, None])[:, 0]


def sampling(elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = 1 << 18
    logits = periodic(rows_of(width, elements), width, 2)
    uniforms = rlkernels.keyed_uniform(0, torch.arange(len(logits)), torch.zeros(len(logits), dtype=torch.int64))
    got, expected = (
        torch.stack([part[-LAST:].double() for part in rlkernels.sample_tokens(x, u, top_k=50, top_p=0.9)])
        for x, u in ((logits, uniforms), (logits[-LAST:].clone(), uniforms[-LAST:]))
    )
    return got, expected


def products(elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``delta_matvec`` of two matrices."""
    width = int(elements**0.5) + 1
    weight, base = (periodic(rows_of(width, elements), width, seed) for seed in (3, 4))
    v = torch.randn(width, generator=torch.Generator().manual_seed(5))
    last = weight[-LAST:].double() - base[-LAST:].double()
    return rlkernels.delta_matvec(weight, base, v)[-LAST:], last @ v.double()


def added(elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_rank1_``, and ``top1_delta`` that finds what was added."""
    width = int(elements**0.5) + 1
    base = periodic(rows_of(width, elements), width, 6)
    random = torch.Generator().manual_seed(7)
    u, v = (x / x.norm() for x in (torch.randn(n, generator=random) for n in base.shape))
    weight = base.clone()
    rlkernels.add_rank1_(weight, u, v, float(width))  # as large as the base
    expected = base[-LAST:].float() + width * u[-LAST:, None] * v
    rounded = bool(((weight[-LAST:].float() - expected).abs() <= expected.abs() / 256).all())
    found = rlkernels.top1_delta(weight, base)
    near = (found.u[-LAST:] * torch.dot(found.u, u).sign() - u[-LAST:]).abs().max() < 0.01 * u.abs().max()
    return torch.tensor([rounded, near, found.status == "ok"]), torch.ones(3)


def pages(elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``write_kv`` into the last blocks of a cache, and ``paged_attention`` over them."""
    size, heads, dim = 16, 8, 128
    blocks = elements // (size * heads * dim) + 4
    large = [torch.zeros(blocks, size, heads, dim, dtype=torch.bfloat16) for _ in range(2)]
    small = [torch.zeros(2, size, heads, dim, dtype=torch.bfloat16) for _ in range(2)]
    random = torch.Generator().manual_seed(8)
    key, value = (torch.randn(2 * size, heads, dim, generator=random) for _ in range(2))
    query = torch.randn(1, heads, dim, generator=random)
    lengths, starts = torch.tensor([2 * size], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    found = []
    for cache, first in ((large, blocks - 2), (small, 0)):
        rlkernels.write_kv(key, value, cache[0], cache[1], torch.arange(2 * size) + first * size)
        table = torch.tensor([[first, first + 1]], dtype=torch.int32)
        found.append(rlkernels.paged_attention(query, cache[0], cache[1], table, lengths, starts, scale=dim**-0.5))
    got, expected = found
    assert isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)
    return got, expected


def distances(elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``dtw`` of more than 2^31 pairs, of curves of one point."""
    count = int(elements**0.5) + PERIOD
    x = periodic(count, 1, 9, torch.float32)
    got = rlkernels.dtw(x, x)
    assert isinstance(got, torch.Tensor)
    expected = rlkernels.dtw(x[-LAST:].clone(), x)
    assert isinstance(expected, torch.Tensor)
    return got[-LAST:], expected


CHECKS: dict[str, Check] = {
    "token_logprobs": log_probabilities,
    "sample_tokens": sampling,
    "delta_matvec": products,
    "add_rank1_ and top1_delta": added,
    "write_kv and paged_attention": pages,
    "dtw": distances,
}
