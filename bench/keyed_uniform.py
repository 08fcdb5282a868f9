"""Keyed uniform numbers: one number per (sample, position)."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

import rlkernels
from bench import Case, copy_bandwidth
from rlkernels.sampling import reference


def cases(quick: bool) -> Iterator[Case]:
    for n in (2053, 2**16) if quick else (2053, 2**16, 2**20):
        ids = torch.randint(0, 2**40, (n,), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(n)
        numpy_rng = np.random.Generator(np.random.Philox(1))
        nbytes = n * (8 + 8 + 4)  # two keys in, one number out
        yield Case(
            op="keyed_uniform",
            shape=f"T={n}",
            dtype="int64",
            providers={
                "rlkernels": partial(rlkernels.keyed_uniform, 1, ids, positions),
                "torch reference": partial(reference.keyed_uniform, 1, ids, positions),
                # not keyed: generators with a hidden state
                "torch.rand": partial(torch.rand, n),
                "numpy Philox": partial(numpy_rng.random, n, dtype=np.float32),
            },
            compare=lambda out, expected: "exact" if torch.equal(torch.as_tensor(out), expected) else "other numbers",
            limit=("copy bandwidth", nbytes / copy_bandwidth(nbytes)),
            work=("numbers", n),
        )
