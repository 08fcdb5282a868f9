"""What the present code makes of the proof's problems, in JSON, which ``python -m bench.gpu.records`` compares.

PYTHONPATH=FOLDER:.:tests python -m ptx.proof compile 90 write_kv:triton dtw:cuda    # by the Triton in that folder
PYTHONPATH=FOLDER:.:tests python -m ptx.proof count 90 write_kv:triton "write_kv/many:triton:65536 tokens, 8 x 128"

``compile``: PTX and launches of the timed cases, or of the case of ``bench.gpu`` with that label, on a GPU that is not
there and with zeros for numbers. ``count``: the instructions and bytes of smaller problems, by the interpreter, what is
wrong in their results, and what ptxas reports.
"""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from pretend_gpu import STAND_INS, GPUTensor, pretended
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import rlkernels
from bench.gpu.cases import LARGE
from ptx import test_dtw_cuda as dtw_cuda
from ptx.block import Block
from ptx.gpu import Gpu
from ptx.memory import Fault, Global
from ptx.test_resources import Built, cuda_kernels, cuda_name, measure
from rlkernels.proof.cases import attention, cases_of, logits, rank1, similarity
from rlkernels.proof.compiled import Kernels, collect, normalize, split
from rlkernels.proof.problem import Problem, Tolerance, copy
from rlkernels.proof.workload import Workload
from rlkernels.registry import OPS

CPU, BF16 = torch.device("cpu"), torch.bfloat16
WORK = Workload()
HEADS, BLOCK, PLAIN = (WORK.heads, WORK.kv_heads, WORK.head_dim), attention.BLOCK_SIZE, [(1.0, 1.0, 0)]
# the timed cases with fewer rows, sequences and passes. Counts of records are of these: whoever changes one counts the
# code of each record again
COUNTED: dict[str, list[Callable[[torch.device], Problem]]] = {
    "paged_attention": [partial(attention.paged, [512, 500], [1, 1], HEADS, BLOCK, BF16)],
    "paged_attention/prefill": [partial(attention.paged, [128], [128], HEADS, BLOCK, BF16)],
    "shared_prefix_attention": [partial(attention.shared, [256], 8, [256], 1, HEADS, BLOCK, BF16)],
    "write_kv": [partial(attention.write, 40, HEADS[1:], BLOCK, BF16)],
    "write_kv/many": [partial(attention.write, 40, HEADS[1:], BLOCK, BF16)],
    "merge_attention": [partial(attention.merge, 40, WORK.heads, WORK.head_dim, BF16)],
    "grouped_attention": [partial(attention.grouped, ([64], [48, 80], [0, 2]), HEADS, BF16)],
    "tree_attention": [partial(attention.tree, [(1, 40), (2, 40), (2, 30)], HEADS, BF16)],
    "token_logprobs": [partial(logits.logprobs, 3, WORK.vocab, BF16, True)],
    "linear_token_logprobs": [partial(logits.linear_logprobs, 3, 1 << 15, 64, BF16)],
    "sample_tokens": [partial(logits.sample, 3, WORK.vocab, BF16, PLAIN)],
    "verify_drafts": [partial(logits.verify, [2], WORK.vocab, BF16, PLAIN)],
    "dtw": [partial(similarity.warp, 1, 2, 260, 1, "full", None, False)],
    "dtw/wide": [partial(similarity.warp, 1, 2, 40, 16, "full", None, False)],
    "top1_delta": [partial(rank1.top1, 64, WORK.hidden, BF16)],
    "top1_deltas": [partial(rank1.top1_many, [(64, WORK.hidden), (40, WORK.hidden), (36, 4 * WORK.hidden)], BF16)],
    "delta_matvec": [partial(rank1.matvec, 64, WORK.hidden, BF16)],
    "add_rank1_": [partial(rank1.add, 64, WORK.hidden, BF16, False)],
    "add_rank1_/large": [partial(rank1.add, 64, 4096, BF16, False)],
}  # fmt: skip
aten = torch.ops.aten
PRODUCTS = [getattr(packet, overload) for packet in (aten.mm, aten.addmm, aten.bmm) for overload in packet.overloads()]


def of_that_shape(product: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """A product of matrices that is not computed."""
    if out is not None:
        return out
    made = product(*tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, args), **kwargs)
    return torch.zeros(made.shape, dtype=made.dtype)


def no_tokens(rows: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch's sample, which makes drafts."""
    return torch.zeros(len(rows), dtype=torch.int64, device=rows.device), torch.zeros(len(rows), device=rows.device)


@contextmanager
def not_computed() -> Iterator[None]:
    """Random numbers and products are zeros, and flags that the host waits for are false."""

    def scalar(x: torch.Tensor) -> Any:
        return x.dtype != torch.bool and x.item()

    def listed(self: GPUTensor) -> Any:
        self.waits["tolist"] += 1
        return (self.numbers & False if self.dtype == torch.bool else self.numbers).tolist()

    stand_ins: dict[Any, Any] = {product: partial(of_that_shape, product) for product in PRODUCTS}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(STAND_INS, stand_ins | {aten._local_scalar_dense.default: scalar}))
        stack.enter_context(patch.object(GPUTensor, "tolist", listed))
        for name in ("rand", "randn"):
            stack.enter_context(patch.object(torch, name, torch.zeros))
        yield


@contextmanager
def dtw_in_cuda(arch: int, entries: list[str]) -> Iterator[None]:
    """Take note of the kernel that ``torch.ops.rlkernels.dtw_warps`` launches, which a build without CUDA lacks."""

    def dtw_warps(x: Any, y: Any, *lengths: Any) -> Any:
        *_, band, subsequence = lengths
        radius = dtw_cuda.NO_BAND if band < 0 else band
        pattern = dtw_cuda.pattern_of(x.shape[1], y.shape[1], x.shape[2], radius, subsequence)
        entries.append(dtw_cuda.entry_of(arch, pattern))
        places = x.new_empty((2, len(x), len(y)), dtype=torch.int64)
        return x.new_empty((len(x), len(y))), *places

    with patch.object(torch.ops.rlkernels, "dtw_warps", dtw_warps, create=True):
        yield


def launch_timed(arch: int, op: str, backend: str, label: str = "") -> tuple[list[tuple[str, str, Any]], Counter[str]]:
    """-> name, PTX and launch (None in CUDA C++) of every kernel; what is launched in all, and waits of the host."""
    kernels: list[tuple[str, str, Any]] = []
    counts: Counter[str] = Counter()
    cases = [case for case in cases_of(WORK) if case.op == op and case.timed]
    if label:
        cases = [case for case in LARGE if (case.op, case.label) == (OPS[op].name, label)]
    for case in cases:
        entries: list[str] = []
        with pretended() as waits, Gpu(arch, execute=False) as gpu, not_computed(), dtw_in_cuda(arch, entries):
            with patch.object(rlkernels, "sample_tokens", no_tokens):
                problem = case.make(torch.device("cuda", 0))
            for _ in range(2):  # what is done once for each signature is over
                for each in (gpu.launches, entries, waits, GPUTensor.launches):
                    each.clear()
                problem.call(backend)
            ours = len(gpu.launches) + len(entries)
            counts.update(launches=ours + GPUTensor.launches.total(), waits=waits.total())
        kernels += [(launch.kernel.__name__, launch.built.asm["ptx"], launch) for launch in gpu.launches]
        if entries:
            texts = split(dtw_cuda.compiled(arch))
            kernels += [(cuda_name("dtw.cu", entry), texts[entry], None) for entry in entries]
    return kernels, counts


def compile_timed(arch: int, *pair: str) -> dict[str, Any]:
    """-> kernels (PTX by name), launches, waits."""
    kernels, counts = launch_timed(arch, *pair)
    return {"kernels": collect([(name, ptx) for name, ptx, _ in kernels]), **counts}


def measure_timed(arch: int, *pair: str) -> dict[str, Any]:
    """-> launches, waits and, by kernel, what ptxas reports."""
    kernels, counts = launch_timed(arch, *pair)
    by_name: Kernels = collect([(name, ptx) for name, ptx, _ in kernels])
    names = {text: name for name, text in by_name.items()}
    builds: dict[str, Built] = {}
    for _, ptx, launch in kernels:
        name = names[normalize(ptx)]
        if launch is not None and name not in builds:
            builds[name] = measure(name, launch, arch)
    if any(launch is None for *_, launch in kernels):
        builds |= {built.name: built for built in cuda_kernels("dtw.cu", arch, warps=4) if built.name in by_name}
    reports = {name: {"registers": built.registers, "spilled bytes": built.stack_bytes,
                      "shared bytes": built.shared_bytes, "blocks per SM": built.blocks}
               for name, built in builds.items()}  # fmt: skip
    return {**counts, "ptxas": reports}


class Known(TorchDispatchMode):
    """Tell the memory of all tensors: a kernel may find one from another."""

    def __init__(self, memory: Global) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.memory.know(tensor)
        return out


def count(arch: int, op: str, backend: str, label: str = "") -> dict[str, Any]:
    """-> instructions and bytes by kernel in the problems of ``COUNTED``, what ptxas reports, launches and waits; only
    ``wrong`` where a result is not right."""
    blocks: list[tuple[str, Block]] = []

    def dtw_warps(*args: Any) -> Any:
        *tensors, band, subsequence = args
        warps = len(tensors[0]) * len(tensors[1])
        ran, *out = dtw_cuda.run(arch, *tensors, None if band < 0 else band, subsequence, warps=warps)
        blocks.extend((cuda_name("dtw.cu", entry), block) for entry, block in ran.items())
        return out

    problems, outputs = [], []
    torch.manual_seed(0)
    with Gpu(arch, torch_fills=True) as gpu, patch.object(torch.ops.rlkernels, "dtw_warps", dtw_warps, create=True):
        for make in COUNTED[op]:
            with Known(gpu.memory):
                problems.append(make(CPU))
            if reset := problems[-1].reset:
                reset()
            try:
                outputs.append(copy(problems[-1].call(backend)))
            except Fault as fault:
                return {"wrong": f"fault: {fault}"}
    for launch in gpu.launches:
        assert launch.block
        blocks.append((launch.kernel.__name__, launch.block))
    instructions, moved = Counter[str](), Counter[str]()
    for name, block in {id(block): (name, block) for name, block in blocks}.values():
        instructions[name] += block.issued.total()
        moved[name] += block.moved
    for problem, output in zip(problems, outputs):
        error, allowed = Tolerance(problem).judge(output)
        if error > allowed:
            return {"wrong": f"an error of {error:.2g}, allowed {allowed:.2g}"}
    return measure_timed(arch, op, backend, label) | {"instructions": instructions, "bytes": moved}


def main(command: str, arch: str, *pairs: str) -> None:
    warnings.simplefilter("ignore")
    does = {"compile": compile_timed, "count": count}[command]
    print(json.dumps({pair: does(int(arch), *pair.split(":", 2)) for pair in pairs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
