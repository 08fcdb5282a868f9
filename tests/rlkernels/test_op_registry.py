"""Every op is registered everywhere: the records against the lists that do not follow from them."""

import importlib
import re
from collections.abc import Iterable

import op_calls
import pytest
import torch
from support import ROOT

import rlkernels
from bench import _calls
from bench.faults import tensors
from bench.gpu.cases import LARGE
from rlkernels import _fakes, backend, registry
from rlkernels.proof.cases import SMALL, cases_of
from rlkernels.proof.workload import Workload
from rlkernels.registry import Op


def compiled_ops() -> set[str]:
    """Names of the ops with tensors in the schemas of ``csrc/ops``, with and without CUDA."""
    text = "".join(path.read_text() for path in (ROOT / "csrc/ops").glob("*.cpp"))
    schemas = re.findall(r'm\.def\(\s*"(\w+)\((.*?)->', text, re.DOTALL)
    return {name for name, arguments in schemas if "Tensor" in arguments}


def is_defined(op: Op) -> bool:
    return hasattr(importlib.import_module(f"rlkernels.{op.folder}"), op.name)


def gaps(ops: Iterable[Op] = registry.ALL) -> list[str]:
    """Describe each op that a place lacks, and each name there that has no record."""
    functions = {op.name: op for op in ops if not op.on_host}
    exported = {op.name for op in functions.values() if op.folder != "decoder"}  # used as rlkernels.decoder.NAME
    called = _calls.inputs().keys()
    known = functions.keys() | called  # other exports are classes, and functions that are no op
    proved = {op.name for op in ops if op.on_gpu}
    verdict_names = {name for op in ops if op.on_gpu and not op.like for name in op.verdict_names}
    places = {  # where -> ops that belong there, ops that are there
        "rlkernels/FOLDER/__init__.py": (functions.keys(), {name for name, op in functions.items() if is_defined(op)}),
        "_PUBLIC of rlkernels/__init__.py": (exported, known & rlkernels._EXPORTS.keys()),
        "rlkernels/_fakes.py": (compiled_ops(), _fakes.FAKES.keys()),
        "SMALL in rlkernels/proof/cases": (proved, {case.op for case in SMALL}),
        "timed() in rlkernels/proof/cases": (verdict_names, {case.op for case in cases_of(Workload()) if case.timed}),
        "inputs() of bench/_calls.py": (functions.keys(), called),
        "HOST of tests/op_calls.py": ({op.name for op in ops if op.on_host}, op_calls.HOST.keys()),
        "OPS of bench/faults/tensors.py": (exported, tensors.OPS.keys()),
        "LARGE of bench/gpu/cases.py": (proved, {case.op for case in LARGE}),
    }
    missing = [f"{where} lacks {op}" for where, (expected, actual) in places.items() for op in expected - actual]
    unknown = [f"{where} has {op}, which has no record" for where, (expected, actual) in places.items()
               for op in actual - expected]  # fmt: skip
    return sorted(missing + unknown)


def test_every_op_is_registered_everywhere():
    assert not gaps()


def test_a_new_op_is_told_where_it_is_missing():
    new = Op("new_op", "sampling", triton=True, regimes=("wide",))
    assert gaps([*registry.ALL, new]) == [
        "LARGE of bench/gpu/cases.py lacks new_op",
        "OPS of bench/faults/tensors.py lacks new_op",
        "SMALL in rlkernels/proof/cases lacks new_op",
        "_PUBLIC of rlkernels/__init__.py lacks new_op",
        "inputs() of bench/_calls.py lacks new_op",
        "rlkernels/FOLDER/__init__.py lacks new_op",
        "timed() in rlkernels/proof/cases lacks new_op",
        "timed() in rlkernels/proof/cases lacks new_op/wide",
    ]


def test_an_op_without_a_record_is_named(monkeypatch):
    monkeypatch.setitem(_fakes.FAKES, "old_op", lambda: None)
    without_silu = [op for op in registry.ALL if op.name != "silu_mul"]
    assert gaps(without_silu) == [
        "inputs() of bench/_calls.py has silu_mul, which has no record",
        "rlkernels/_fakes.py has old_op, which has no record",
    ]


def test_folders_are_those_of_the_exports():
    for op in registry.ALL:
        if op.name in rlkernels._EXPORTS:
            assert rlkernels._EXPORTS[op.name] == f"rlkernels.{op.folder}", op.name


def test_records_of_gpus_are_of_known_ops():
    assert {name for by_op in backend.RECORDS.values() for name in by_op} <= registry.OPS.keys()


@pytest.mark.parametrize("op", _calls.inputs())
def test_gradients_are_those_of_the_record(op):
    """All other arguments raise if they require one, or get none."""
    arguments = _calls.inputs()[op]
    with_gradient = set()
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            leaf = value.clone().requires_grad_()
            try:
                results = op_calls.run(op, arguments | {name: leaf})
            except (TypeError, ValueError):
                continue
            recorded = [result.sum() for result in results if result.requires_grad]
            if recorded and torch.autograd.grad(recorded, leaf, allow_unused=True)[0] is not None:
                with_gradient.add(name)
    assert with_gradient == {*registry.OPS[op].gradients}
