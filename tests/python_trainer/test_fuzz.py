"""Hostile input: the fixed share of ``python -m bench.faults fuzz``, and what it has found."""

import pytest
import torch
from safetensors.torch import save

from bench.faults.fuzz import TARGETS, Written, attempt, run_target
from bench.faults.tensors import Op, target
from python_trainer.accelerators.rhyme.database import StepRecord, unpack_tensors
from python_trainer.accelerators.rhyme.matching import PARTS, curve_of
from python_trainer.errors import UserError
from python_trainer.run_directory import load_evaluations, read_metrics


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_is_accepted_or_refused_by_one_line(name):
    found = run_target(TARGETS[name], 60)
    assert found["refused"] and (found["accepted"] or name == "the command line")


@pytest.mark.parametrize("error", [KeyError("x"), UserError(""), OSError(28, "full")])
def test_the_search_sees_what_it_is_for(error):
    def fails():
        raise error

    with pytest.raises((KeyError, AssertionError, OSError)):
        run_target(lambda data, folder: attempt(fails), 5)
    with pytest.raises(Written):
        run_target(lambda data, folder: attempt(lambda: (folder / "made").touch(), folder), 5)


@pytest.mark.parametrize("fails", ["another result", "a write", "another error", "no refusal", "no name"])
def test_what_is_wrong_with_an_op_is_seen(fails):
    def call(u, backend):
        if not isinstance(u, torch.Tensor) or u.dtype != torch.float32 or u.requires_grad:
            raise TypeError("u must be float32")
        bad = backend == "auto" and u.dim() != 1
        if bad and fails in ("a write", "no name"):
            u[0] = 7
            raise ValueError("u must be a vector" if fails == "a write" else "bad")
        if bad and fails == "another error":
            raise RuntimeError("u")
        if u.dim() != 1 and not (bad and fails == "no refusal"):
            raise ValueError("u must be a vector")
        return u + (fails == "another result" and backend == "auto")

    op = Op(call, lambda random, sizes: {"u": torch.zeros(sizes[0])})
    with pytest.raises((AssertionError, RuntimeError)):
        run_target(target(op), 100)


def test_damaged_files_of_a_run_are_named(tmp_path):
    with pytest.raises(UserError, match="tensors of the retrospective database are damaged"):
        unpack_tensors(b"\0" * 8 + b"{}")
    whole = {name: torch.ones(bins) for name, bins in PARTS.items()}
    for damaged in ({"ngrams": -whole["ngrams"]}, {"lengths": torch.ones(31)}, {"ngramr": whole.pop("ngrams")}):
        with pytest.raises(UserError, match="sketches in the retrospective database are damaged"):
            curve_of(1, [StepRecord(1, 0.5, 0.5, whole | damaged)])
    with pytest.raises(UserError, match="damaged .'response_ids'."):
        unpack_tensors(save({"response_idr": torch.ones(1)}), "response_ids")
    (tmp_path / "eval_test.safetensors").write_bytes(b"\0" * 8)
    with pytest.raises(UserError, match="eval_test.safetensors is damaged"):
        load_evaluations(tmp_path)
    for text in (b"[1]\n", b'{"step": 0}\n{"step": \n', b"\xff\n", b"[" * 100_000 + b"\n", b'{"step": "1"}\n'):
        (tmp_path / "metrics.jsonl").write_bytes(text)
        with pytest.raises(UserError, match="metrics.jsonl.* is damaged"):
            read_metrics(tmp_path)
