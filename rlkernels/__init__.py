"""Kernels that make reinforcement learning of language models cheaper.

- Similar runs: ``dtw``, ``dtw_topk``, ``soft_dtw``, ``state_similarity``, and ``rhyme_similarity``, ``rhyme_topk`` of
  ``Trajectories``.
- Weight updates of rank 1: ``top1_delta``, ``top1_deltas`` and ``stream_top1`` find a ``Rank1Update``, ``add_rank1_``
  applies one, ``export_peft`` saves it; ``delta_matvec`` multiplies by a whole one. ``RankOneTrajectory`` follows
  updates, ``refusal`` tells why they lead nowhere, ``extrapolate`` takes them to a ``Target``, a ``Gate`` judges that.
- Prompts with a common beginning, for generation: ``PagedKVCache`` (``OutOfBlocks``), ``write_kv``,
  ``paged_attention``, ``shared_prefix_attention``, ``merge_attention``; for training: ``tree_attention`` over a
  ``TreeLayout``, ``grouped_attention`` over a ``GroupedLayout``.
- Drafts from earlier answers: ``RolloutHistory``, ``verify_drafts``; sampling that can be repeated: ``keyed_uniform``,
  ``sample_tokens``.
- Losses: ``token_logprobs``, and ``linear_token_logprobs`` without the logits.
- ``weights``: ``weights.encode`` and ``weights.apply_``, lossless deltas between two versions of a model.
- ``info``: what is compiled, and what runs where; ``python -m rlkernels info`` prints it. ``prove`` finds out which
  kernels are right and faster on this GPU; ``python -m rlkernels prove`` does too.

``rlkernels.integrations`` has the parts for Transformers, TRL and vLLM. ``import rlkernels`` needs torch and numpy
only; every name is loaded on first use.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# module -> the public names that it defines; __init__.pyi tells type checkers the same
_PUBLIC = {
    "_info": "info",
    "extrapolation": "Gate RankOneTrajectory Target extrapolate refusal",
    "history": "RolloutHistory",
    "logprobs": "linear_token_logprobs token_logprobs",
    "prefix_cache": "GroupedLayout OutOfBlocks PagedKVCache TreeLayout grouped_attention merge_attention "
    "paged_attention shared_prefix_attention tree_attention write_kv",
    "proof": "prove",
    "rank1": "Rank1Update add_rank1_ delta_matvec export_peft stream_top1 top1_delta top1_deltas",
    "sampling": "keyed_uniform sample_tokens verify_drafts",
    "similarity": "Trajectories dtw dtw_topk rhyme_similarity rhyme_topk soft_dtw state_similarity",
}
_EXPORTS = {name: f"rlkernels.{module}" for module, names in _PUBLIC.items() for name in names.split()}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name == "weights":  # a module, whose functions have plain names
        return importlib.import_module("rlkernels.weights")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rlkernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
