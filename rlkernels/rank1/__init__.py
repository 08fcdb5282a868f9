"""Rank-1 structure of weight updates (AlphaRL, arXiv 2510.00553)."""

from rlkernels.rank1.gate import Comparison, Gate
from rlkernels.rank1.ops import add_rank1_, delta_matvec, top1_delta, top1_deltas
from rlkernels.rank1.peft import export_peft
from rlkernels.rank1.predictors import PREDICTORS, Limits, Predictor, Refusal, Target, extrapolate, refusal, skill
from rlkernels.rank1.stream import ModuleUpdate, stream_top1
from rlkernels.rank1.trajectory import Points, RankOneTrajectory
from rlkernels.rank1.update import Rank1Update

__all__ = [
    "PREDICTORS",
    "Comparison",
    "Gate",
    "Limits",
    "ModuleUpdate",
    "Points",
    "Predictor",
    "Rank1Update",
    "RankOneTrajectory",
    "Refusal",
    "Target",
    "add_rank1_",
    "delta_matvec",
    "export_peft",
    "extrapolate",
    "refusal",
    "skill",
    "stream_top1",
    "top1_delta",
    "top1_deltas",
]
