"""TRL's experimental ``AsyncGRPOTrainer`` with our attention on its trees, on a CPU too.

TRL forwards each common beginning once, but copies keys and values of the whole path for every segment, and needs a
FlashAttention 3 kernel. Here they exist once per token of the tree, and gradients repeat bit for bit on a CPU.
"""

from typing import Any

import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer
from trl.trainer.utils import get_peak_flops_per_device

from rlkernels.integrations.trl_shared import _attend_beside
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
    starts, paths = (bounds.cpu().long() for bounds in (segment_starts, path_starts))
    lens = starts.diff()
    depths = paths.diff() - lens  # of the first token of each segment
    ends = starts[-1:].repeat(len(lens))
    path: list[tuple[int, int]] = []  # segments on the path: number, depth
    for i, depth in enumerate(depths.tolist()):
        while path and path[-1][1] >= depth:
            ends[path.pop()[0]] = starts[i]
        path.append((i, depth))
    depth_of, end = (values.repeat_interleave(lens) for values in (depths - starts[:-1], ends))
    return TreeLayout(depth_of + torch.arange(len(end)), end)


def _pass_layout(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Replace TRL's description of a tree among a model's arguments by its layout."""
    if TREE_ARGUMENTS[0] not in kwargs:
        return None
    given = {name: kwargs.pop(name) for name in TREE_ARGUMENTS}
    layout = tree_layout(given["tree_cu_seqlens_q"], given["tree_cu_seqlens_k"])
    _attend_beside(model)  # at each pass: every AsyncGRPOTrainer registers TRL's own again
    return args, kwargs | {"attention": layout}


def _find_peak_flops(accelerator: Any, dtype: str) -> float | None:
    """Return TRL's figure, and None on a CPU, where TRL asks CUDA for the name of the device and fails."""
    return None if accelerator.device.type == "cpu" else get_peak_flops_per_device(accelerator, dtype)


async_grpo_trainer.get_peak_flops_per_device = _find_peak_flops


class SharedPrefixAsyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's ``AsyncGRPOTrainer``, all of whose arguments it takes, with our attention in place of FlashAttention 3."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        model = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "get_base_model"):  # of PEFT
            model = model.get_base_model()
        model.register_forward_pre_hook(_pass_layout, with_kwargs=True)
