"""Batched similarity of trajectories: dynamic time warping, state distributions, C_rhyme, exact top-k."""

from rlkernels.similarity.alignment import dtw, dtw_topk
from rlkernels.similarity.soft import soft_dtw
from rlkernels.similarity.states import state_similarity
from rlkernels.similarity.trajectories import Trajectories, rhyme_similarity, rhyme_topk

__all__ = ["Trajectories", "dtw", "dtw_topk", "rhyme_similarity", "rhyme_topk", "soft_dtw", "state_similarity"]
