"""The cases, most important op first. Every op with a GPU backend has at least one small and one timed case."""

from bench.gpu.cases import attention, logits, rank1, similarity
from bench.gpu.problem import GpuCase

CASES: list[GpuCase] = [*attention.CASES, *logits.CASES, *rank1.CASES, *similarity.CASES]
# Data structures of the host: nothing of them runs on a GPU.
HOST_ONLY = ("block_pool", "rollout_history")
