"""Sampling ops in plain torch: the single source of truth for tests and benchmarks."""

import torch


def philox_word(key: int, counter_low: torch.Tensor, counter_high: torch.Tensor) -> torch.Tensor:
    """First output word of Philox4x32-10 (Salmon et al., SC'11) for int64 counters of any shape, as int64."""
    mask = 0xFFFFFFFF
    c0, c1 = counter_low & mask, (counter_low >> 32) & mask
    c2, c3 = counter_high & mask, (counter_high >> 32) & mask
    k0, k1 = key & mask, (key >> 32) & mask
    for _ in range(10):
        # int64 products wrap modulo 2**64, which leaves the bits of the unsigned product
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & mask) ^ c1 ^ k0, p1 & mask
        c2, c3 = ((p0 >> 32) & mask) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0


def keyed_uniform(seed: int, sample_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """See :func:`rlkernels.keyed_uniform`."""
    word = philox_word(seed, sample_ids.long(), positions.long())
    return ((word >> 9).float() + 0.5) * 2.0**-23
