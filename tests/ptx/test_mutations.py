"""Faults planted in the PTX of our kernels, which the interpreter must notice. A larger sample, as a table:

PYTHONPATH=.:tests python -m ptx.test_mutations 90 4    # sm_90, each kind of fault at four places of each kernel
"""

import re
import sys
import warnings
from collections.abc import Callable

import pytest
import torch

from ptx import test_kernels
from ptx.gpu import Gpu
from ptx.memory import Fault

KINDS = {  # what is searched for, and what takes its place
    "barrier removed": (r"bar\.sync\s+0;", ""),
    "wait for copies removed": (r"cp\.async\.wait_group\s+\d+;", ""),
    "one group of copies more left running": (r"cp\.async\.wait_group\s+0;", "cp.async.wait_group 1;"),
    "fence of the asynchronous proxy removed": (r"fence\.proxy\.async\.shared::cta;", ""),
    "one group of products left running": (r"(wgmma\.wait_group\.sync\.aligned)\s+0;", r"\1 1;"),
    "mask loosened by one": (r"setp\.lt\.s(32|64)", r"setp.le.s\1"),
    "mask removed": (r"@%p\d+ ((?:ld|st)\.global)", r"\1"),
    "address of a load or store moved by a word": (r"((?:ld|st)\.shared\.\S+.*?\[%r\d+)(?:\+\d+)?\]", r"\1+4]"),
    "stride doubled": (r"(mul\.wide\.[su]32\s+\S+ \S+) 2;", r"\1 4;"),
}
# what runs, and the kernel of it that is changed
CASES: dict[str, tuple[Callable[[Gpu], None], str]] = {
    "paged attention, decode": (lambda _: test_kernels.attend([70, 17, 1], [1] * 3, 64), "_attend_kernel"),
    "paged attention, prefill": (lambda _: test_kernels.attend([70, 30], [40, 30], 64), "_attend_kernel"),
    "grouped attention, key": (lambda _: test_kernels.train(64, short=64), "_key_kernel"),
    "crossing tree attention, forward": (lambda _: test_kernels.train_tree(64, "triton/crossing"), "_forward_kernel"),
    "log-probabilities": (lambda _: test_kernels.score(), "_forward_kernel"),
    "sampling": (lambda _: test_kernels.sample(False), "_sample_kernel"),
    "writing": (lambda _: test_kernels.write(), "_write_kernel"),
}
FEW = [  # kernel, kind of fault, its place
    ("paged attention, decode", "barrier removed", 6), ("paged attention, decode", "wait for copies removed", 1),
    ("paged attention, decode", "one group of copies more left running", 0), ("writing", "mask removed", 0),
    ("log-probabilities", "barrier removed", 0),
]  # fmt: skip
MORE = [
    ("paged attention, prefill", "fence of the asynchronous proxy removed", 1),
    ("paged attention, prefill", "one group of products left running", 0),
    ("paged attention, prefill", "address of a load or store moved by a word", 0),
    ("grouped attention, key", "barrier removed", 3), ("grouped attention, key", "wait for copies removed", 2),
    ("sampling", "barrier removed", 2),
]  # fmt: skip


def attempt(case: str, kind: str, number: int, arch: int) -> tuple[str, int]:
    """-> what was noticed, "nothing" for a survivor; places of that kind."""
    (run, kernel), (pattern, instead), places = CASES[case], KINDS[kind], []

    def plant(ptx: str) -> str:
        if f".entry {kernel}(" not in ptx:
            return ptx
        places[:] = re.finditer(pattern, ptx)
        if number >= len(places):
            return ptx
        place = places[number]
        return ptx[: place.start()] + place.expand(instead) + ptx[place.end() :]

    torch.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with Gpu(arch, change=plant) as gpu:
            run(gpu)
    except Fault as fault:
        return f"fault: {str(fault).split(':')[0]}", len(places)
    except AssertionError:
        return "a wrong result", len(places)
    return "nothing", len(places)


@pytest.mark.parametrize(
    ("case", "kind", "number"), [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]
)
def test_a_planted_fault_is_noticed(case, kind, number):
    noticed, places = attempt(case, kind, number, 90)
    assert number < places and noticed != "nothing"


def main(arch: int, most: int) -> None:
    warnings.simplefilter("ignore")
    print(f"| kernel (sm_{arch}) | fault | places | tried | noticed by a fault | by a wrong result | survivors |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for kind in KINDS:
            _, places = attempt(case, kind, 10**6, arch)
            chosen = sorted({i * places // most for i in range(most)}) if places else []
            verdicts = [attempt(case, kind, number, arch)[0] for number in chosen]
            if verdicts:
                lost = [str(number) for number, what in zip(chosen, verdicts) if what == "nothing"]
                wrong = verdicts.count("a wrong result")
                stopped = len(verdicts) - wrong - len(lost)
                cells = case, kind, places, len(verdicts), stopped, wrong, ", ".join(lost) or "none"
                print("|", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
