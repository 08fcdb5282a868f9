"""The cases, most important op first. Every op that can run there has at least one small and one timed case."""

from bench.gpu.cases import attention, decoder, logits, rank1, similarity
from bench.gpu.problem import GpuCase

CASES: list[GpuCase] = [*attention.CASES, *logits.CASES, *rank1.CASES, *similarity.CASES, *decoder.CASES]
# Data structures of the host: nothing of them runs on a GPU.
HOST_ONLY = ("block_pool", "rollout_history")
