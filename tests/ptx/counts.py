"""What the kernels do in the cases of test_kernels.py, counted while they run; a Markdown table:

PYTHONPATH=.:tests python -m ptx.counts 90
"""

import sys
import warnings

import torch

from ptx.block import CONTROL
from ptx.gpu import Gpu
from ptx.test_kernels import CASES, named

CLASSES = {
    "matrix": ("mma", "wgmma", "ldmatrix", "stmatrix"), "memory": ("ld", "st", "cp", "atom"),
    "between lanes": ("shfl", "redux"), "control": CONTROL,
}  # fmt: skip


def main(arch: int) -> None:
    warnings.simplefilter("ignore")
    print(f"| kernel (sm_{arch}) | case | instructions a warp | {' | '.join(CLASSES)} | other | bytes a block |")
    print(f"| --- | --- |{' --- |' * (len(CLASSES) + 3)}")
    for case, (run, _) in CASES.items():
        torch.manual_seed(0)
        with Gpu(arch) as gpu:
            run(gpu)
        for launch in {id(launch.block): launch for launch in gpu.launches}.values():
            block = launch.block
            issued = {name: count / (block.runs * block.warps) for name, count in block.issued.items()}
            parts = [sum(issued.get(name, 0) for name in names) for names in CLASSES.values()]
            numbers = [sum(issued.values()), *parts, sum(issued.values()) - sum(parts), block.moved / block.runs]
            name = next(iter(named(launch)), launch.name.split(":")[1])
            print(f"| {name} | {case} | {' | '.join(f'{number:,.0f}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
