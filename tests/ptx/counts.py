"""What the kernels do in the cases of test_kernels.py, counted while they run, and what limits them; a Markdown table:

PYTHONPATH=.:tests python -m ptx.counts 90
"""

import sys
import warnings
from dataclasses import dataclass

import torch

from ptx.block import CONTROL
from ptx.gpu import Gpu
from ptx.test_kernels import CASES, named

CLASSES = {
    "matrix": ("mma", "wgmma", "ldmatrix", "stmatrix"), "memory": ("ld", "st", "cp", "atom"),
    "between lanes": ("shfl", "redux"), "control": CONTROL,
}  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """Data sheet of a GPU. A multiprocessor has four warp schedulers, and each issues one instruction a cycle."""

    name: str
    multiprocessors: int
    hertz: float
    bytes_per_second: float
    flops: float  # of bfloat16 products

    def microseconds(self, instructions: float, moved: float, flops: float) -> list[float]:
        """Least time of a block that has a multiprocessor and its share of the memory to itself, by each limit."""
        share = self.multiprocessors * 1e6
        return [instructions / 4 / self.hertz * 1e6, moved * share / self.bytes_per_second, flops * share / self.flops]


PEAKS = {80: Peaks("A100", 108, 1.41e9, 2.04e12, 312e12), 90: Peaks("H100", 132, 1.83e9, 3.35e12, 989e12)}
LIMITS = ("issue", "memory", "tensor cores")


def main(arch: int) -> None:
    warnings.simplefilter("ignore")
    peaks = PEAKS[arch]
    limits = [f"µs by {limit}" for limit in LIMITS]
    headings = [f"kernel ({peaks.name})", "case", "instructions a warp", *CLASSES, "other", "bytes a block", *limits]
    print(f"| {' | '.join(headings)} |\n|{' --- |' * len(headings)}")
    for case, (run, _) in CASES.items():
        torch.manual_seed(0)
        with Gpu(arch) as gpu:
            run(gpu)
        for launch in {id(launch.block): launch for launch in gpu.launches}.values():
            block = launch.block
            issued = {name: count / (block.runs * block.warps) for name, count in block.issued.items()}
            total, moved, flops = sum(issued.values()), block.moved / block.runs, block.flops / block.runs
            parts = [sum(issued.get(name, 0) for name in names) for names in CLASSES.values()]
            counts = [f"{number:,.0f}" for number in (total, *parts, total - sum(parts), moved)]
            times = peaks.microseconds(total * block.warps, moved, flops)
            marked = [f"**{time:.2f}**" if time == max(times) else f"{time:.2f}" for time in times]
            name = named(launch) or launch.kernel.__name__
            print(f"| {' | '.join([name, case, *counts, *marked])} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
