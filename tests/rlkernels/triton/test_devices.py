"""Triton launches on the current device, so every op makes that the one of its tensors."""

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rlkernels import backend
from rlkernels.backend import on_its_device
from rlkernels.proof.cases import attention, logits, rank1, similarity
from rlkernels.rank1 import grouped
from rlkernels.rank1.layout import Tiling
from rlkernels.verdicts import PACKAGE, python_files

F32 = torch.float32
MODULES = ["logprobs.triton_kernels", "sampling.triton_kernels", "similarity.triton_kernels", "rank1.triton_kernels",
           "rank1.triton_vectors", "rank1.triton_update",
           "prefix_cache.triton_kernels", "prefix_cache.triton_tree"]  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """List launched kernels; fail a launch where no tensor's device is the current one."""
    devices = []
    names = set()
    kind = type(importlib.import_module("rlkernels.logprobs.triton_kernels")._forward_kernel)
    run = kind.run

    class Device(torch.cuda.device):  # torch asks whether something is one
        def __enter__(self):
            devices.append(self.idx)
            super().__enter__()

        def __exit__(self, *exception):
            devices.pop()
            return super().__exit__(*exception)

    def checked(kernel, *args, **settings):
        assert devices and {a.get_device() for a in args if isinstance(a, torch.Tensor)} == {devices[-1]}, kernel.fn
        names.add(kernel.fn)
        return run(kernel, *args, **settings)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(backend, "current_device", lambda: None)  # that of no tensor
    monkeypatch.setattr(kind, "run", checked)
    return names


def small_problems(on):
    """Return (op, a problem of it that the interpreter solves at once)."""
    heads = 2, 1, 16
    yield "write_kv", attention.write(2, (1, 16), 4, F32, on)
    yield "paged_attention", attention.paged([5, 6], [1, 1], heads, 4, F32, on)
    yield "shared_prefix_attention", attention.shared([4], 2, [1, 2], 1, heads, 4, F32, on)
    yield "merge_attention", attention.merge(2, 2, 16, F32, on)
    yield "grouped_attention", attention.grouped(([3], [1, 1], [0, 2]), heads, F32, on)
    yield "tree_attention", attention.tree([(1, 3), (2, 1), (2, 1)], heads, F32, on)
    yield "token_logprobs", logits.logprobs(2, 5, F32, True, on)
    yield "sample_tokens", logits.sample(2, 5, F32, [(1.0, 1.0, 0)], on)
    yield "dtw", similarity.warp(1, 2, 3, 1, "full", None, False, on)
    yield "delta_matvec", rank1.matvec(6, 8, F32, on)
    yield "add_rank1_", rank1.add(6, 8, F32, False, on)
    yield "top1_deltas", rank1.top1_many([(2, 8), (2, 20)], F32, on)


def test_kernels_are_launched_on_the_device_of_their_tensors_and_count_for_verdicts(launched, monkeypatch):
    """A change in what an op runs through voids the verdicts on it in the user's cache."""
    modules = [importlib.import_module(f"rlkernels.{name}") for name in MODULES]  # else some would be imported below
    # they compute nothing
    not_computing = {PACKAGE / f"{name}.py" for name in ("__init__", "_check", "_contexts", "_gradients", "backend",
                                                     "registry")}  # fmt: skip
    not_computing |= {*(PACKAGE / "proof").rglob("*.py")}
    monkeypatch.setattr(
        grouped, "Tiling", partial(Tiling, max_register_columns=16, rows=8, columns=16)
    )  # wider rows: other kernels
    monkeypatch.setattr(modules[-1], "MAX_UNCUT", 0)  # the prefix's tile of keys is cut, and its pieces are added up
    for op, problem in small_problems(torch.empty(0).device):
        traced_files = set()
        trace = sys.gettrace()
        sys.settrace(lambda frame, *_, traced_files=traced_files: traced_files.add(frame.f_code.co_filename))
        try:
            problem.call("triton")
            problem.call("torch")  # which is compared with it
        finally:
            sys.settrace(trace)
        ran = {path for path in map(Path, traced_files) if PACKAGE in path.parents}
        assert any("triton" in path.name for path in ran)
        assert ran - not_computing <= {*python_files(op)}
    kernels = {value.fn for m in modules for name, value in vars(m).items() if name.endswith("_kernel")}
    assert kernels == launched


def test_the_choice_of_a_device_is_none_without_a_gpu_and_compiles_into_one_graph():
    @on_its_device
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(3)
    torch.compiler.reset()
    assert torch.equal(torch.compile(double, fullgraph=True, backend="eager")(x), double(x))
