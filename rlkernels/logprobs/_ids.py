"""The check of token ids."""

import torch


def check_ids(ids: torch.Tensor, vocab: int) -> None:
    """Raises ValueError for an id outside ``[0, vocab)``; on a GPU it would have to wait for it, and does not look."""
    if ids.device.type == "cpu" and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab:
            raise ValueError(f"ids must be between 0 and {vocab - 1}, got {low if low < 0 else high}")
