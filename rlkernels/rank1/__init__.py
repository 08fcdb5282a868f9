"""Rank-1 structure of weight updates (AlphaRL, arXiv 2510.00553)."""

from rlkernels.rank1.ops import add_rank1_, delta_matvec, top1_delta, top1_deltas
from rlkernels.rank1.update import Rank1Update

__all__ = ["Rank1Update", "add_rank1_", "delta_matvec", "top1_delta", "top1_deltas"]
