"""Rank-1 structure of weight updates (AlphaRL, arXiv 2510.00553)."""

from rlkernels.rank1.ops import add_rank1_, delta_matvec, top1_delta, top1_deltas
from rlkernels.rank1.peft import export_peft
from rlkernels.rank1.stream import ModuleUpdate, stream_top1
from rlkernels.rank1.update import Rank1Update

__all__ = [
    "ModuleUpdate",
    "Rank1Update",
    "add_rank1_",
    "delta_matvec",
    "export_peft",
    "stream_top1",
    "top1_delta",
    "top1_deltas",
]
