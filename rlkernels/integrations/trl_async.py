"""TRL's experimental ``AsyncGRPOTrainer`` with our attention on its trees, on a CPU too.

TRL computes each common prefix once, but copies keys and values of the whole path for every segment, and needs a
FlashAttention 3 kernel. Here they exist once per token of the tree, and gradients repeat bit for bit on a CPU.
"""

from typing import Any

import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer
from trl.trainer.utils import get_peak_flops_per_device

from rlkernels.integrations.trl_shared import dispatch_packed_attention, unwrap
from rlkernels.prefix_cache import TreeLayout

__all__ = ["SharedPrefixAsyncGRPOTrainer"]

TREE_ARGUMENTS = (
    "tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_max_seqlen_q", "tree_max_seqlen_k",
)  # fmt: skip


def tree_layout(segment_starts: torch.Tensor, path_starts: torch.Tensor) -> TreeLayout:
    """Return the layout of TRL's ``TreeRow.pack``, whose segments lie depth first.

    Args:
        segment_starts: int [S + 1], bounds of the segments in the row (``tree_cu_seqlens_q``).
        path_starts: int [S + 1], bounds of their paths, each with its segment (``tree_cu_seqlens_k``).
    """
    starts = segment_starts.cpu().long()
    lens = starts.diff()
    depths = path_starts.cpu().long().diff() - lens  # of the first token of each segment
    ends = starts[-1:].repeat(len(lens))
    path: list[tuple[int, int]] = []  # segments on the path: number, depth
    for i, depth in enumerate(depths.tolist()):
        while path and path[-1][1] >= depth:
            ends[path.pop()[0]] = starts[i]
        path.append((i, depth))
    offsets = (depths - starts[:-1]).repeat_interleave(lens)
    end = ends.repeat_interleave(lens)
    return TreeLayout(offsets + torch.arange(len(end), device="cpu"), end)


def _pass_layout(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Replace TRL's description of a tree among a model's arguments by its layout."""
    if TREE_ARGUMENTS[0] not in kwargs:
        return None
    tree = {name: kwargs.pop(name) for name in TREE_ARGUMENTS}
    layout = tree_layout(tree["tree_cu_seqlens_q"], tree["tree_cu_seqlens_k"])
    dispatch_packed_attention(model)  # at each pass: every AsyncGRPOTrainer registers TRL's own again
    return args, kwargs | {"attention": layout}


def _find_peak_flops(accelerator: Any, dtype: str) -> float | None:
    """Return TRL's figure, or None on a CPU, for which TRL fails: it asks CUDA for the name of the device."""
    return None if accelerator.device.type == "cpu" else get_peak_flops_per_device(accelerator, dtype)


async_grpo_trainer.get_peak_flops_per_device = _find_peak_flops


class SharedPrefixAsyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's ``AsyncGRPOTrainer`` with our attention in place of FlashAttention 3; it takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        unwrap(self.accelerator, self.model).register_forward_pre_hook(_pass_layout, with_kwargs=True)
