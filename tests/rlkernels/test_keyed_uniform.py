import numpy as np
import pytest
import torch
from scipy import stats

import rlkernels


def test_known_answer():
    # Philox4x32-10 with counter and key all zero: first word 0x6627e8d5 (Random123's known-answer file)
    word = 0x6627E8D5
    got = rlkernels.keyed_uniform(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert got.item() == ((word >> 9) + 0.5) * 2.0**-23


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1, 123456789012345])
def test_native_equals_reference(cpu_isa, seed):
    ids = torch.randint(-(2**63), 2**63 - 1, (2053,))
    positions = torch.randint(0, 2**40, (2053,))
    ours = rlkernels.keyed_uniform(seed, ids, positions, backend="cpu")
    assert torch.equal(ours, rlkernels.keyed_uniform(seed, ids, positions, backend="torch"))


def test_depends_on_nothing_but_its_key():
    ids, positions = torch.arange(1000).flip(0)[::2], torch.arange(0, 3000, 3)[:500]
    together = rlkernels.keyed_uniform(5, ids, positions)
    alone = torch.cat([rlkernels.keyed_uniform(5, ids[i : i + 1], positions[i : i + 1]) for i in range(500)])
    assert torch.equal(together, alone)
    assert rlkernels.keyed_uniform(5, ids[:0], positions[:0]).shape == (0,)


@pytest.mark.parametrize("vary", ["seed", "sample", "position"])
def test_uniform_along_every_part_of_the_key(vary):
    n = 20_000
    zero, count = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    if vary == "seed":
        one = torch.zeros(1, dtype=torch.int64)
        sample = torch.cat([rlkernels.keyed_uniform(s, one, one) for s in range(n)])
    else:
        sample = rlkernels.keyed_uniform(1, count if vary == "sample" else zero, zero if vary == "sample" else count)
    assert 0 < sample.min() and sample.max() < 1
    assert stats.kstest(sample.numpy().astype(np.float64), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 4 / np.sqrt(n)


ID = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"sample_ids": torch.zeros(1)}, TypeError, "sample_ids must have dtype torch.int64"),
    ({"positions": torch.zeros(3).long()}, ValueError, r"positions must have shape \[1\], got \[3\]"),
    ({"sample_ids": [1]}, TypeError, "sample_ids must be a torch.Tensor, got list"),
    *(({"seed": seed}, TypeError, f"seed must be an integer, got {seed!r}") for seed in ("3", 1.5, None)),
    *(({"seed": seed}, ValueError, f"seed must be between {-(2**63)} and {2**64 - 1}, got {seed}")
      for seed in (2**64, 2**70, -(2**63) - 1)),
])  # fmt: skip
def test_bad_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        rlkernels.keyed_uniform(**{"seed": 0, "sample_ids": ID, "positions": ID} | changes)
