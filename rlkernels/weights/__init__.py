"""Lossless deltas between two versions of a model's weights: XOR, compressed by zstd.

A step of reinforcement learning changes few bits of weights in bfloat16, so a delta has about a hundredth of their
bytes. ``pip install 'rlkernels[weights]'`` brings zstandard, which nothing else needs.
"""

from rlkernels.weights.adapter import merged_weight
from rlkernels.weights.checkpoints import History
from rlkernels.weights.delta import Delta, apply_, encode

__all__ = ["Delta", "History", "apply_", "encode", "merged_weight"]
