"""Kernels that make reinforcement learning of language models cheaper.

- Similar runs: ``dtw``, ``dtw_topk``, ``soft_dtw``, ``state_similarity``, and ``rhyme_similarity``, ``rhyme_topk`` of
  ``Trajectories``.
- Weight updates of rank 1: ``top1_delta``, ``top1_deltas`` and ``stream_top1`` find a ``Rank1Update``, ``add_rank1_``
  applies one, ``export_peft`` saves it; ``delta_matvec`` multiplies by a whole one. ``RankOneTrajectory`` follows
  updates, ``refusal`` tells why they lead nowhere, ``extrapolate`` takes them to a ``Target``, a ``Gate`` judges that.
- Prompts with a common beginning, for generation: ``PagedKVCache`` (``OutOfBlocks``), ``write_kv``,
  ``paged_attention``, ``shared_prefix_attention``, ``merge_attention``; for training: ``grouped_attention`` over a
  ``GroupedLayout``.
- Drafts from earlier answers: ``RolloutHistory``, ``verify_drafts``; sampling that can be repeated: ``keyed_uniform``,
  ``sample_tokens``.
- Losses: ``token_logprobs``, and ``linear_token_logprobs`` without the logits.
- ``info``: what is compiled, and what runs where; ``python -m rlkernels info`` prints it.

``rlkernels.integrations`` has the parts for Transformers, TRL and vLLM. ``import rlkernels`` needs torch and numpy
only; every name is loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module that defines it
_EXPORTS = {
    "Gate": "rlkernels.extrapolation",
    "Rank1Update": "rlkernels.rank1",
    "RankOneTrajectory": "rlkernels.extrapolation",
    "Target": "rlkernels.extrapolation",
    "add_rank1_": "rlkernels.rank1",
    "delta_matvec": "rlkernels.rank1",
    "export_peft": "rlkernels.rank1",
    "extrapolate": "rlkernels.extrapolation",
    "refusal": "rlkernels.extrapolation",
    "stream_top1": "rlkernels.rank1",
    "top1_delta": "rlkernels.rank1",
    "top1_deltas": "rlkernels.rank1",
    "info": "rlkernels._info",
    "keyed_uniform": "rlkernels.sampling",
    "Trajectories": "rlkernels.similarity",
    "dtw": "rlkernels.similarity",
    "dtw_topk": "rlkernels.similarity",
    "rhyme_similarity": "rlkernels.similarity",
    "rhyme_topk": "rlkernels.similarity",
    "soft_dtw": "rlkernels.similarity",
    "state_similarity": "rlkernels.similarity",
    "GroupedLayout": "rlkernels.prefix_cache",
    "OutOfBlocks": "rlkernels.prefix_cache",
    "PagedKVCache": "rlkernels.prefix_cache",
    "grouped_attention": "rlkernels.prefix_cache",
    "merge_attention": "rlkernels.prefix_cache",
    "paged_attention": "rlkernels.prefix_cache",
    "shared_prefix_attention": "rlkernels.prefix_cache",
    "write_kv": "rlkernels.prefix_cache",
    "sample_tokens": "rlkernels.sampling",
    "verify_drafts": "rlkernels.sampling",
    "RolloutHistory": "rlkernels.history",
    "linear_token_logprobs": "rlkernels.logprobs",
    "token_logprobs": "rlkernels.logprobs",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
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
    from rlkernels.prefix_cache import grouped_attention as grouped_attention
    from rlkernels.prefix_cache import merge_attention as merge_attention
    from rlkernels.prefix_cache import paged_attention as paged_attention
    from rlkernels.prefix_cache import shared_prefix_attention as shared_prefix_attention
    from rlkernels.prefix_cache import write_kv as write_kv
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


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rlkernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
