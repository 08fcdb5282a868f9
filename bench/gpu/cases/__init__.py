"""The cases, most important op first. Every op that can run there has at least one small and one timed case."""

from bench.gpu.cases import attention, decoder, logits, rank1, similarity
from bench.gpu.problem import GpuCase

CASES: list[GpuCase] = [*attention.CASES, *logits.CASES, *rank1.CASES, *similarity.CASES, *decoder.CASES]
# Data structures of the host: nothing of them runs on a GPU.
HOST_ONLY = ("block_pool", "rollout_history")

_TRITON = "tests/rlkernels/triton"
_TILES = f"{_TRITON}/test_gpu_tiles.py"
# Op -> the files of tests that exercise its GPU kernels: a backend is proven only where they pass.
TESTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("write_kv", "paged_attention", "shared_prefix_attention", "merge_attention"),
                    (f"{_TRITON}/test_prefix_cache.py", _TILES)),
    "grouped_attention": (f"{_TRITON}/test_grouped_attention.py", _TILES),
    **dict.fromkeys(("sample_tokens", "verify_drafts"), (f"{_TRITON}/test_sampling.py", _TILES)),
    **dict.fromkeys(("token_logprobs", "linear_token_logprobs"), (f"{_TRITON}/test_logprobs.py", _TILES)),
    **dict.fromkeys(("top1_delta", "top1_deltas", "delta_matvec", "add_rank1_"), (f"{_TRITON}/test_rank1.py",)),
    **dict.fromkeys(("dtw", "dtw_topk"), (f"{_TRITON}/test_dtw_triton.py", _TILES)),
}  # fmt: skip
