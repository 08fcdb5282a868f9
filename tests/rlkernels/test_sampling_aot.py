"""The Triton kernels of sampling and log-probabilities compile for GPUs that are not here."""

import importlib.util

from support import lacks
from triton_aot import Kernel, compile_for

SAMPLER = "rlkernels.sampling.triton_kernels:_sample_kernel"
SAMPLE = {
    "logits": "*bf16", "uniforms": "*fp32", "temperatures": "*fp32", "top_ps": "*fp32", "top_ks": "*i64",
    "out_ids": "*i64", "out_logprobs": "*fp32", "vocab": "i32", "row_stride": "i32",
}  # fmt: skip
STATS = {"logits": "*bf16", "ids": "*i64", "stats": "*fp32", "entropies": "*fp32", "vocab": "i32", "row_stride": "i32"}
FORWARD = STATS | {"logprobs": "*fp32", "inverse": "fp32"}
BACKWARD = STATS | {"grad_logprobs": "*fp32", "grad_entropies": "*fp32", "grad": "*bf16", "inverse": "fp32"}


def test_a_vocabulary_of_one_compiles_ahead_of_time():
    """A launch makes a constant of an argument that is 1."""
    if importlib.util.find_spec("triton") is None:
        lacks("triton")

    def one(name, signature, **constexprs):
        rest = {n: kind for n, kind in signature.items() if n not in ("vocab", "row_stride")}
        fused = name != SAMPLER
        return Kernel(name, rest, {"vocab": 1, "row_stride": 1, "BLOCK": 1, **constexprs}, enable_fp_fusion=fused)

    logprobs = "rlkernels.logprobs.triton_kernels:"
    kernels = [one(SAMPLER, SAMPLE, FILTER=True), one(f"{logprobs}_forward_kernel", FORWARD, ENTROPY=True),
               one(f"{logprobs}_backward_kernel", BACKWARD, ENTROPY=True)]  # fmt: skip
    assert len(compile_for(kernels)) == 6
