"""Triton launches on the current device, so every op makes that the one of its tensors."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import rlkernels
from bench.gpu import records
from rlkernels.backend import on_its_device

MODULES = ["logprobs.triton_kernels", "sampling.triton_kernels", "similarity.triton_kernels", "rank1.triton_kernels",
           "rank1.triton_vectors", "rank1.triton_update",
           "prefix_cache.triton_kernels", "prefix_cache.triton_grouped"]  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """The kernels that have been launched; a launch fails where no tensor's device is the current one."""
    held, names, kind = [], set(), type(importlib.import_module("rlkernels.logprobs.triton_kernels")._forward_kernel)
    run = kind.run

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            held.append(self.index)

        def __exit__(self, *_):
            held.pop()

    def checked(kernel, *args, **settings):
        assert held and {a.get_device() for a in args if isinstance(a, torch.Tensor)} == {held[-1]}, kernel.fn
        names.add(kernel.fn)
        return run(kernel, *args, **settings)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(kind, "run", checked)
    return names


def attention():
    heads, ints = {"scale": 0.5, "backend": "triton"}, lambda *x: torch.tensor(x, dtype=torch.int32)
    query, caches, table = torch.randn(2, 2, 16), torch.randn(2, 3, 4, 1, 16), ints([0, 1], [0, 2])
    rlkernels.write_kv(query[:, :1], query[:, :1], *caches, torch.tensor([4, 8]), backend="triton")
    group = ints([0]), ints(4), ints(0, 2)
    rlkernels.paged_attention(query, *caches, table, ints(5, 6), ints(0, 1, 2), **heads)
    rlkernels.shared_prefix_attention(query, *caches, *group, table[:, 1:].contiguous(), ints(1, 2), ints(0, 1, 2),
                                      **heads)  # fmt: skip
    parts = torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2)
    rlkernels.merge_attention(parts[0][0], parts[1][0], parts[0][1], parts[1][1], backend="triton")
    leaf, layout = torch.randn(5, 2, 16, requires_grad=True), rlkernels.GroupedLayout([3], [1, 1], [0, 2])
    rlkernels.grouped_attention(leaf, leaf, leaf, layout, **heads).sum().backward()


def logits_and_curves():
    logits, ids = torch.randn(2, 5, requires_grad=True), torch.tensor([1, 4])
    rlkernels.token_logprobs(logits, ids, backend="triton").sum().backward()
    rlkernels.sample_tokens(logits.detach(), torch.rand(2), backend="triton")
    rlkernels.dtw(torch.randn(1, 3), torch.randn(2, 4), backend="triton")


def updates():
    from rlkernels.rank1 import grouped
    from rlkernels.rank1.layout import Tiling

    pairs = [(torch.randn(6, columns), torch.randn(6, columns)) for columns in (8, 20)]
    rlkernels.delta_matvec(*pairs[0], torch.randn(8), backend="triton")
    rlkernels.add_rank1_(pairs[0][0], torch.randn(6), torch.randn(8), 1e-3, backend="triton")
    tiling = Tiling(widest=16, rows=8, columns=16)
    settings = {"tol": 1e-2, "max_passes": 1, "min_passes": 1, "rank": 1, "seed": 0}
    grouped.leading_deltas(pairs, [None, None], tiling=tiling, **settings)


OPS = {
    attention: ("write_kv", "paged_attention", "shared_prefix_attention", "merge_attention", "grouped_attention"),
    logits_and_curves: ("token_logprobs", "sample_tokens", "dtw"),
    updates: ("delta_matvec", "add_rank1_", "top1_deltas"),
}


def test_kernels_are_launched_on_the_device_of_their_tensors_and_count_for_records(launched):
    """A change in what an op runs through takes its record out of ``rlkernels/records.json``."""
    modules = [importlib.import_module(f"rlkernels.{name}") for name in MODULES]  # else some would be imported below
    package = records.ROOT / "rlkernels"
    aside = {package / name for name in ("__init__.py", "_check.py", "backend.py")}  # they compute nothing
    for call, ops in OPS.items():
        seen, before = set(), sys.gettrace()
        sys.settrace(lambda frame, *_, seen=seen: seen.add(frame.f_code.co_filename))
        try:
            call()
        finally:
            sys.settrace(before)
        ran = {path for path in map(Path, seen) if package in path.parents}
        assert any("triton" in path.name for path in ran)
        assert ran - aside <= {records.ROOT / name for op in ops for name in records.files(op, "triton")}
    kernels = {value.fn for m in modules for name, value in vars(m).items() if name.endswith("_kernel")}
    assert kernels == launched


def test_the_choice_of_a_device_is_none_without_a_gpu_and_compiles_into_one_graph():
    @on_its_device
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(3)
    torch.compiler.reset()
    assert torch.equal(torch.compile(double, fullgraph=True, backend="eager")(x), double(x))
