"""Tile sizes, warps and stages of the Triton kernels: each setting a row, judged and timed as everybody else.

A kernel takes its sizes from its launcher. Here other ones take their place for the length of a call, so what wins can
be written into the launcher; until then nothing outside of this file knows of them.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu.problem import GpuCase, Problem, Rival

Settings = Mapping[str, int]
Contestant = tuple[Callable[[], Callable[[], Any]], Rival | None]

# op and beginning of a case -> values of each setting. Not among them, by what is compiled for sm_90 with heads of 128:
# four stages of decode, which give the code of three, and blocks of 128 of grouped attention, which spill
GRIDS: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("paged_attention", "decode: 64"): {"block_m": (16,), "block_n": (32, 64, 128), "num_warps": (4, 8),
                                        "num_stages": (2, 3)},
    ("paged_attention", "suffix prefill"): {"block_m": (64, 128), "block_n": (64, 128), "num_warps": (4, 8),
                                            "num_stages": (2, 3)},
    ("shared_prefix_attention", "decode: 16"): {"block_m": (16, 32, 64), "block_n": (64, 128), "num_warps": (4, 8),
                                                "num_stages": (2, 3)},
    ("grouped_attention", "8 prefixes of 512"): {"block": (32, 64), "num_warps": (4, 8), "num_stages": (2, 3)},
    ("sample_tokens", "256 x 151936, temperature 1"): {"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16)},
}  # fmt: skip


class Launched:
    """A Triton kernel whose launches get other keyword arguments."""

    def __init__(self, kernel: Any, options: Mapping[str, int]):
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.kernel[grid](*args, **{**kwargs, **self.options})


@contextmanager
def paged_tiles(settings: Settings) -> Iterator[None]:
    """Paged and shared-prefix attention: the launcher's own sizes, and what of the grid hangs on them."""
    from rlkernels.prefix_cache import triton_kernels as kernels

    class Launch(kernels._Launch):
        def __init__(self, query: torch.Tensor, key_cache: torch.Tensor, tables: torch.Tensor):
            super().__init__(query, key_cache, tables)
            self.block_m, self.block_n = settings["block_m"], settings["block_n"]
            self.num_warps = settings["num_warps"]
            tiles = query.shape[0] * self.group // self.block_m + self.sources
            self.grid = (tiles, *self.grid[1:])

    stages = Launched(kernels._attend_kernel, {"num_stages": settings["num_stages"]})
    with patch.object(kernels, "_Launch", Launch), patch.object(kernels, "_attend_kernel", stages):
        yield


@contextmanager
def grouped_tiles(settings: Settings) -> Iterator[None]:
    """The three kernels of grouped attention. That of the keys keeps its single stage: its products on sm_90 may still
    read what a further stage would copy over."""
    from rlkernels.prefix_cache import triton_grouped as kernels

    own = kernels._blocks

    def blocks(query: torch.Tensor) -> dict[str, int | bool]:
        sizes = {"BLOCK_M": settings["block"], "BLOCK_N": settings["block"]}
        return {**own(query), **sizes, "num_warps": settings["num_warps"], "num_stages": settings["num_stages"]}

    with patch.object(kernels, "_blocks", blocks):
        yield


@contextmanager
def sampler_blocks(settings: Settings) -> Iterator[None]:
    from rlkernels.sampling import triton_kernels as kernels

    with patch.object(kernels, "_sample_kernel", Launched(kernels._sample_kernel, settings)):
        yield


TILED = {
    "paged_attention": paged_tiles,
    "shared_prefix_attention": paged_tiles,
    "grouped_attention": grouped_tiles,
    "sample_tokens": sampler_blocks,
}


def named(settings: Settings) -> str:
    return "triton " + " ".join(f"{name.removeprefix('num_')}={value}" for name, value in settings.items())


def settings_of(op: str, case: str) -> list[dict[str, int]]:
    """All settings to be tried on a case; none where it is not swept."""
    grids = (values for (name, beginning), values in GRIDS.items() if name == op and case.startswith(beginning))
    return [dict(zip(values, chosen)) for values in grids for chosen in itertools.product(*values.values())]


def tiles(case: GpuCase, problem: Problem, device: torch.device) -> dict[str, Contestant]:
    """A contestant per setting."""

    def make(settings: dict[str, int]) -> Callable[[], Callable[[], Any]]:
        def call() -> Any:
            with TILED[case.op](settings):
                return problem.call("triton")

        return lambda: call

    return {named(settings): (make(settings), None) for settings in settings_of(case.op, case.label)}
