"""Faults and hostile input: the harness sees what it is for, records say what ran, what was found is named."""

import shutil
from unittest.mock import Mock

import pytest
import torch
from conftest import train
from safetensors.torch import save
from support import run_python

from bench.faults import records
from bench.faults.case import Case, Outcome, Place
from bench.faults.fuzz import TARGETS, Written, attempt, run_target
from bench.faults.tensors import Op, target
from bench.faults.training import Ended, differences
from python_trainer.accelerators.rhyme.database import unpack_tensors
from python_trainer.errors import UserError
from python_trainer.run.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from python_trainer.run.directory import append_row, read_metrics


def test_records_say_what_ran():
    rows = records.read(records.RECORDS)
    keys = {"fault", "variant", "seed", "times", "problems", "date", "commit", "versions"}
    assert rows and all(keys <= set(row) for row in rows) and "| SIGKILL |" in records.table(rows)


def test_the_newest_row_of_a_case_counts(tmp_path):
    row = {"fault": "SIGKILL", "variant": "plain", "seed": 0, "times": 3}
    records.add(tmp_path / "rows.jsonl", row | {"problems": ["lost"]})
    records.add(tmp_path / "rows.jsonl", row | {"problems": []})
    records.add(tmp_path / "rows.jsonl", row | {"variant": "ppo", "problems": ["lost"]})
    rows = records.read(tmp_path / "rows.jsonl")
    assert [row["problems"] for row in rows] == [[], ["lost"]]
    assert "| SIGKILL | plain, ppo | 6 | 3 |" in records.table(rows)


@pytest.mark.slow
def test_a_run_is_killed_by_the_command(tmp_path):
    """Run it in a process of its own: one that has used several threads must not be forked."""
    rows = tmp_path / "rows.jsonl"
    command = ["-m", "bench.faults", "kills", "--only", "SIGKILL, plain,", "--records", str(rows)]
    for _ in range(2):  # the second time there is nothing left to do
        run_python(*command, "--work-dir", str(tmp_path / "work"))
    (row,) = records.read(rows)
    assert row["problems"] == [] and len(row["ended"]) == 3 and rows.read_text().count("\n") == 1


def test_what_is_lost_is_seen(make_config, tmp_path):
    for name in "ab":
        train(make_config(max_steps=2), tmp_path / name)
    assert differences(tmp_path / "a", tmp_path / "b") == []
    folder = tmp_path / "a" / "checkpoints"
    state = load_checkpoint(list_checkpoints(folder)[-1])
    name, weight = next(iter(state["model"].items()))
    state["model"][name] = torch.nextafter(weight, torch.tensor(1e9))
    state["state"]["policy_version"] += 1
    save_checkpoint(folder, 2, state, keep=2)
    append_row(tmp_path / "a" / "metrics.jsonl", {"step": 3})
    assert differences(tmp_path / "a", tmp_path / "b") == [
        "model differs", "policy_version differs: 3 and 2", "rows of metrics differ"
    ]  # fmt: skip
    shutil.rmtree(folder)
    assert differences(tmp_path / "a", tmp_path / "b")[0].startswith("no checkpoint that can be read")


@pytest.mark.parametrize(
    ("ended", "problem"),
    [
        (Ended(0, ""), None),
        (Ended(2, "error: full\n"), None),
        (Ended(None, ""), "exit code None"),
        (Ended(1, "Traceback (most recent call last):\nKeyError: 3\n"), "a traceback: KeyError: 3"),
        (Ended(2, "error: a\nerror: b\n"), "2 lines of errors"),
        (Ended(2, "nothing"), "0 lines of errors"),
        (Ended(0, "SIGTERM: stopped after step 3, which is saved"), "step 3 was said to be saved, and is not"),
    ],
)
def test_what_a_run_must_not_end_with(tmp_path, ended, problem):
    place = Place(tmp_path, Case("x", "plain", 0, lambda place, case: Outcome()))
    outcome = Outcome()
    place.check_end(outcome, ended, 0, 2)
    assert bool(outcome.problems) == bool(problem)
    assert problem is None or any(text.startswith(problem) for text in outcome.problems)


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_is_accepted_or_refused_by_one_line(name):
    verdicts = run_target(TARGETS[name], 60)
    assert verdicts["refused"] and (verdicts["accepted"] or name == "the command line")


@pytest.mark.parametrize("error", [KeyError("x"), UserError(""), OSError(28, "full")])
def test_the_search_sees_what_it_is_for(error):
    with pytest.raises((KeyError, AssertionError, OSError)):
        run_target(lambda data, folder: attempt(Mock(side_effect=error)), 5)
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

    op = Op(call, lambda n, *_: {"u": torch.zeros(n)})
    with pytest.raises((AssertionError, RuntimeError)):
        run_target(target(op), 100)


def test_damaged_files_of_a_run_are_named(tmp_path):
    with pytest.raises(UserError, match="tensors of the retrospective database are damaged"):
        unpack_tensors(b"\0" * 8 + b"{}")
    with pytest.raises(UserError, match="damaged .'response_ids'."):
        unpack_tensors(save({"response_idr": torch.ones(1)}), "response_ids")
    for text in (b"[1]\n", b'{"step": 0}\n{"step": \n', b"\xff\n", b"[" * 100_000 + b"\n", b'{"step": "1"}\n'):
        (tmp_path / "metrics.jsonl").write_bytes(text)
        with pytest.raises(UserError, match="metrics.jsonl.* is damaged"):
            read_metrics(tmp_path)
