"""Cases of dynamic time warping."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import rlkernels
from rlkernels.proof.problem import Case, Problem
from rlkernels.proof.workload import Workload
from rlkernels.similarity import reference

Device = torch.device


def _walks(shape: tuple[int, ...], on: Device) -> torch.Tensor:
    """Draw random walks, whose cost depends on the alignment."""
    return torch.randn(shape, device=on).cumsum(1) * 0.1


def warp(n: int, m: int, length: int, dim: int, mode: str, band: int | None, ragged: bool, on: Device) -> Problem:
    """Make a problem of DTW; ``ragged``: all lengths from 0 up, NaN beyond each, one NaN inside."""
    trailing = (dim,) if dim > 1 else ()
    x = _walks((n, length, *trailing), on)
    y = _walks((m, length + 3, *trailing), on)
    lengths: dict[str, Any] = {}
    if ragged:
        for name, series in (("x_lengths", x), ("y_lengths", y)):
            longest = series.shape[1]
            lengths[name] = torch.randint(0, longest + 1, (len(series),), device="cpu").to(on)
            lengths[name][:2] = torch.tensor([0, longest], device="cpu")
            series[torch.arange(longest, device=on) >= lengths[name][:, None]] = torch.nan
        x[1, length // 2] = torch.nan
    options: dict[str, Any] = {**lengths, "mode": mode, "band": band}
    return Problem(
        lambda backend: rlkernels.dtw(x, y, **options, backend=backend),
        lambda: reference.dtw(x.double(), y.double(), **options),
        # of a cell: a squared difference for each dimension, an addition, two minima
        flops=n * m * length * (length + 3) * (2 * dim + 3),
    )


def topk(n: int, m: int, length: int, k: int, on: Device) -> Problem:
    x = _walks((n, length), on)
    y = _walks((m, length), on)
    return Problem(
        lambda backend: rlkernels.dtw_topk(x, y, k, backend=backend),
        lambda: reference.dtw_topk(x.double(), y.double(), k),
    )


SMALL = [
    Case("dtw", "7 x 5, lengths up to 33, NaN", partial(warp, 7, 5, 33, 1, "full", None, True)),
    Case("dtw", "3 x 4, 65 x 3 dimensions, band 7", partial(warp, 3, 4, 65, 3, "full", 7, False)),
    Case("dtw", "6 x 5, subsequence, lengths up to 31", partial(warp, 6, 5, 31, 1, "subsequence", None, True)),
    Case("dtw", "1 x 1, one step", partial(warp, 1, 1, 1, 1, "full", None, False)),
    Case("dtw_topk", "5 x 23, length 31, k 4", partial(topk, 5, 23, 31, 4)),
]


def timed(work: Workload) -> Iterator[Case]:
    """Yield cases for which plain torch takes tenths of a second."""
    yield Case("dtw", "128 x 128, length 512", partial(warp, 128, 128, 512, 1, "full", None, False), timed=True)
    yield Case("dtw/wide", "32 x 32, length 256 x 16 dimensions",
               partial(warp, 32, 32, 256, 16, "full", None, False), timed=True)  # fmt: skip
