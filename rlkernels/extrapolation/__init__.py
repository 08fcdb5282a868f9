"""Extrapolation of rank-1 weight updates, and the gate for every prediction (AlphaRL, arXiv 2510.00553)."""

from rlkernels.extrapolation.attempt import Attempt
from rlkernels.extrapolation.extrapolator import PAPER_RULES, TRY_ANYWAY, Extrapolator, forget_momentum
from rlkernels.extrapolation.gate import Comparison, Gate
from rlkernels.extrapolation.predictors import PREDICTORS, Limits, Refusal, Target, extrapolate, refusal, skill
from rlkernels.extrapolation.trajectory import Points, RankOneTrajectory

__all__ = [
    "PAPER_RULES",
    "PREDICTORS",
    "TRY_ANYWAY",
    "Attempt",
    "Comparison",
    "Extrapolator",
    "Gate",
    "Limits",
    "Points",
    "RankOneTrajectory",
    "Refusal",
    "Target",
    "extrapolate",
    "forget_momentum",
    "refusal",
    "skill",
]
