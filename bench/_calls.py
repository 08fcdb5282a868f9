"""A small call of every op that takes tensors, for ``python -m bench host`` and tests."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

import rlkernels
from rlkernels import registry

Arguments = dict[str, Any]
LAYOUT = rlkernels.GroupedLayout([4], [3, 2], [0, 2])
TREE = rlkernels.TreeLayout.from_sequences([[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 7, 8], [9]])
GRADIENTS = {op.name: op.gradients for op in registry.ALL if op.gradients}  # op -> arguments that get one


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged() -> Arguments:
    """Return arguments for sequences of 6 and 3 keys, with 2 and 1 queries, in blocks of 4."""
    caches = torch.randn(2, 4, 4, 1, 8)
    return {"query": torch.randn(3, 2, 8), "key_cache": caches[0], "value_cache": caches[1],
            "block_tables": ints([2, 0], [1, -1]), "seq_lens": ints(6, 3), "query_starts": ints(0, 2, 3),
            "scale": 0.3, "return_lse": True}  # fmt: skip


def trajectories(n: int) -> rlkernels.Trajectories:
    """Return trajectories with lengths whose mean bfloat16 cannot represent."""
    return rlkernels.Trajectories(torch.rand(n, 130), torch.rand(n, 5, 3), torch.tensor([130, 129, 0, 1][:n]))


def matrices(m: int = 20, n: int = 16) -> Arguments:
    """Return a base, and a weight that differs from it by a rank-1 direction and noise."""
    base = torch.randn(m, n)
    delta = torch.outer(torch.randn(m), torch.randn(n)) * 1e-2 + torch.randn(m, n) * 1e-3
    return {"weight": base + delta, "base": base}


def inputs() -> dict[str, Arguments]:
    """Return arguments for each op that takes tensors."""
    ids = torch.tensor([1, 5, 0])
    logits = torch.randn(3, 11)
    uniforms = torch.rand(3)
    sampling = {"logits": logits, "uniforms": uniforms, "temperature": 0.7, "top_p": 0.9, "top_k": 7}
    series = {"x": torch.randn(2, 3, 2), "y": torch.randn(2, 2, 2), "x_lengths": torch.tensor([3, 0]),
              "y_lengths": torch.tensor([2, 1]), "band": 1}  # fmt: skip
    packed = {"query": torch.randn(9, 2, 8), "key": torch.randn(9, 1, 8), "value": torch.randn(9, 1, 8), "scale": 0.3}
    attention = paged()
    rhyme = {"query": trajectories(2), "bank": trajectories(4)}
    prefixes = {"group_tables": ints([3]), "group_lens": ints(4), "group_starts": ints(0, 2)}
    rows = torch.randn(3, 16)
    rotary = {"positions": ids, "cos": torch.randn(9, 4), "sin": torch.randn(9, 4)}
    return {
        "dtw": series,
        "dtw_topk": {**series, "k": 1},
        "soft_dtw": series,
        "state_similarity": {"x": torch.randn(3, 5, 2), "y": torch.randn(4, 5, 2)},
        "rhyme_similarity": rhyme,
        "rhyme_topk": rhyme,
        "top1_delta": {**matrices(), "max_passes": 1},
        "top1_deltas": {"pairs": {"wide": tuple(matrices(5, 40).values()), "zero": torch.ones(2, 3, 4).unbind()},
                        "max_passes": 1},
        "delta_matvec": {**matrices(), "v": torch.randn(16)},
        "add_rank1_": {"weight": torch.randn(5, 7), "u": torch.randn(5), "v": torch.randn(7), "scale": 0.5},
        "write_kv": {"key": torch.randn(2, 1, 8), "value": torch.randn(2, 1, 8), "key_cache": torch.zeros(4, 4, 1, 8),
                     "value_cache": torch.zeros(4, 4, 1, 8), "slots": torch.tensor([3, 9])},
        "paged_attention": attention,
        "shared_prefix_attention": {**attention, **prefixes},
        "merge_attention": {"out_a": torch.randn(3, 2, 8), "lse_a": torch.randn(3, 2), "out_b": torch.randn(3, 2, 8),
                            "lse_b": torch.randn(3, 2)},
        "grouped_attention": {**packed, "layout": LAYOUT},
        "tree_attention": {**packed, "layout": TREE, "return_lse": True},
        "keyed_uniform": {"seed": 7, "sample_ids": ids, "positions": ids.flip(0)},
        "sample_tokens": sampling,
        "verify_drafts": {**sampling, "drafts": [[4], []], "starts": [0, 2, 3]},
        "token_logprobs": {"logits": logits, "ids": ids, "temperature": 0.7, "return_entropy": True},
        "linear_token_logprobs": {"hidden": torch.randn(3, 8), "weight": torch.randn(11, 8), "ids": ids,
                                  "bias": torch.randn(11), "return_entropy": True, "chunk": 4},
        "add_rms_norm": {"residual": rows, "x": torch.randn(3, 16), "weight": torch.rand(16), "eps": 1e-6},
        "rope": {"x": rows, **rotary, "q_heads": 1, "heads": 2, "q_weight": torch.rand(4), "k_weight": torch.rand(4)},
        "silu_mul": {"gate_up": rows},
    }  # fmt: skip


def public(op: str) -> Callable[..., Any]:
    """Return the public function of an op."""
    return getattr(importlib.import_module(f"rlkernels.{registry.OPS[op].folder}"), op)
