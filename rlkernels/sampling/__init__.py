"""Keyed random numbers, token sampling and exact draft verification."""

import torch

from rlkernels import _check
from rlkernels import backend as _backend
from rlkernels.sampling import reference

__all__ = ["keyed_uniform"]


def keyed_uniform(
    seed: int, sample_ids: torch.Tensor, positions: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Random numbers that depend only on (seed, sample, position): the same on every device and in any batch order.

    Philox4x32-10 with the seed as key and (sample, position) as counter (Salmon et al., SC'11).

    Args:
        seed: any integer; taken modulo 2**64.
        sample_ids: int64 [T].
        positions: int64 [T].

    Returns:
        float32 [T], uniform on the open interval (0, 1), multiples of 2**-24.

    Raises:
        TypeError, ValueError: a wrong dtype, rank, length or device.
    """
    _check.tensor("sample_ids", sample_ids, ndim=1, dtype=torch.int64)
    _check.tensor("positions", positions, ndim=1, dtype=torch.int64, device=sample_ids.device)
    _check.shape("positions", positions, sample_ids.shape)
    seed = (int(seed) + 2**63) % 2**64 - 2**63  # as a signed 64-bit number
    if _backend.choose("keyed_uniform", sample_ids.device, backend) == "cpu":
        return torch.ops.rlkernels.keyed_uniform(seed, sample_ids.contiguous(), positions.contiguous())
    return reference.keyed_uniform(seed, sample_ids, positions)
