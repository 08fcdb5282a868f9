"""The public names of rlkernels for type checkers; ``__init__.py`` loads the same ones."""

from rlkernels import weights as weights
from rlkernels._info import info as info
from rlkernels.extrapolation import Gate as Gate
from rlkernels.extrapolation import RankOneTrajectory as RankOneTrajectory
from rlkernels.extrapolation import Target as Target
from rlkernels.extrapolation import extrapolate as extrapolate
from rlkernels.extrapolation import refusal as refusal
from rlkernels.history import RolloutHistory as RolloutHistory
from rlkernels.logprobs import linear_token_logprobs as linear_token_logprobs
from rlkernels.logprobs import token_logprobs as token_logprobs
from rlkernels.prefix_cache import GroupedLayout as GroupedLayout
from rlkernels.prefix_cache import OutOfBlocks as OutOfBlocks
from rlkernels.prefix_cache import PagedKVCache as PagedKVCache
from rlkernels.prefix_cache import TreeLayout as TreeLayout
from rlkernels.prefix_cache import grouped_attention as grouped_attention
from rlkernels.prefix_cache import merge_attention as merge_attention
from rlkernels.prefix_cache import paged_attention as paged_attention
from rlkernels.prefix_cache import shared_prefix_attention as shared_prefix_attention
from rlkernels.prefix_cache import tree_attention as tree_attention
from rlkernels.prefix_cache import write_kv as write_kv
from rlkernels.proof import prove as prove
from rlkernels.rank1 import Rank1Update as Rank1Update
from rlkernels.rank1 import add_rank1_ as add_rank1_
from rlkernels.rank1 import delta_matvec as delta_matvec
from rlkernels.rank1 import export_peft as export_peft
from rlkernels.rank1 import stream_top1 as stream_top1
from rlkernels.rank1 import top1_delta as top1_delta
from rlkernels.rank1 import top1_deltas as top1_deltas
from rlkernels.sampling import keyed_uniform as keyed_uniform
from rlkernels.sampling import sample_tokens as sample_tokens
from rlkernels.sampling import verify_drafts as verify_drafts
from rlkernels.similarity import Trajectories as Trajectories
from rlkernels.similarity import dtw as dtw
from rlkernels.similarity import dtw_topk as dtw_topk
from rlkernels.similarity import rhyme_similarity as rhyme_similarity
from rlkernels.similarity import rhyme_topk as rhyme_topk
from rlkernels.similarity import soft_dtw as soft_dtw
from rlkernels.similarity import state_similarity as state_similarity

__version__: str
