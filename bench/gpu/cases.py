"""Large cases with the rivals of each: what ``rlkernels.prove`` checks on small inputs is timed on these."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import rlkernels
from bench.gpu import rivals, samplers
from rlkernels.logprobs import reference
from rlkernels.proof.cases import SMALL as CHECKED
from rlkernels.proof.cases import attention, logits, rank1, similarity
from rlkernels.proof.problem import Case, Problem

BF16, QWEN = torch.bfloat16, 151_936
LLAMA = (32, 8, 128)  # heads of Llama-3-8B: query, key, dimension
SMALL = (14, 2, 64)  # of Qwen2.5-0.5B
LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
MODEL = [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (18944, 3584), (18944, 3584), (3584, 18944)] * 28

# the ops that compute-sanitizer looks at in one process
SANITIZED = {
    "attention": ("write_kv", "paged_attention", "shared_prefix_attention", "grouped_attention", "merge_attention"),
    "sampling": ("sample_tokens", "verify_drafts", "token_logprobs", "linear_token_logprobs"),
    "dtw": ("dtw", "dtw_topk"),
    "rank1": ("top1_delta", "top1_deltas", "delta_matvec", "add_rank1_"),
}


def cross_entropy(rows: int, vocab: int, width: int, dtype: torch.dtype, on: torch.device) -> Problem:
    """Minus the sum of all log-probabilities from hidden states, and its gradients: what others have kernels for."""
    hidden, weight = torch.randn(rows, width, device=on), torch.randn(vocab, width, device=on) * 3 / width**0.5
    inputs, ids = (hidden.to(dtype), weight.to(dtype)), torch.randint(0, vocab, (rows,), device=on)

    def run(loss: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = loss(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves)]

    def ours(backend: str, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return -rlkernels.linear_token_logprobs(h, w, ids, backend=backend).sum()

    def exact(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return -reference.linear_token_logprobs(h, w, ids)[0].sum()

    return Problem(
        lambda backend: run(partial(ours, backend), inputs),
        lambda: run(exact, [x.double() for x in inputs]),
        nbytes=sum(x.nbytes for x in inputs) * 2,
        flops=8 * rows * vocab * width,
        dtype=dtype,
        # others round the logits and their gradients to 16 bits
        floor=2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps,
        inputs={"states": inputs, "ids": ids, "run": run},
    )


def _case(op: str, label: str, make: Callable[..., Problem], *args: Any) -> Case:
    return Case(op, label, partial(make, *args), timed=True)


LARGE = [
    _case("paged_attention", "decode: 256 sequences of 1024, Qwen2.5-0.5B heads", attention.paged, [1024] * 256,
          [1] * 256, SMALL, 16, BF16),
    _case("paged_attention", "decode: 64 sequences of 4096, Llama-3-8B heads", attention.paged, [4096] * 64, [1] * 64,
          LLAMA, 16, BF16),
    _case("paged_attention", "suffix prefill: 8 x 512 queries on 2048 keys", attention.paged, [2048] * 8, [512] * 8,
          LLAMA, 16, BF16),
    _case("shared_prefix_attention", "decode: 16 prefixes of 2048 x 8 suffixes of 256", attention.shared, [2048] * 16,
          8, [256], 1, LLAMA, 16, BF16),
    _case("shared_prefix_attention", "decode: 32 prefixes of 512 x 8 suffixes of 512, Qwen2.5-0.5B heads",
          attention.shared, [512] * 32, 8, [512], 1, SMALL, 16, BF16),
    _case("grouped_attention", "8 prefixes of 512, 8 suffixes of 512 each, forward and backward", attention.grouped,
          attention.groups(8, 8, 512, 512), LLAMA, BF16),
    _case("grouped_attention", "8 prefixes of 256, 8 suffixes of 256 each, Qwen2.5-0.5B heads, forward and backward",
          attention.grouped, attention.groups(8, 8, 256, 256), SMALL, BF16),
    _case("sample_tokens", "256 x 151936, temperature 1", logits.sample, 256, QWEN, BF16, [(1.0, 1.0, 0)]),
    _case("sample_tokens", "256 x 151936, top-p 0.95, top-k 50", logits.sample, 256, QWEN, BF16, [(1.0, 0.95, 50)]),
    _case("sample_tokens", "256 x 151936, five kinds of rows", logits.sample, 256, QWEN, BF16, logits.MIXED),
    _case("token_logprobs", "8192 x 151936, forward", logits.logprobs, 8192, QWEN, BF16, False),
    _case("token_logprobs", "4096 x 151936, both ways", logits.logprobs, 4096, QWEN, BF16, True),
    _case("linear_token_logprobs", "4096 x 896 x 151936", logits.linear_logprobs, 4096, QWEN, 896, BF16),
    _case("linear_token_logprobs", "cross entropy, 4096 x 896 x 151936", cross_entropy, 4096, QWEN, 896, BF16),
    _case("verify_drafts", "64 drafts of 7, 151936", logits.verify, [7] * 64, QWEN, BF16, logits.MIXED),
    _case("write_kv", "65536 tokens, 8 x 128", attention.write, 65536, (8, 128), 16, BF16),
    _case("merge_attention", "16384 x 32 x 128", attention.merge, 16384, 32, 128, BF16),
    _case("dtw", "512 x 512, length 512", similarity.warp, 512, 512, 512, 1, "full", None, False),
    _case("dtw", "64 x 64, length 512 x 16 dimensions", similarity.warp, 64, 64, 512, 16, "full", None, False),
    _case("dtw_topk", "64 x 4096, length 256, k 16", similarity.topk, 64, 4096, 256, 16),
    _case("top1_delta", "14336 x 4096", rank1.top1, 14336, 4096, BF16),
    _case("top1_delta", "4096 x 14336", rank1.top1, 4096, 14336, BF16),
    _case("top1_deltas", "the 7 modules of a Llama-3-8B layer", rank1.top1_many, LAYER, BF16),
    _case("top1_deltas", "the 196 modules of Qwen2.5-7B", rank1.top1_many, MODEL, BF16),
    _case("delta_matvec", "14336 x 4096", rank1.matvec, 14336, 4096, BF16),
    _case("add_rank1_", "14336 x 4096", rank1.add, 14336, 4096, BF16, False),
]  # fmt: skip
CASES = [*LARGE, *CHECKED]


def rivals_of(case: Case, problem: Problem) -> rivals.Rivals:
    """Others that compute the same on the same inputs."""
    given = problem.inputs
    if case.op in ("paged_attention", "shared_prefix_attention"):
        return rivals.paged(given) if given else {}
    if case.op == "grouped_attention":
        query, key, value = given["qkv"]
        return rivals.grouped(query, key, value, given["grad"], given["layout"])
    if case.op == "sample_tokens":
        return samplers.rivals(given["logits"], *given["settings"][0]) if len(given["settings"]) == 1 else {}
    if case.op == "token_logprobs":
        return rivals.logprobs(given["logits"], given["ids"], given["run"])
    if "states" in given:
        return rivals.cross_entropy(given["states"], given["ids"], given["run"])
    return {}
