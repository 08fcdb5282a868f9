"""Dynamic time warping and the similarities built on it."""

from functools import partial
from typing import Any

import torch

import rlkernels
from bench.gpu.problem import GpuCase, Problem
from rlkernels.similarity import reference

Device = torch.device


def _series(shape: tuple[int, ...], on: Device) -> torch.Tensor:
    """Random walks, so that the alignment matters."""
    return torch.randn(shape, device=on).cumsum(1) * 0.1


def warp(n: int, m: int, length: int, dim: int, mode: str, band: int | None, ragged: bool, on: Device) -> Problem:
    """``ragged``: all lengths from 0 up, NaN beyond each, one NaN inside."""
    trailing = (dim,) if dim > 1 else ()
    x, y = _series((n, length, *trailing), on), _series((m, length + 3, *trailing), on)
    lengths: dict[str, Any] = {}
    if ragged:
        for name, t in (("x_lengths", x), ("y_lengths", y)):
            lengths[name] = torch.randint(0, t.shape[1] + 1, (len(t),)).to(on)
            lengths[name][:2] = torch.tensor([0, t.shape[1]])
            beyond = torch.arange(t.shape[1], device=on) >= lengths[name][:, None]
            t[beyond] = torch.nan
        x[1, length // 2] = torch.nan
    options: dict[str, Any] = {**lengths, "mode": mode, "band": band}
    return Problem(
        lambda backend: rlkernels.dtw(x, y, **options, backend=backend),
        lambda: reference.dtw(x.double(), y.double(), **options),
        # one cell: a difference squared per dimension, an addition, two minima
        flops=n * m * length * (length + 3) * (2 * dim + 3),
    )


def topk(n: int, m: int, length: int, k: int, on: Device) -> Problem:
    x, y = _series((n, length), on), _series((m, length), on)
    return Problem(
        lambda backend: rlkernels.dtw_topk(x, y, k, backend=backend),
        lambda: reference.dtw_topk(x.double(), y.double(), k),
    )


def soft(batch: int, length: int, dim: int, on: Device) -> Problem:
    """Forward and the gradients of both series."""
    x, y = _series((batch, length, dim), on), _series((batch, length + 3, dim), on)

    def run(backend: str) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, y)]
        out = rlkernels.soft_dtw(*leaves, gamma=0.5, backend=backend)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    def exact() -> list[torch.Tensor]:
        leaves = [t.double().requires_grad_() for t in (x, y)]
        out = reference.soft_dtw(*leaves, gamma=0.5)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    return Problem(run, exact, floor=1e-5)


def states(n: int, m: int, shape: tuple[int, ...], metric: str, on: Device) -> Problem:
    x, y = (torch.rand(count, *shape, device=on) for count in (n, m))
    return Problem(
        lambda backend: rlkernels.state_similarity(x, y, metric=metric, backend=backend),
        lambda: reference.state_similarity(x.double(), y.double(), metric=metric),
        nbytes=x.nbytes + y.nbytes + 4 * n * m,
    )


def rhyme(n: int, m: int, steps: int, k: int | None, on: Device) -> Problem:
    """All similarities, or with ``k`` the scores of the best; their indices follow from them."""
    query, bank = (
        rlkernels.Trajectories(torch.rand(count, steps, device=on), torch.rand(count, 16, device=on))
        for count in (n, m)
    )
    if k is None:
        return Problem(lambda backend: rlkernels.rhyme_similarity(query, bank, backend=backend), floor=1e-5)
    return Problem(lambda backend: rlkernels.rhyme_topk(query, bank, k=k, backend=backend)[0], floor=1e-5)


CASES = [
    GpuCase("dtw", "7 x 5, lengths up to 33, NaN", partial(warp, 7, 5, 33, 1, "full", None, True)),
    GpuCase("dtw", "3 x 4, 65 x 3 dimensions, band 7", partial(warp, 3, 4, 65, 3, "full", 7, False)),
    GpuCase("dtw", "6 x 5, subsequence, lengths up to 31", partial(warp, 6, 5, 31, 1, "subsequence", None, True)),
    GpuCase("dtw", "1 x 1, one step", partial(warp, 1, 1, 1, 1, "full", None, False)),
    GpuCase("dtw_topk", "5 x 23, length 31, k 4", partial(topk, 5, 23, 31, 4)),
    GpuCase("soft_dtw", "3 pairs, 17 x 2", partial(soft, 3, 17, 2)),
    GpuCase("state_similarity", "5 x 7, Wasserstein", partial(states, 5, 7, (33, 3), "sliced_wasserstein")),
    GpuCase("state_similarity", "5 x 7, Hellinger", partial(states, 5, 7, (31,), "hellinger")),
    GpuCase("state_similarity", "5 x 7, cosine", partial(states, 5, 7, (31,), "cosine")),
    GpuCase("rhyme_similarity", "5 x 23, 31 steps", partial(rhyme, 5, 23, 31, None)),
    GpuCase("rhyme_topk", "3 x 17, 9 steps", partial(rhyme, 3, 17, 9, 5)),
    GpuCase("dtw", "512 x 512, length 512", partial(warp, 512, 512, 512, 1, "full", None, False), timed=True),
    GpuCase("dtw", "64 x 64, length 512 x 16 dimensions", partial(warp, 64, 64, 512, 16, "full", None, False), True),
    GpuCase("dtw_topk", "64 x 4096, length 256, k 16", partial(topk, 64, 4096, 256, 16), timed=True),
    GpuCase("soft_dtw", "256 pairs, 256 x 4", partial(soft, 256, 256, 4), timed=True),
    GpuCase("state_similarity", "64 x 4096, Wasserstein", partial(states, 64, 4096, (128, 16), "sliced_wasserstein"),
            timed=True),
    GpuCase("rhyme_similarity", "64 x 4096, 128 steps", partial(rhyme, 64, 4096, 128, None), timed=True),
    GpuCase("rhyme_topk", "64 x 4096, 128 steps, k 16", partial(rhyme, 64, 4096, 128, 16), timed=True),
]  # fmt: skip
