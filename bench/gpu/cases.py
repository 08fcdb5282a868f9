"""Large cases with the rivals of each: what ``rlkernels.prove`` checks on small inputs is timed on these."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import rlkernels
from bench._gradients import run_both_ways
from bench.gpu import rivals, samplers
from rlkernels import registry
from rlkernels.logprobs import reference
from rlkernels.proof.cases import SMALL as CHECKED
from rlkernels.proof.cases import attention, logits, rank1, similarity
from rlkernels.proof.problem import Case, Problem

BF16, QWEN = torch.bfloat16, 151_936
LLAMA = (32, 8, 128)  # heads of Llama-3-8B: query, key, dimension
SMALL = (14, 2, 64)  # of Qwen2.5-0.5B
LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
SMALL_LAYER = [(896, 896), (128, 896), (128, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864)]
MODEL = [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (18944, 3584), (18944, 3584), (3584, 18944)] * 28

# folder -> its ops, which compute-sanitizer looks at in one process
SANITIZED = {
    folder: [op.name for op in registry.ALL if op.folder == folder and op.on_gpu]
    for folder in dict.fromkeys(op.folder for op in registry.ALL if op.on_gpu)
}


def cross_entropy(rows: int, vocab: int, width: int, dtype: torch.dtype, on: torch.device) -> Problem:
    """Compute minus the sum of all log-probabilities from hidden states, and its gradients, as rivals do."""
    hidden, weight = torch.randn(rows, width, device=on), torch.randn(vocab, width, device=on) * 3 / width**0.5
    inputs, ids = (hidden.to(dtype), weight.to(dtype)), torch.randint(0, vocab, (rows,), device=on)

    def ours(backend: str, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return -rlkernels.linear_token_logprobs(h, w, ids, backend=backend).sum()

    def exact(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return -reference.linear_token_logprobs(h, w, ids)[0].sum()

    return Problem(
        lambda backend: run_both_ways(partial(ours, backend), *inputs),
        lambda: run_both_ways(exact, *(x.double() for x in inputs)),
        nbytes=sum(x.nbytes for x in inputs) * 2,
        flops=8 * rows * vocab * width,
        dtype=dtype,
        # others round the logits and their gradients to 16 bits
        floor=2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps,
        inputs={"states": inputs, "ids": ids},
    )


def _case(op: str, label: str, make: Callable[..., Problem], *args: Any) -> Case:
    return Case(op, label, partial(make, *args), timed=True)


def ragged(prompts: int, samples: int, prefix: int, suffix: int) -> attention.Layout:
    """Make groups with prefixes of 1/2 to 3/2 of a length, and suffixes of 1/4 to 7/4."""
    prefixes = torch.linspace(prefix / 2, prefix * 3 / 2, prompts).long().tolist()
    suffixes = torch.linspace(suffix / 4, suffix * 7 / 4, prompts * samples).long()
    shuffled = suffixes[torch.randperm(len(suffixes), generator=torch.Generator().manual_seed(0))].tolist()
    return prefixes, shuffled, list(range(0, prompts * samples + 1, samples))


BOTH = "forward and backward"
LARGE = [
    _case("grouped_attention", f"8 prefixes of 512, 8 suffixes of 512 each, {BOTH}", attention.grouped,
          attention.groups(8, 8, 512, 512), LLAMA, BF16),
    _case("grouped_attention", f"8 prefixes of 256, 8 suffixes of 256 each, Qwen2.5-0.5B heads, {BOTH}",
          attention.grouped, attention.groups(8, 8, 256, 256), SMALL, BF16),
    _case("grouped_attention", f"ragged, 8 prefixes of 512, 8 suffixes of 512 each, {BOTH}", attention.grouped,
          ragged(8, 8, 512, 512), LLAMA, BF16),
    _case("grouped_attention", f"ragged, 8 prefixes of 512, 8 suffixes of 512 each, Qwen2.5-0.5B heads, {BOTH}",
          attention.grouped, ragged(8, 8, 512, 512), SMALL, BF16),
    _case("grouped_attention", f"1 prefix of 2048, 8 suffixes of 512, {BOTH}", attention.grouped,
          attention.groups(1, 8, 2048, 512), LLAMA, BF16),
    *(_case("tree_attention", f"{label}, {BOTH}", attention.tree, levels, LLAMA, BF16) for label, levels in {
        "16 prompts of 100 x 4 answers of 100, 1000 in common": [(1, 1000), (16, 100), (4, 100)],
        "4 beginnings of 300, three forks in two of 200": [(4, 300), *[(2, 200)] * 3],
        "8 prompts of 512 x 8 answers of 512, 512 in common": [(1, 512), (8, 512), (8, 512)],
      }.items()),
    _case("paged_attention", "decode: 256 sequences of 1024, Qwen2.5-0.5B heads", attention.paged, [1024] * 256,
          [1] * 256, SMALL, 16, BF16),
    _case("shared_prefix_attention", "decode: 32 prefixes of 512 x 8 suffixes of 512, Qwen2.5-0.5B heads",
          attention.shared, [512] * 32, 8, [512], 1, SMALL, 16, BF16),
    _case("paged_attention", "decode: 64 sequences of 4096, Llama-3-8B heads", attention.paged, [4096] * 64, [1] * 64,
          LLAMA, 16, BF16),
    _case("shared_prefix_attention", "decode: 16 prefixes of 2048 x 8 suffixes of 256", attention.shared, [2048] * 16,
          8, [256], 1, LLAMA, 16, BF16),
    *(_case("write_kv", f"{tokens} tokens, 8 x 128", attention.write, tokens, (8, 128), 16, BF16)
      for tokens in (65536, 4096, 256)),
    *(_case("merge_attention", f"{tokens} x 32 x 128", attention.merge, tokens, 32, 128, BF16)
      for tokens in (16384, 2048, 256)),
    *(_case("sample_tokens", f"{rows} x 151936, temperature 1", logits.sample, rows, QWEN, BF16, [(1.0, 1.0, 0)])
      for rows in (256, 64, 8)),
    *(_case("sample_tokens", f"{rows} x 151936, top-p 0.95, top-k 50", logits.sample, rows, QWEN, BF16,
            [(1.0, 0.95, 50)]) for rows in (256, 64, 8)),
    *(_case("verify_drafts", f"{drafts} drafts of 7, 151936, temperature 1", logits.verify, [7] * drafts, QWEN, BF16,
            [(1.0, 1.0, 0)]) for drafts in (64, 16, 4)),
    _case("linear_token_logprobs", "4096 x 896 x 151936", logits.linear_logprobs, 4096, QWEN, 896, BF16),
    _case("linear_token_logprobs", "cross entropy, 4096 x 896 x 151936", cross_entropy, 4096, QWEN, 896, BF16),
    _case("token_logprobs", "4096 x 151936, both ways", logits.logprobs, 4096, QWEN, BF16, True),
    _case("token_logprobs", "8192 x 151936, forward", logits.logprobs, 8192, QWEN, BF16, False),
    _case("paged_attention", "decode: 8 sequences of 1024, Qwen2.5-0.5B heads", attention.paged, [1024] * 8, [1] * 8,
          SMALL, 16, BF16),
    _case("shared_prefix_attention", "decode: 4 prefixes of 512 x 8 suffixes of 256, Qwen2.5-0.5B heads",
          attention.shared, [512] * 4, 8, [256], 1, SMALL, 16, BF16),
    *(_case("paged_attention", f"suffix prefill: {n} x {queries} queries on {keys} keys", attention.paged, [keys] * n,
            [queries] * n, LLAMA, 16, BF16) for n, queries, keys in ((8, 512, 2048), (8, 512, 512), (2, 128, 1024))),
    *(_case("linear_token_logprobs", f"{rows} x {width} x 151936", logits.linear_logprobs, rows, QWEN, width, BF16)
      for rows, width in ((1024, 896), (4096, 3584))),
    _case("verify_drafts", "64 drafts of 7, 151936", logits.verify, [7] * 64, QWEN, BF16, logits.MIXED),
    *(_case("token_logprobs", f"{rows} x 151936, both ways", logits.logprobs, rows, QWEN, BF16, True)
      for rows in (1024, 64)),
    _case("sample_tokens", "256 x 151936, five kinds of rows", logits.sample, 256, QWEN, BF16, logits.MIXED),
    *(_case(op, f"{m} x {n}", make, m, n, BF16, *rest)
      for op, make, *rest in (("top1_delta", rank1.top1), ("delta_matvec", rank1.matvec),
                              ("add_rank1_", rank1.add, False))
      for m, n in ((14336, 4096), (4864, 896), (896, 896))),
    _case("top1_delta", "4096 x 14336", rank1.top1, 4096, 14336, BF16),
    _case("top1_deltas", "the 7 modules of a Llama-3-8B layer", rank1.top1_many, LAYER, BF16),
    _case("top1_deltas", "the 7 modules of a Qwen2.5-0.5B layer", rank1.top1_many, SMALL_LAYER, BF16),
    _case("top1_deltas", "the 196 modules of Qwen2.5-7B", rank1.top1_many, MODEL, BF16),
    *(_case("dtw", f"{n} x {n}, length 512", similarity.warp, n, n, 512, 1, "full", None, False)
      for n in (128, 32, 512)),
    *(_case("dtw", f"{n} x {n}, length 512 x 16 dimensions", similarity.warp, n, n, 512, 16, "full", None, False)
      for n in (16, 32, 64)),
    *(_case("dtw_topk", f"{n} x {m}, length 256, k 16", similarity.topk, n, m, 256, 16)
      for n, m in ((64, 4096), (64, 1024), (8, 1024))),
]  # fmt: skip
CASES = [*LARGE, *CHECKED]


def _linear(**given: Any) -> rivals.Rivals:
    return rivals.cross_entropy(**given) if "ids" in given else rivals.linear_logprobs(**given)


def _samplers(logits: torch.Tensor, settings: Sequence[Sequence[Any]]) -> rivals.Rivals:
    """Return no rivals of rows whose settings differ."""
    return samplers.rivals(logits, *settings[0]) if len(settings) == 1 else {}


def _verifiers(settings: Sequence[Sequence[Any]], **given: Any) -> rivals.Rivals:
    (temperature, *filters), *others = settings
    return {} if others or filters != [1.0, 0] else samplers.verifiers(**given, temperature=temperature)


RIVALS: dict[str, Callable[..., rivals.Rivals]] = {  # by op: from the inputs of a problem
    "paged_attention": rivals.paged,
    "shared_prefix_attention": rivals.shared,
    "grouped_attention": rivals.grouped,
    "tree_attention": rivals.tree,
    "write_kv": rivals.writes,
    "merge_attention": rivals.merges,
    "sample_tokens": _samplers,
    "verify_drafts": _verifiers,
    "token_logprobs": rivals.logprobs,
    "linear_token_logprobs": _linear,
    "top1_delta": partial(rivals.triplets, many=False),
    "top1_deltas": partial(rivals.triplets, many=True),
    "delta_matvec": rivals.matvecs,
    "add_rank1_": rivals.rank1_sums,
}


def rivals_of(case: Case, problem: Problem) -> rivals.Rivals:
    """Return rivals that compute the same on the same inputs."""
    return RIVALS[case.op](**problem.inputs) if problem.inputs and case.op in RIVALS else {}
