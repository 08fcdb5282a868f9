"""Batched dynamic time warping, exact top-k, soft-DTW and C_rhyme.

The limit of dtw is the port bound: four float32 instructions per cell (sub, min, min, fma) on the units that run fma,
8 cells per clock for AVX-512. Only cells inside the band and the lengths count.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import rlkernels
from bench import Case, fma_rate, optional
from bench._gradients import run_both_ways
from rlkernels.similarity import reference


def curves(n: int, steps: int, seed: int, noise: float = 0.05) -> torch.Tensor:
    """Make reward curves: noisy sigmoids of random height, position and steepness."""
    generator = torch.Generator().manual_seed(seed)
    low, rise, middle, rate = torch.rand(4, n, 1, generator=generator)
    curve = 0.3 * low + (0.4 + 0.3 * rise) * torch.sigmoid((4 + 20 * rate) * (torch.linspace(0, 1, steps) - middle))
    return curve + noise * torch.randn(n, steps, generator=generator)


def cells(x_lengths: torch.Tensor, y_lengths: torch.Tensor, band: int | None) -> float:
    """Count the cells of all pairs inside the lengths and the band."""
    a, b = x_lengths[:, None].double(), y_lengths.double()
    outside = torch.zeros(())
    if band is not None:
        radius = (a - b).abs().clamp_min(band)
        for side in (a, b):
            corner = (side - 1 - radius).clamp_min(0)
            outside = outside + corner * (corner + 1) / 2
    return float((a * b - outside).sum())


def limit(num_cells: float, instructions: int = 4) -> tuple[str, float]:
    return "port bound", num_cells * instructions / (fma_rate() / 2)


def ours(shape: str, x: torch.Tensor, y: torch.Tensor, lengths: Sequence[torch.Tensor], band: int | None,
         mode: str = "full") -> Case:  # fmt: skip
    """Make a case that no other library computes in this time or memory; ``lengths`` of both."""
    settings: dict[str, Any] = {"x_lengths": lengths[0], "y_lengths": lengths[1], "band": band, "mode": mode}
    num_cells = cells(lengths[0], lengths[1], band)
    return Case(
        op="dtw",
        shape=shape,
        providers={"rlkernels": partial(rlkernels.dtw, x, y, **settings)},
        reference=None,
        limit=limit(num_cells, 4 if mode == "full" else 8),
        work=("cells", num_cells),
    )


def large(quick: bool) -> Iterator[Case]:
    n, m = (8, 256) if quick else (64, 4096)
    for steps, band, mixed_lengths, mode in (
        (64, None, False, "full"),
        (128, None, False, "full"),
        (128, 16, False, "full"),
        (512, 51, False, "full"),
        (512, None, True, "full"),
        (512, 51, True, "full"),
        (128, None, False, "subsequence"),
    ):
        x, y = curves(n, steps, 0), curves(m, steps, 1)
        generator = torch.Generator().manual_seed(2)
        shortest = 64 if mixed_lengths else steps
        lengths = [torch.randint(shortest, steps + 1, (count,), generator=generator) for count in (n, m)]
        label = f"{n} x {m}, L {'64-' if mixed_lengths else ''}{steps}, band {band}{', subsequence' * (mode != 'full')}"
        yield ours(label, x, y, lengths, band, mode)


def against_others(n: int, m: int, band: int | None) -> Case:
    steps, threads = 128, torch.get_num_threads()
    x, y = curves(n, steps, 0), curves(m, steps, 1)
    a, b = x.double().numpy(), y.double().numpy()

    def dtaidistance(module: Any) -> Any:
        window = None if band is None else band + 1
        block = ((0, n), (n, n + m))
        run = partial(module.distance_matrix_fast, [*a, *b], block=block, window=window, parallel=threads > 1)
        return lambda: torch.as_tensor(run()[:n, n:]).square()

    def tslearn(module: Any) -> Any:
        constraint = {} if band is None else {"global_constraint": "sakoe_chiba", "sakoe_chiba_radius": band}
        return lambda: torch.as_tensor(module.cdist_dtw(a, b, n_jobs=threads, **constraint)).square()

    def aeon(module: Any) -> Any:
        run = partial(module.dtw_pairwise_distance, a[:, None], b[:, None], n_jobs=threads)
        return lambda: torch.as_tensor(run())

    providers = {
        "rlkernels": partial(rlkernels.dtw, x, y, band=band),
        "torch reference": partial(reference.dtw, x, y, band=band),
        "dtaidistance": optional("dtaidistance.dtw", dtaidistance),
        "tslearn": optional("tslearn.metrics", tslearn),
    }
    if band is None:  # aeon's window is a sloped share of the length
        providers["aeon"] = optional("aeon.distances", aeon)
    num_cells = cells(torch.full((n,), steps), torch.full((m,), steps), band)
    return Case(
        op="dtw",
        shape=f"{n} x {m}, L {steps}, band {band}, against others",
        providers=providers,
        limit=limit(num_cells),
        work=("cells", num_cells),
    )


def top(quick: bool) -> Case:
    n, m, steps, band = (8, 4000, 64, 6) if quick else (64, 100_000, 64, 6)
    x = curves(n, steps, 0)
    y = curves(m, steps, 1)
    k = m // 100
    costs: Any = partial(rlkernels.dtw, x, y, band=band)
    return Case(
        op="dtw_topk",
        shape=f"{n} x {m}, L {steps}, band {band}, top {k}",
        providers={
            "rlkernels": lambda: rlkernels.dtw_topk(x, y, k, band=band)[0],
            "dtw + torch.topk": lambda: torch.topk(costs(), k, largest=False).values,
        },
        reference="dtw + torch.topk",
        work=("pairs", n * m),
    )


def memory() -> Case:
    """Make the case of 512 x 512 pairs of length 2048, whose cost tensor would take 4.4 TB."""
    lengths = [torch.full((512,), 2048)] * 2
    return ours("512 x 512, L 2048, band 20", curves(512, 2048, 0), curves(512, 2048, 1), lengths, band=20)


def soft(quick: bool) -> Case:
    batch, steps = (8, 32) if quick else (64, 128)
    x, y = curves(batch, steps, 0), curves(batch, steps, 1)
    return Case(
        op="soft_dtw",
        shape=f"{batch} pairs, L {steps}, value and gradient",
        providers={
            "rlkernels": partial(run_both_ways, partial(rlkernels.soft_dtw, gamma=0.1), x, y),
            "torch reference": partial(run_both_ways, partial(reference.soft_dtw, gamma=0.1), x, y),
        },
        work=("cells", batch * steps**2),
    )


def rhyme(quick: bool) -> Case:
    n, m = (8, 256) if quick else (64, 4096)
    query, bank = (
        rlkernels.Trajectories(curves(count, 128, seed).clamp(0, 1), torch.rand(count, 32, 8))
        for seed, count in enumerate((n, m))
    )
    return Case(
        op="rhyme_topk",
        shape=f"{n} x {m}, 128 rewards, 32 states of 8 features",
        providers={"rlkernels": lambda: rlkernels.rhyme_topk(query, bank, band=16)[0]},
        reference=None,
        work=("pairs", n * m),
    )


def cases(quick: bool) -> Iterator[Case]:
    yield from large(quick)
    for band in (None, 16):
        yield against_others(16, 64 if quick else 256, band)
    yield from (make(quick) for make in (top, soft, rhyme))
    if not quick:
        yield memory()
